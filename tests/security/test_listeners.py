"""Who can connect to what: loopback unless told otherwise, and control apart from service (SECURITY: listeners)."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.door.front_door import FrontDoor, free_port, front_door, run
from tests.door.http_client import Connection
from tests.door.mock_backends import MockBackend, mock_backends

LISTENING = "0A"
LOOPBACK = {"0100007F", "00000000000000000000000001000000"}


@pytest.fixture(scope="module")
def mocks() -> Iterator[list[MockBackend]]:
    with mock_backends(1) as backends:
        yield backends


@pytest.fixture(scope="module")
def door(mocks: list[MockBackend]) -> Iterator[FrontDoor]:
    with front_door(mocks) as running:
        yield running


def listeners(pid: int) -> list[tuple[str, int]]:
    """Return address (as the kernel writes it) and port of each TCP socket that a process listens on."""
    links = (os.readlink(path) for path in (Path("/proc") / str(pid) / "fd").iterdir() if path.is_symlink())
    inodes = {match[1] for link in links if (match := re.fullmatch(r"socket:\[(\d+)\]", link))}
    found = []
    for table in ("tcp", "tcp6"):
        for line in (Path("/proc") / str(pid) / "net" / table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and fields[9] in inodes:
                address, port = fields[1].split(":")
                found.append((address, int(port, 16)))
    return found


def test_everything_listens_on_loopback(door: FrontDoor) -> None:
    found = listeners(door.pid)
    assert {port for _, port in found} == {door.port, door.admin_port}
    assert {address for address, _ in found} <= LOOPBACK


def test_an_admin_listener_for_everybody_needs_a_key(mocks: list[MockBackend]) -> None:
    command = [sys.executable, "-m", "expediter.cli.main", "serve", "--backend", mocks[0].url, "--port", "0"]
    done = subprocess.run(
        [*command, "--admin-host", "0.0.0.0", "--admin-port", str(free_port())],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert "admin" in done.stderr
    assert "key" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_main_port_knows_nothing_of_the_admin_listener(door: FrontDoor) -> None:
    async def story() -> None:
        for method, path in (
            *[("GET", "/backends"), ("POST", "/backends"), ("DELETE", "/backends/x"), ("POST", "/backends/x/drain")],
            *[("GET", "/admin/backends"), ("POST", "/reload"), ("POST", "/admin/reload")],
        ):
            connection = await Connection.open(door.port)
            answer = await asyncio.wait_for(connection.ask(method, path, b'{"url": "http://127.0.0.1:9"}'), 10)
            connection.leave()
            assert answer.status in (404, 405), (method, path, answer.status)
        assert len(door.backends()) == 1

    run(story())
