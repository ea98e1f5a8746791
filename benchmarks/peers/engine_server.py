"""An engine of others as a process that serves OpenAI's API."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, Self, TypeVar

from expediter.assembly.server_process import left_at_sigterm

_START_TIMEOUT_S: Final = 600.0
"""vLLM takes one to two minutes on an idle machine, most of it imports."""
_STOP_TIMEOUT_S: Final = 30.0


class EngineServer:
    """One engine; starting returns at once, `wait_until_ready` waits.

    Args:
        command: listens on `port` of 127.0.0.1 and answers `GET /health` when it is ready.
        environment: variables beside those of this process.
        folder: in which it runs.
    """

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        *,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.command = command
        self._folder = folder
        self._environment = {**os.environ, **(environment or {})}
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process; `stop` closes it
        self.start()

    def start(self) -> None:
        """Start it, again after `kill`."""
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=subprocess.STDOUT,
            env=self._environment,
            cwd=self._folder,
            start_new_session=True,  # it may have children, such as vLLM's engine; `kill` means all
        )

    def wait_until_ready(self) -> None:
        """Return once it answers.

        Raises:
            SystemExit: it died, or is not ready in ten minutes; its last words are the message.
        """
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if self.process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        raise SystemExit(f"{' '.join(self.command)} did not start: {self.last_words()}")

    def metric(self, name: str) -> float:
        """Return the sum of one of its metrics over all labels, e.g. `vllm:num_requests_running`."""
        values = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", self.metrics_page(), re.MULTILINE)
        return sum(map(float, values))

    def metrics_page(self) -> str:
        """Return all its metrics, as Prometheus would get them."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            page: bytes = answer.read()
        return page.decode()

    def last_words(self) -> str:
        self._said.flush()
        self._said.seek(0)
        return self._said.read()[-8000:]

    def kill(self) -> None:
        """End it and its children at once, as a crash would."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_STOP_TIMEOUT_S)
        self.kill()
        self._said.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


Server = TypeVar("Server", bound=EngineServer)


@contextmanager
def all_ready(servers: Sequence[Server]) -> Iterator[Sequence[Server]]:
    """Wait for servers that were started, and stop them when the block ends, by SIGTERM too."""
    with left_at_sigterm(), ExitStack() as stack:
        for server in servers:
            stack.enter_context(server)
        for server in servers:
            server.wait_until_ready()
        yield servers
