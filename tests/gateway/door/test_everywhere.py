"""A change at the admin API of one process is made at all, and by those that are started later."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from expediter.gateway.admin import build_admin
from expediter.gateway.backends.registry import Backends
from expediter.gateway.everywhere import Changes, Everywhere
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
        await changes.make(build_admin(later))
        assert states(later) == expected
        await changes.make(build_admin(there))
        assert states(there) == expected, "what it knows already changes nothing"
        await Changes(tmp_path / "none").make(build_admin(later))
        await main.stop(0.0)
        await other.stop(0.0)

    asyncio.run(story())
