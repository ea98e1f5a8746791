"""A listener over a toy application, and raw bytes to and from it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from expediter.gateway.http.listener import Listener
from expediter.gateway.http.reply import Answer, Reply
from expediter.gateway.http.wire import HttpLimits, HttpRequest

PLAIN = [(b"content-type", b"text/plain")]


class ToyApp:
    """Repeats what it is asked. `/later` is answered by the test, `/refused` without its body, `/broken` raises."""

    def __init__(self) -> None:
        self.requests: list[HttpRequest] = []
        self.later: list[Reply] = []
        self.gone = 0
        self.paused: list[str] = []

    def admit(self, request: HttpRequest) -> Answer | None:
        return self.refuse(403, "not you", request.path) if request.path == "/refused" else None

    def refuse(self, status: int, message: str, path: str) -> Answer:
        return Answer(status, PLAIN, message.encode())

    def handle(self, request: HttpRequest, reply: Reply) -> None:
        self.requests.append(request)
        if request.path == "/later":
            reply.listener = self
            self.later.append(reply)
        elif request.path == "/broken":
            raise RuntimeError("a bug")
        elif request.path == "/chunked":
            reply.start(200, PLAIN, None)
            reply.write(b"one")
            reply.write(b"two")
            reply.end()
        elif request.path == "/nothing":
            reply.send(204, [], b"")
        else:
            reply.send(200, PLAIN, b"%b %b %b" % (request.method.encode(), request.path.encode(), request.body))

    def reply_gone(self) -> None:
        self.gone += 1

    def reply_paused(self) -> None:
        self.paused.append("pause")

    def reply_resumed(self) -> None:
        self.paused.append("resume")


@asynccontextmanager
async def toy_server(app: ToyApp, **limits: float) -> AsyncIterator[tuple[Listener, int]]:
    listener = Listener(app, HttpLimits(**limits))  # type: ignore[arg-type]
    sock = socket.create_server(("127.0.0.1", 0))
    await listener.start(sock)
    try:
        yield listener, sock.getsockname()[1]
    finally:
        await listener.stop(0.0)


async def talk(port: int, *pieces: bytes, timeout_s: float = 20) -> bytes:
    """Send bytes, piece by piece, and return everything until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(timeout_s):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.01)
            return await reader.read()
    finally:
        writer.close()


async def until(condition: Callable[[], object], timeout_s: float = 20) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - whatever is waited for has no event
            await asyncio.sleep(0.005)


def statuses(answer: bytes) -> list[int]:
    """Statuses of all responses in some bytes."""
    return [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]
