"""A gateway of several processes tells one truth, whichever of them is asked, and also after one has died."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_server import LiveServer, children_of, is_alive, start_fake_server, start_process, wait_until

NUM_PROCESSES = 3
MAIN = "import sys; from expediter.cli.main import main; sys.exit(main())"


@pytest.fixture(scope="module")
def door(model_folder: Path) -> Iterator[LiveServer]:
    processes = ("--gateway-processes", str(NUM_PROCESSES))
    with start_fake_server(model_folder) as behind, start_process(*command(behind, *processes)) as door:
        yield door


def command(behind: LiveServer, *flags: str) -> tuple[str, ...]:
    return (sys.executable, "-c", MAIN, "serve", "--port", "0", "--backend", behind.url, *flags)


def counted(door: LiveServer) -> float:
    return door.metric("expediter:gateway_requests_total", outcome="ok")


def ask(door: LiveServer, name: str) -> None:
    """Each request has a connection of its own, which the kernel gives to some process."""
    reply = door.complete("x", headers={"X-Request-Id": name}, max_tokens=2, model="fake", stream=True)
    assert reply.status == 200


def test_whichever_is_asked(door: LiveServer) -> None:
    names = [f"name-{number}" for number in range(24)]
    for name in names:
        ask(door, name)
    wait_until(lambda: counted(door) == 24, what="all are counted")
    for name in names:
        for _ in range(3):
            told = door.get(f"/requests/{name}").json
            assert [gateway["client_request_id"] for gateway in told["gateway"]] == [name]
            assert told["requests"], "and its replica is asked by whoever is asked"
    for _ in range(6):
        assert counted(door) == 24
        feed = door.get("/dashboard/feed").json
        assert (feed["num_processes"], feed["num_answered"]) == (NUM_PROCESSES, NUM_PROCESSES)
        assert sum(of["ended"] for point in feed["points"] for of in point["tenants"].values()) == 24
        assert feed["in_flight"] == 0
    writers = {
        gateway["request_id"][:12] for name in names for gateway in door.get(f"/requests/{name}").json["gateway"]
    }
    assert len(writers) > 1, "the requests were not all of one process"


def test_counters_survive_the_death_of_a_process(door: LiveServer) -> None:
    before = counted(door)
    doomed = children_of(door.process.pid)[0]
    os.kill(doomed, signal.SIGKILL)
    wait_until(lambda: not is_alive(doomed), what="it is gone")
    seen: list[float] = []

    def is_back() -> bool:
        seen.append(counted(door))
        return door.get("/dashboard/feed").json["num_answered"] == NUM_PROCESSES

    wait_until(is_back, timeout_s=30, what="another one has its place")
    assert set(seen) == {before}, "no counter fell, and none was counted twice"
    for number in range(12):
        ask(door, f"later-{number}")
    wait_until(lambda: counted(door) == before + 12, what="the new ones are added")


def test_with_keys_an_operator_looks_at_the_admin_listener(model_folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with start_fake_server(model_folder) as behind:
        flags = ("--gateway-processes", "2", "--api-key", "sk-one", "--admin-port", str(port))
        with start_process(*command(behind, *flags)) as door:
            key = {"Authorization": "Bearer sk-one"}
            assert door.complete("x", headers=key, max_tokens=2, model="fake").status == 200
            assert door.get("/dashboard", headers=key).status == 403
            admin = LiveServer(door.process, f"http://127.0.0.1:{port}")
            assert b"<!doctype html>" in admin.get("/dashboard").body
            wait_until(lambda: bool(admin.get("/dashboard/feed").json["points"]), what="the request is shown")
            assert admin.get("/dashboard/feed").json["num_answered"] == 2
            assert admin.metric("expediter:gateway_requests_total", outcome="ok") == 1
