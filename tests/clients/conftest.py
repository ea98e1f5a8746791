"""Clients of others, unchanged, against replicas of our own and through the gateway in front of a foreign server.

The foreign server is an Expediter too: what counts is that nothing but HTTP lies between. OpenAI's client is among the
development tools; the others have environments of their own, which `make test-clients` makes and names in
EXPEDITER_PEERS. Without it their tests are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from expediter.assembly.server_process import running_server
from expediter.engine.default_model import resolve_model


@pytest.fixture(scope="session")
def own() -> Iterator[str]:
    """SmolLM2 on one replica."""
    with running_server(["--num-gpu-blocks-override", "1024"]) as url:
        yield url


@pytest.fixture(scope="session")
def forwarded(own: str) -> Iterator[str]:
    """The gateway with that server as its only backend."""
    with running_server(["--backend", own]) as url:
        yield url


@pytest.fixture(params=["own", "forwarded"])
def url(request: pytest.FixtureRequest) -> str:
    address: str = request.getfixturevalue(request.param)
    return address


@pytest.fixture(scope="session")
def tokenizer() -> Path:
    return resolve_model()
