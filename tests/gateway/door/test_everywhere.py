"""A change at the admin API of one process is made at all, and by those that are started later."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expediter.gateway.admin import build_admin
from expediter.gateway.backends.config import BackendConfig
from expediter.gateway.backends.registry import Backends
from expediter.gateway.changes import Call, Changes
from expediter.gateway.everywhere import Everywhere, make
from expediter.gateway.http.asgi import AsgiApplication
from expediter.gateway.http.listener import Listener
from expediter.gateway.http.wire import HttpLimits
from expediter.runtime.clock import MonotonicClock


async def ask(port: int, method: str, path: str, body: bytes = b"") -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    answer = await reader.read()
    writer.close()
    return answer


def states(backends: Backends) -> dict[str, str]:
    return {status.name: status.state for status in backends.status()}


def test_changes_reach_those_that_run_and_those_that_come(tmp_path: Path) -> None:
    async def story() -> None:
        here, there, later = (Backends(clock=MonotonicClock()) for _ in range(3))
        changes = Changes(tmp_path / "changes")
        at = tmp_path / "control"
        unix = socket.socket(socket.AF_UNIX)
        unix.bind(str(at))
        other = Listener(AsgiApplication(build_admin(there)), HttpLimits())
        await other.start(unix)
        sock = socket.create_server(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        app = Everywhere(build_admin(here), [at, tmp_path / "nobody"], changes)
        main = Listener(AsgiApplication(app), HttpLimits())
        await main.start(sock)
        for name in ("a", "b", "c/d"):
            body = b'{"url": "http://127.0.0.1:1", "name": "%b", "models": ["m"]}' % name.encode()
            assert b" 201 " in (await ask(port, "POST", "/backends", body)).split(b"\r\n")[0]
        assert b" 400 " in (await ask(port, "POST", "/backends", b'{"url": "nonsense"}')).split(b"\r\n")[0]
        await ask(port, "POST", "/backends/c%2Fd/drain", b"{}")
        await ask(port, "DELETE", "/backends/a")
        expected = {"b": "up", "c/d": "draining"}
        assert states(here) == states(there) == expected
        await make(changes, build_admin(later))
        assert states(later) == expected
        await make(Changes(tmp_path / "changes"), build_admin(there))
        assert states(there) == expected, "what it knows already changes nothing"
        await make(Changes(tmp_path / "none"), build_admin(later))
        await main.stop(0.0)
        await other.stop(0.0)

    asyncio.run(story())


def add(name: str) -> Call:
    return Call("POST", "/backends", b'{"url": "http://127.0.0.1:1", "name": "%b", "models": ["m"]}' % name.encode())


def drain(name: str) -> Call:
    return Call("POST", f"/backends/{name}/drain", b"{}")


def remove(name: str) -> Call:
    return Call("DELETE", f"/backends/{name}", b"")


ACTS = {"add": add, "drain": drain, "remove": remove}


def made_of(changes: Changes) -> dict[str, str]:
    """Return what comes of changes at a process whose file has `f` and `g`."""

    async def story() -> dict[str, str]:
        backends = Backends(clock=MonotonicClock())
        for name in "fg":
            backends.add(BackendConfig(url="http://127.0.0.1:1", name=name, models=("m",)))
        await make(changes, build_admin(backends))
        return states(backends)

    return asyncio.run(story())


@given(acts=st.lists(st.tuples(st.sampled_from(sorted(ACTS)), st.sampled_from("fgx")), max_size=25))
def test_what_is_kept_makes_the_same_as_all_that_was_done(acts: list[tuple[str, str]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "changes"
        changes = Changes(path)
        here: dict[str, str] = {"f": "up", "g": "up"}
        for act, name in acts:
            if (act == "add") is (name in here):
                continue  # refused, and not noted
            if act == "remove":
                del here[name]
            else:
                here[name] = "up" if act == "add" else "draining"
            changes.note(ACTS[act](name), name)
        assert made_of(Changes(path)) == here
        assert len(json.loads(path.read_bytes()) if path.exists() else {}) <= 3


def test_it_does_not_grow_with_what_has_come_and_gone(tmp_path: Path) -> None:
    path = tmp_path / "changes"
    changes = Changes(path)
    for number in range(200):  # as an autoscaler does it
        for act in (add, drain, remove):
            changes.note(act(f"pod-{number}"), f"pod-{number}")
    assert path.read_bytes() == b"{}"


def test_a_file_that_changes_settles_what_was_done_to_its_backends(tmp_path: Path) -> None:
    changes = Changes(tmp_path / "changes")
    for act, name in ((remove, "f"), (add, "f"), (drain, "g"), (remove, "h"), (add, "x")):
        changes.note(act(name), name)
    changes.settled(["f", "g", "h"])
    assert list(Changes(tmp_path / "changes").calls()) == [add("f"), add("x")]


@pytest.mark.parametrize("moment", ["while it is written", "before it is renamed", "after"])
def test_a_process_that_is_killed_while_it_notes_leaves_the_old_or_the_new(tmp_path: Path, moment: str) -> None:
    """A process notes two changes and is killed by the kernel in the middle of the second."""
    path = tmp_path / "changes"
    program = f"""
import os, signal
from pathlib import Path
from expediter.gateway import changes as module

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def half(self, data):
    with self.open("wb") as file:
        file.write(data[: len(data) // 2])
    die()

changes = module.Changes(Path({str(path)!r}))
changes.note(module.Call("POST", "/backends", b'{{"url": "http://a"}}'), "a")
moment = {moment!r}
if moment == "while it is written":
    Path.write_bytes = half
elif moment == "before it is renamed":
    module.os.replace = die
changes.note(module.Call("POST", "/backends", b'{{"url": "http://b"}}'), "b")
die()
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGKILL
    bodies = [call.body for call in Changes(path).calls()]
    assert bodies == [b'{"url": "http://a"}', b'{"url": "http://b"}'][: 2 if moment == "after" else 1]
    Changes(path).note(add("c"), "c")  # what was left half done is in nobody's way
    assert len(list(Changes(path).calls())) == len(bodies) + 1


@pytest.mark.parametrize("content", [b"", b'{"a": {"body": "x"', b"\xff", b"[]"])
def test_a_file_that_cannot_be_read_is_told_and_counts_for_nothing(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "changes"
    path.write_bytes(content)
    assert list(Changes(path).calls()) == []
    assert "cannot be read" in caplog.text


def test_a_change_that_cannot_be_noted_is_made_all_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    changes = Changes(tmp_path / "gone" / "changes")
    changes.note(add("a"), "a")
    assert "cannot be noted" in caplog.text
