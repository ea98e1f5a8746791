"""llama.cpp's server as a process, with SmolLM2 as it comes, on one thread."""

from __future__ import annotations

from pathlib import Path

from benchmarks.peers.engine_server import EngineServer
from expediter.assembly.server_process import free_port

_DRIVER = Path(__file__).with_name("llama_cpp_driver.py")


class LlamaCppServer(EngineServer):
    """One llama.cpp server; clients call its model `smollm2`.

    Args:
        python: interpreter of an environment with llama.cpp.
        num_slots: requests that it works on at once.
        slot_context: tokens of each.
    """

    def __init__(self, python: Path, *, num_slots: int, slot_context: int) -> None:
        port = free_port()
        command = [str(python), str(_DRIVER), "--port", str(port)]
        command += ["--parallel", str(num_slots), "--slot-context", str(slot_context)]
        super().__init__(command, port)
