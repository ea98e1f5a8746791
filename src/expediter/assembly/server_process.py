"""A server of one's own for the length of a run."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from expediter.core.errors import ReplicaError

_START_TIMEOUT_S = 900.0
"""Generous: the first start downloads and converts the default model."""
_STOP_TIMEOUT_S = 30.0


@contextmanager
def running_server(arguments: Sequence[str], port: int | None = None) -> Iterator[str]:
    """Run `expediter serve` with these arguments on the loopback interface; yield its URL once ready.

    Its output goes where ours goes. It is stopped on the way out, whatever happens inside.

    Args:
        port: None for a free one.
    Raises:
        ReplicaError: it ended before it was ready, or did not get ready in time.
    """
    port = free_port() if port is None else port
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "expediter.cli.main", "serve", "--port", str(port), *arguments]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)  # noqa: S603 - our own command line
    try:
        _wait_until_ready(process, url)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ReplicaError(f"the server ended with exit code {process.returncode} before it was ready")
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5):  # noqa: S310 - a loopback URL made above
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise ReplicaError(f"the server was not ready after {_START_TIMEOUT_S:.0f} s")


def free_port() -> int:
    """Return a port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
