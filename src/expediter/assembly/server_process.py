"""A server of one's own for the length of a run."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from expediter.core.errors import ReplicaError

_START_TIMEOUT_S = 900.0
"""Generous: the first start downloads and converts the default model."""
_STOP_TIMEOUT_S = 30.0


@contextmanager
def running_server(arguments: Sequence[str], port: int | None = None) -> Iterator[str]:
    """Run `expediter serve` with these arguments on the loopback interface; yield its URL once ready.

    Its output goes where ours goes. It is stopped on the way out, whatever happens inside, SIGTERM included.

    Args:
        port: None for a free one.
    Raises:
        ReplicaError: it ended before it was ready, or did not get ready in time.
    """
    port = free_port() if port is None else port
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "expediter.cli.main", "serve", "--port", str(port), *arguments]
    with left_at_sigterm():
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


@contextmanager
def left_at_sigterm() -> Iterator[None]:
    """Leave the block by SystemExit at SIGTERM, which else ends a process on the spot, and what it started goes on.

    Python hears signals in its main thread; a block in another one is left as it is.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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
