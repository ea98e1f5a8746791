"""Answers requests by an ASGI application in this process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import Any, Final, Protocol

from starlette.types import ASGIApp, Message

from expediter.gateway.http.reply import Answer, Reply
from expediter.gateway.http.wire import HttpRequest

logger = logging.getLogger(__name__)

_HOP_BY_HOP: Final = frozenset({b"connection", b"content-length", b"transfer-encoding"})
"""What `Reply` says itself."""


class AppListener(Protocol):
    """Hears what an application answers."""

    def app_head(self, status: int) -> None:
        """The response has begun."""

    def app_data(self, data: bytes) -> None:
        """A part of its body, not empty."""

    def app_ended(self, *, is_whole: bool, is_gone: bool) -> None:
        """The application has returned: the response is whole, or the client has left, or it was broken off."""


class AsgiCall:
    """One request in an application.

    Args:
        failure: the answer if the application fails before it has answered.
        extra: headers that the response gets beside the application's.
        scope: fields of the scope beside the usual ones.
        listener: hears of the answer.
    """

    def __init__(
        self,
        app: ASGIApp,
        request: HttpRequest,
        reply: Reply,
        failure: Answer,
        extra: Iterable[tuple[bytes, bytes]] = (),
        scope: Mapping[str, object] | None = None,
        listener: AppListener | None = None,
    ) -> None:
        self._app = app
        self._request = request
        self._reply = reply
        self._failure = failure
        self._extra = extra
        self._listener = listener
        self._is_gone = False
        self._scope = {**_scope(request), **(scope or {})}
        self._was_received = False
        self._gone: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        reply.listener = self
        self.task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        reply = self._reply
        try:
            await self._app(self._scope, self._receive, self._send)
        except Exception:
            if not reply.started or not reply.ended:
                logger.exception("the application failed")
        is_whole = reply.started and reply.ended and not self._is_gone
        if not reply.started:
            reply.send(*self._failure)
        elif not reply.ended:
            reply.cut()
        if self._listener is not None:
            self._listener.app_ended(is_whole=is_whole, is_gone=self._is_gone)

    async def _receive(self) -> Message:
        if not self._was_received:
            self._was_received = True
            return {"type": "http.request", "body": self._request.body, "more_body": False}
        if not self._reply.ended:
            if self._gone is None:
                self._gone = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._gone)
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        reply = self._reply
        if message["type"] == "http.response.start":
            given = message.get("headers", ())
            length = next((int(value) for name, value in given if name == b"content-length"), None)
            headers = [pair for pair in given if pair[0] not in _HOP_BY_HOP]
            reply.start(message["status"], [*headers, *self._extra], length)
            if self._listener is not None:
                self._listener.app_head(message["status"])
            return
        body = message.get("body", b"")
        reply.write(body)
        if body and self._listener is not None:
            self._listener.app_data(body)
        if not message.get("more_body", False):
            reply.end()
        elif reply.is_paused and not reply.ended:
            self._room = asyncio.get_running_loop().create_future()
            await self._room

    # ---- of the reply

    def reply_gone(self) -> None:
        """The application's next `receive` says so, and its `send` waits no longer."""
        self._is_gone = True
        if self._gone is not None and not self._gone.done():
            self._gone.set_result(None)
        self.reply_resumed()

    def reply_paused(self) -> None:
        """The application's next `send` waits."""

    def reply_resumed(self) -> None:
        """It goes on."""
        if self._room is not None and not self._room.done():
            self._room.set_result(None)


class AsgiApplication:
    """Lets an ASGI application answer all requests of a listener.

    Args:
        scope: fields of every request's scope beside the usual ones.
    """

    def __init__(self, app: ASGIApp, scope: Mapping[str, object] | None = None) -> None:
        self._app = app
        self._more = scope

    def admit(self, request: HttpRequest) -> Answer | None:  # noqa: ARG002 - it looks at whole requests only
        """Let everybody in."""
        return None

    def handle(self, request: HttpRequest, reply: Reply) -> None:
        """Answer a request."""
        AsgiCall(self._app, request, reply, self.refuse(500, "internal error", request.path), scope=self._more)

    def refuse(self, status: int, message: str, path: str) -> Answer:  # noqa: ARG002 - the same everywhere
        """Return how the server says what is wrong with a request that it cannot take."""
        return Answer(status, [(b"content-type", b"text/plain")], message.encode())


def _scope(request: HttpRequest) -> dict[str, Any]:
    raw_path = request.target.partition(b"?")[0]
    headers = request.headers
    if request.length is not None:
        headers = [*headers, (b"content-length", b"%d" % request.length)]
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": request.version,
        "method": request.method,
        "scheme": "http",
        "path": request.path,
        "raw_path": raw_path,
        "query_string": request.query,
        "arrived_s": request.arrived_s,
        "root_path": "",
        "headers": headers,
        "client": request.peer,
        "server": request.sock,
        "state": {},
    }
