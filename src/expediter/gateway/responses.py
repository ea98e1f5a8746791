"""Runs a generation for a client that may leave at any moment: streamed as server-sent events, or in one piece."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from expediter.gateway.errors import to_api_error
from expediter.gateway.formats import Collected, ResponseFormat, usage
from expediter.gateway.generation import Generation

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that left; nobody reads it."""

Result = TypeVar("Result")


class ClientGoneError(Exception):
    """The client closed its connection before the response was ready."""


class Envelope:
    """What every response or chunk of one request says about itself."""

    def __init__(self, form: ResponseFormat, model: str) -> None:
        self.form = form
        self.response_id = form.id_prefix + uuid.uuid4().hex
        self._fields = {"id": self.response_id, "created": int(time.time()), "model": model}

    def full(self, choices: list[dict[str, Any]], used: dict[str, Any]) -> bytes:
        """Return a whole response's JSON."""
        return msgspec.json.encode({**self._fields, "object": self.form.full_object, "choices": choices, "usage": used})

    def event(self, choices: list[dict[str, Any]], extra: dict[str, Any]) -> bytes:
        """Return a chunk as a server-sent event."""
        return _event({**self._fields, "object": self.form.chunk_object, "choices": choices, **extra})


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


async def respond_at_once(request: HttpRequest, generation: Generation, envelope: Envelope) -> Response:
    """Run the generation to its end and return the response in one piece.

    Raises:
        ApiError: a sequence failed.
        ClientGoneError: nobody is there to read it; the sequences are aborted.
    """
    try:
        choices = await unless_gone(request.receive, _collect(generation, envelope.form))
    finally:
        generation.abort()
    return Response(envelope.full(choices, usage(generation)), media_type="application/json")


async def _collect(generation: Generation, form: ResponseFormat) -> list[dict[str, Any]]:
    collected = [Collected() for _ in generation.choices]
    async for deltas in generation.deltas():
        for delta in deltas:
            collected[delta.index].add(delta)
    return [form.full(parts.as_delta(index)) for index, parts in enumerate(collected)]


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

    Ends with `[DONE]` and a clean end of the body. A failure after the headers is told in an error event; the
    connection is then cut inside the body, so that no client takes the part for the whole. A request that may be
    refused late gets its headers only when it has started, so that a refusal is a plain error.

    Args:
        include_usage: one last chunk without choices carries the usage.
        continuous_usage: every chunk carries the usage so far.
    """

    def __init__(
        self, generation: Generation, envelope: Envelope, *, include_usage: bool, continuous_usage: bool
    ) -> None:
        super().__init__(
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}, media_type="text/event-stream"
        )
        del self.headers["content-length"]
        self._generation = generation
        self._envelope = envelope
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - starlette's signature
        try:
            if self._generation.may_be_refused_late:
                await unless_gone(receive, self._generation.until_started())
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await unless_gone(receive, self._send_all(send))
        except ClientGoneError:
            pass
        finally:
            self._generation.abort()

    async def _send_all(self, send: Send) -> None:
        async def send_event(event: bytes) -> None:
            await send({"type": "http.response.body", "body": event, "more_body": True})

        form = self._envelope.form
        opening = form.opening()
        try:
            async for deltas in self._generation.deltas():
                # The opening waits for the first token, so that the first event tells a client its TTFT.
                for choice in (*opening, *map(form.chunk, deltas)):
                    await send_event(self._envelope.event([choice], self._chunk_usage()))
                opening = []
        except Exception as error:  # whatever it is, the client has to learn that the stream is broken
            await send_event(b"data: " + to_api_error(error).body() + b"\n\n")
            return
        if self._include_usage:
            await send_event(self._envelope.event([], {"usage": usage(self._generation)}))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    def _chunk_usage(self) -> dict[str, Any]:
        if self._continuous_usage:
            return {"usage": usage(self._generation)}
        return {"usage": None} if self._include_usage else {}
