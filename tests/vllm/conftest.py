"""Two real vLLM servers with the gateway in front. `make test-vllm` makes vLLM's environment and runs these."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from benchmarks.peers.environments import VLLM
from benchmarks.peers.vllm_server import VllmServer, vllm_servers
from tests.engines.engine_door import interpreter
from vllm_door import VllmDoor, kv_events_flags

from expediter.assembly.server_process import free_port, running_server
from expediter.engine.default_model import resolve_model

NUM_BLOCKS = 192


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    return interpreter(VLLM, "test-vllm")


@pytest.fixture(scope="session")
def event_ports() -> list[int]:
    return [free_port(), free_port()]


@pytest.fixture(scope="session")
def pair(vllm_python: Path, event_ports: list[int]) -> Iterator[Sequence[VllmServer]]:
    flags = [kv_events_flags(port) for port in event_ports]
    with vllm_servers(vllm_python, resolve_model(), flags, num_blocks=NUM_BLOCKS) as servers:
        yield servers


@pytest.fixture(scope="session")
def start_door(
    pair: Sequence[VllmServer], event_ports: list[int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """Start a gateway in front of the pair; all are stopped at the end."""
    with ExitStack() as stack:

        def start(*flags: str, kv_events: bool = False, tokenizer: bool = False) -> VllmDoor:
            path = tmp_path_factory.mktemp("door") / "door.toml"
            # Servers that share few cores with much else may be silent for longer than ten seconds.
            lines = ["[door]", "min_progress_s = 60.0"]
            for server, port in zip(pair, event_ports, strict=True):
                lines += ["[[backends]]", f'url = "{server.url}"']
                if kv_events:
                    lines.append(f'kv_events = "tcp://127.0.0.1:{port}"')
                if tokenizer:
                    lines.append(f'tokenizer = "{resolve_model()}"')
            path.write_text("\n".join(lines))
            admin_port = free_port()
            url = stack.enter_context(running_server(["--config", str(path), "--admin-port", str(admin_port), *flags]))
            return VllmDoor(url, f"http://127.0.0.1:{admin_port}")

        yield start


@pytest.fixture(scope="session")
def door(start_door: Any) -> VllmDoor:
    """The gateway as it comes: it knows what it was told on the command line, and what the servers say over HTTP."""
    made: VllmDoor = start_door()
    return made


@pytest.fixture(autouse=True)
def _quiet(request: pytest.FixtureRequest) -> None:
    """Every test begins with idle servers and empty caches."""
    for server in request.getfixturevalue("pair"):
        server.reset_prefix_cache()
