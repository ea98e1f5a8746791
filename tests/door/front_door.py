"""`expediter serve --backend ...` as a process, and what a test wants to know of it."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.door.http_client import ask, chat
from tests.door.mock_backends import Behaviour, MockBackend
from tests.gateway.live_server import LiveServer, start_process, wait_until

TIMEOUT_S = 1.5
IMPATIENT = f"[door]\nmin_progress_s = {TIMEOUT_S}\n"
"""A configuration that bears as little as a test can wait for."""


class FrontDoor:
    """A running door.

    Attributes:
        port, admin_port: where it listens.
        pid: of its process.
        config: its configuration file.
    """

    def __init__(self, live: LiveServer, admin_port: int, config: Path) -> None:
        self.config = config
        self.live = live
        self.port = live.port
        self.pid = live.process.pid
        self.admin_port = admin_port

    def get(self, path: str, headers: dict[str, str] | None = None) -> Any:
        return self.live.get(path, headers=headers)

    def admin(self, method: str, path: str, body: Any = None) -> Any:
        """Ask the admin listener; returns the decoded answer."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.admin_port}{path}", data, {"content-type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            raw = response.read()
            return json.loads(raw) if raw else None

    def backends(self) -> dict[str, Any]:
        """Return what the door says of each backend, by address (host:port)."""
        return {row["url"].removeprefix("http://"): row for row in self.admin("GET", "/backends")["backends"]}

    def in_flight(self) -> int:
        """Return requests that the door thinks its backends have."""
        return sum(row["num_in_flight"] for row in self.backends().values())

    def rss_bytes(self) -> int:
        return int((Path("/proc") / str(self.pid) / "statm").read_text().split()[1]) * 4096

    def num_fds(self) -> int:
        return len(list((Path("/proc") / str(self.pid) / "fd").iterdir()))


@contextmanager
def front_door(
    backends: Sequence[MockBackend], *flags: str, config: str = "", wait_for_up: bool = True
) -> Iterator[FrontDoor]:
    """Run a door before backends until the block ends; by default it begins when the door knows them all to be up.

    Args:
        config: text of its configuration file, which may name more backends.
    """
    admin_port = free_port()
    words = [word for backend in backends for word in ("--backend", backend.url)]
    command = [sys.executable, "-m", "expediter.cli.main", "serve", *words, "--port", "0"]
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(config)
        file.flush()
        with start_process(*command, "--admin-port", str(admin_port), "--config", file.name, *flags) as live:
            door = FrontDoor(live, admin_port, Path(file.name))
            if wait_for_up:
                wait_until(lambda: num_up(door) == len(backends) + config.count("[[backends]]"), 20, "all backends up")
            yield door


def num_up(door: FrontDoor) -> int:
    try:
        return sum(row["state"] == "up" for row in door.backends().values())
    except urllib.error.URLError:  # it does not listen yet
        return 0


def recover(door: FrontDoor, mocks: Sequence[MockBackend]) -> None:
    """Make backends well, have the door find out, and forget what they were asked: for tests that share a door.

    One that was ejected is back with the first answer that it gives, and asked for one with the next request.
    """
    for mock in mocks:
        mock.behaviour, mock.health_answers = Behaviour(), True

    async def story() -> None:
        while num_up(door) < len(mocks) or door.in_flight():
            await ask(door.port, chat("who is there?"))

    run(story(), 60)
    for mock in mocks:
        mock.arrivals.clear()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def until(condition: Callable[[], bool], timeout_s: float = 10, what: str = "condition") -> float:
    """Return how long it took until something came true; fail the test if it takes too long."""
    started_s = time.monotonic()
    while not condition():
        assert time.monotonic() - started_s < timeout_s, f"{what} did not come true in {timeout_s} s"
        await asyncio.sleep(0.005)
    return time.monotonic() - started_s


def run(main: Awaitable[Any], timeout_s: float = 120) -> Any:
    """Run a test's story; it fails rather than hang."""

    async def bounded() -> Any:
        async with asyncio.timeout(timeout_s):
            return await main

    return asyncio.run(bounded())
