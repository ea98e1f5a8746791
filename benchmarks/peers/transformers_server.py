"""`transformers serve` as a process, with the default model, on one thread."""

from __future__ import annotations

from pathlib import Path

from benchmarks.peers.engine_server import EngineServer
from expediter.assembly.server_process import free_port


class TransformersServer(EngineServer):
    """One `transformers serve`; clients call its model as its folder is called.

    Args:
        python: interpreter of an environment with transformers and its extra `serving`.
        model: a folder.
    """

    def __init__(self, python: Path, model: Path) -> None:
        port = free_port()
        command = [str(python.with_name("transformers")), "serve", model.name, "--device", "cpu"]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        super().__init__(command, port, environment=environment, folder=model.parent)
