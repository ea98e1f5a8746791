"""The response to one request, and who answers it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from expediter.gateway.http.wire import (
    BODILESS,
    CHUNKED_HEADER,
    LAST_CHUNK,
    Headers,
    HttpRequest,
    has_body,
    response_head,
)


class Answer(NamedTuple):
    """A whole response."""

    status: int
    headers: Headers
    body: bytes


class Application(Protocol):
    """Answers requests."""

    def admit(self, request: HttpRequest) -> Answer | None:
        """Look at a request's head, before its body is read; an answer refuses it."""

    def handle(self, request: HttpRequest, reply: Reply) -> None:
        """Answer a whole request, now or later. An exception is told to the client as an internal error."""

    def refuse(self, status: int, message: str, path: str) -> Answer:
        """Return how the server says what is wrong with a request that it cannot take.

        Args:
            path: that it was for, as far as it was read.
        """


class ReplyOwner(Protocol):
    """The connection that a reply goes out on."""

    keeps_alive: bool
    is_write_paused: bool

    def date_header(self) -> bytes: ...

    def connection_header(self, version: str) -> bytes:
        """Return the line that says what becomes of the connection behind a response, where that has to be said."""

    def reply_ended(self, reply: Reply) -> None: ...

    def close(self) -> None: ...


class ReplyListener(Protocol):
    """Whoever answers, to be told how the client takes it. Hears nothing after the end."""

    def reply_gone(self) -> None:
        """The client has closed the connection before the end."""

    def reply_paused(self) -> None:
        """The client reads too slowly."""

    def reply_resumed(self) -> None:
        """It has caught up."""


class Reply:
    """The response to one request. Calls after its end, or after the client has left, do nothing.

    Attributes:
        listener: told how the client takes it.
        num_bytes: written by this object so far, heads and framing included.
    """

    __slots__ = (
        "_chunked",
        "_connection",
        "_method",
        "_transport",
        "_version",
        "ended",
        "listener",
        "num_bytes",
        "started",
    )

    def __init__(self, connection: ReplyOwner, transport: asyncio.Transport, request: HttpRequest) -> None:
        self._connection = connection
        self._transport = transport
        self._method = request.method
        self._version = request.version
        self._chunked = False
        self.started = False
        self.ended = False
        self.num_bytes = 0
        self.listener: ReplyListener | None = None

    @property
    def takes_chunks(self) -> bool:
        """Whether the client understands chunked encoding, so that chunks may be passed on as they are."""
        return self._version == "1.1" and self._method != "HEAD"

    @property
    def is_paused(self) -> bool:
        """Whether the client reads more slowly than it is written to."""
        return self._connection.is_write_paused

    def send(self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> None:
        """Send a whole response."""
        if self.ended:
            return
        head = self._head(status, headers, None if status in BODILESS else len(body))
        self._write(head + body if has_body(self._method, status) else head)
        self.end_framed()

    def start(self, status: int, headers: Iterable[tuple[bytes, bytes]], length: int | None) -> None:
        """Send the head; the body follows by `write`. With no length, it is chunked or ends with the connection."""
        if not self.ended:
            self._write(self._head(status, headers, length))

    def write(self, data: bytes) -> None:
        """Send a part of the body."""
        if self.ended or not data or self._method == "HEAD":
            return
        self._write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def start_framed(self, head: bytes, data: bytes) -> Callable[[bytes], None]:
        """Send a head that names the body's length or its encoding, without its last line, and a part of the body.

        From here on the body is written by what is returned, with the framing that it has already, and ended by
        `end_framed`. Only for clients that take chunks, if it is chunked, and not after `reply_gone`.
        """
        self.started = True
        if not self.ended:
            self._write(b"".join((head, self._connection.connection_header(self._version), b"\r\n", data)))
        return self._transport.write

    def end(self) -> None:
        """End the body."""
        if self.ended:
            return
        if self._chunked:
            self._write(LAST_CHUNK)
        self.end_framed()

    def end_framed(self) -> None:
        """End a body that is complete as it was framed."""
        if not self.ended:
            self.forget()
            self._connection.reply_ended(self)

    def cut(self) -> None:
        """Break the response off, so that nobody can take the part for the whole; what was written still goes out."""
        if not self.ended:
            self.forget()
            self._connection.close()

    def forget(self) -> None:
        """Do nothing any more, and let go of who has to be called: nothing here must wait for the garbage collector."""
        self.ended = True
        self.listener = None

    def _head(self, status: int, headers: Iterable[tuple[bytes, bytes]], length: int | None) -> bytes:
        self.started = True
        parts = [response_head(status, headers), self._connection.date_header()]
        if length is not None:
            parts.append(b"content-length: %d\r\n" % length)
        elif has_body(self._method, status):
            if self._version == "1.1":
                self._chunked = True
                parts.append(CHUNKED_HEADER)
            else:
                self._connection.keeps_alive = False
        parts += (self._connection.connection_header(self._version), b"\r\n")
        return b"".join(parts)

    def _write(self, data: bytes) -> None:
        self.num_bytes += len(data)
        self._transport.write(data)
