from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from live_server import LiveServer, make_model_folder, start_fake_server


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def server(model_folder: Path) -> Iterator[LiveServer]:
    """One server with two replicas that repeat the prompt; tests must leave it as they found it."""
    with start_fake_server(model_folder, "--replicas", "2", "--num-blocks", "64") as live:
        yield live


@pytest.fixture(scope="session")
def tools_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Repeats the last message: a test has the model say what it likes. The template knows tools and shows none."""
    template = "{% if tools is defined %}{{ messages[-1].content }}{% endif %}"
    folder = make_model_folder(tmp_path_factory.mktemp("tools"), template)
    with start_fake_server(folder, "--num-blocks", "128") as live:
        yield live


@pytest.fixture(scope="session")
def slow_server(model_folder: Path) -> Iterator[LiveServer]:
    """One replica with steps of 20 ms: a stream of 1000 tokens lasts 20 s."""
    with start_fake_server(model_folder, "--model", "toy", "--step-s", "0.02", "--num-blocks", "1024") as live:
        yield live


@pytest.fixture(scope="session")
def slow_stop_server(model_folder: Path) -> Iterator[LiveServer]:
    """Repeats the prompt, 10 ms a token."""
    with start_fake_server(model_folder, "--step-s", "0.01") as live:
        yield live
