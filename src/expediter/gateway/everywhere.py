"""Changes at one process's admin API happen at all processes of the gateway, and at those that are started later."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import unquote

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from expediter.gateway.changes import Call, Changes

logger = logging.getLogger(__name__)

CONTROL: Final = "control"
"""Kind of the sockets where a process hears what was changed at another."""
_RELOAD: Final = "/reload"
_NOT_DONE: Final = 300
"""A status from here on says that nothing has been changed."""
_TIMEOUT_S: Final = 5.0
_REASONS: Final = (OSError, TimeoutError)


async def make(changes: Changes, app: ASGIApp) -> None:
    """Make all changes at an admin API that has seen none of them, or some."""
    for call in changes.calls():
        status, _ = await _call(app, _scope(call), call.body)
        if status >= _NOT_DONE:
            logger.info("%s %s had been done already: %d", call.method, call.path, status)


class _Named(msgspec.Struct):
    name: str


class Everywhere:
    """ASGI middleware: what has been done here is done at the others, too, before the client is answered.

    Args:
        others: sockets of their admin APIs.
        changes: where it is noted for those that come later.
    """

    def __init__(self, app: ASGIApp, others: Sequence[Path], changes: Changes) -> None:
        self._app = app
        self._others = others
        self._changes = changes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] == "GET":
            await self._app(scope, receive, send)
            return
        body = await HttpRequest(scope, receive).body()
        status, messages = await _call(self._app, scope, body)
        if status < _NOT_DONE:
            if scope["path"] != _RELOAD:  # who starts later reads the file anyway
                call = Call(scope["method"], scope["raw_path"].decode("ascii"), body)
                self._changes.note(call, _named_in(messages))
            head = b"%b %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
            line = head % (scope["method"].encode("ascii"), scope["raw_path"])
            told = b"%bContent-Length: %d\r\n\r\n%b" % (line, len(body), body)
            await asyncio.gather(*(_tell(other, told) for other in self._others))
        for message in messages:
            await send(message)


async def _call(app: ASGIApp, scope: Scope, body: bytes) -> tuple[int, list[Message]]:
    """Return what an application answers, and its status."""
    messages: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        messages.append(message)

    await app(scope, receive, send)
    return (messages[0]["status"] if messages else 500), messages


def _named_in(messages: list[Message]) -> str:
    """Return the backend that an answer names."""
    return msgspec.json.decode(b"".join(message.get("body", b"") for message in messages), type=_Named).name


def _scope(call: Call) -> Scope:
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    return {
        "type": "http",
        "method": call.method,
        "path": unquote(call.path),
        "raw_path": call.path.encode("ascii"),
        "query_string": b"",
        "headers": headers,
    }


async def _tell(other: Path, request: bytes) -> None:
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(other)
            try:
                writer.write(request)
                status = (await reader.readline()).split()[1:2]
            finally:
                writer.close()
    except _REASONS:
        logger.exception("process %s did not hear of a change", other.name)
        return
    if status[:1] and not status[0].startswith(b"2"):
        logger.error("process %s could not make a change: %s", other.name, status[0].decode("ascii", "replace"))
