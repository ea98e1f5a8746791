"""Changes at one process's admin API happen at all processes of the gateway."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

CONTROL: Final = "control"
"""Kind of the sockets where a process hears what was changed at another."""
_TIMEOUT_S: Final = 5.0
_REASONS: Final = (OSError, TimeoutError)


class Everywhere:
    """ASGI middleware: what has been done here is done at the others, too, before the client is answered.

    Args:
        others: sockets of their admin APIs.
    """

    def __init__(self, app: ASGIApp, others: Sequence[Path]) -> None:
        self._app = app
        self._others = others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] == "GET":
            await self._app(scope, receive, send)
            return
        body = await HttpRequest(scope, receive).body()
        messages: list[Message] = []

        async def receive_again() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        async def hold(message: Message) -> None:
            messages.append(message)

        await self._app(scope, receive_again, hold)
        if messages and messages[0].get("status", 500) < 300:
            head = b"%b %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
            line = head % (scope["method"].encode("ascii"), scope["raw_path"])
            told = b"%bContent-Length: %d\r\n\r\n%b" % (line, len(body), body)
            await asyncio.gather(*(_tell(other, told) for other in self._others))
        for message in messages:
            await send(message)


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
