"""ASGI middleware: draining, the count of open requests, and the echo of a client's request id."""

from __future__ import annotations

import asyncio
import re
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from expediter.gateway.errors import overloaded

_REQUEST_ID: Final = re.compile(rb"[\x21-\x7e]{1,128}")


class Drain:
    """Whether the server takes new work, and how much of it is open. Shared by middleware and server."""

    def __init__(self) -> None:
        self.is_draining = False
        self.num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> None:
        self.num_open += 1
        self._idle.clear()

    def leave(self) -> None:
        self.num_open -= 1
        if not self.num_open:
            self._idle.set()

    async def until_idle(self) -> None:
        """Return once nothing is open."""
        await self._idle.wait()


class DrainGate:
    """Refuses work while draining; counts work until its response is written. Work is whatever comes by POST."""

    def __init__(self, app: ASGIApp, drain: Drain) -> None:
        self._app = app
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        if self._drain.is_draining:
            await overloaded("the server is shutting down").response()(scope, receive, send)
            return
        self._drain.enter()
        try:
            await self._app(scope, receive, send)
        finally:
            self._drain.leave()


def client_request_id(scope: Scope) -> bytes | None:
    """Return a client's X-Request-Id, if it gave one that may be repeated."""
    given = next((value for name, value in scope.get("headers", ()) if name == b"x-request-id"), None)
    return given if given is not None and _REQUEST_ID.fullmatch(given) else None


class EchoRequestId:
    """Repeats a client's X-Request-Id in the response; it is never used as an id of ours."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = client_request_id(scope)
        if given is None:
            await self._app(scope, receive, send)
            return

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", given)]
            await send(message)

        await self._app(scope, receive, send_with_id)
