"""Runs a generation for a client that may leave at any moment: streamed as server-sent events, or in one piece."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Protocol, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from expediter.gateway.errors import to_api_error
from expediter.gateway.generation import Delta
from expediter.gateway.rendering import Collected, Rendering

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that left; nobody reads it."""

Result = TypeVar("Result")


class ClientGoneError(Exception):
    """The client closed its connection before the response was ready."""


class Source(Protocol):
    """Where deltas come from; `Generation` is one."""

    @property
    def may_end_unstarted(self) -> bool: ...

    async def until_started(self) -> None: ...

    def deltas(self) -> AsyncIterator[list[Delta]]: ...

    def abort(self) -> None: ...


async def respond_at_once(request: HttpRequest, source: Source, rendering: Rendering) -> Response:
    """Run the generation to its end and return the response in one piece.

    Raises:
        ApiError: a sequence failed.
        ClientGoneError: nobody is there to read it; the sequences are aborted.
    """
    try:
        deltas = await unless_gone(request.receive, _collect(source))
    finally:
        source.abort()
    return Response(rendering.whole(deltas), media_type="application/json")


async def _collect(source: Source) -> list[Delta]:
    if source.may_end_unstarted:
        await source.until_started()
    collected: dict[int, Collected] = {}
    async for deltas in source.deltas():
        for delta in deltas:
            collected.setdefault(delta.index, Collected()).add(delta)
    return [collected[index].as_delta(index) for index in sorted(collected)]


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Return what `work` returns; cancel it as soon as the client closes its connection.

    Raises:
        ClientGoneError: it did.
    """
    gone = asyncio.ensure_future(_until_gone(receive))
    working = asyncio.ensure_future(work)
    try:
        await asyncio.wait((gone, working), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        gone.cancel()
        working.cancel()
        await asyncio.gather(gone, working, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A generation as server-sent events.

    Ends with a clean end of the body. A failure after the headers is told in an error event; the connection is then cut
    inside the body, so that no client takes the part for the whole. A request that may end before it has started gets
    its headers only then, so that a refusal is a plain error.
    """

    def __init__(self, source: Source, rendering: Rendering) -> None:
        super().__init__(
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}, media_type="text/event-stream"
        )
        del self.headers["content-length"]
        self._source = source
        self._rendering = rendering

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - starlette's signature
        try:
            if self._source.may_end_unstarted:
                await unless_gone(receive, self._source.until_started())
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await unless_gone(receive, self._send_all(send))
        except ClientGoneError:
            pass
        finally:
            self._source.abort()

    async def _send_all(self, send: Send) -> None:
        async def send_part(part: bytes) -> None:
            await send({"type": "http.response.body", "body": part, "more_body": True})

        rendering, has_opened = self._rendering, False
        try:
            async for deltas in self._source.deltas():
                if not has_opened:  # it waits for the first token, so that the first event tells a client its TTFT
                    has_opened = True
                    for part in rendering.opening():
                        await send_part(part)
                for delta in deltas:
                    for part in rendering.progress(delta):
                        await send_part(part)
        except Exception as error:  # whatever it is, the client has to learn that the stream is broken
            await send_part(rendering.failure(to_api_error(error)))
            return
        await send({"type": "http.response.body", "body": b"".join(rendering.closing()), "more_body": False})
