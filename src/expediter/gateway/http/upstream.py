"""Connections to a backend: requests go out as bytes, responses come back as bytes, to callbacks."""

from __future__ import annotations

import asyncio
import enum
import ssl as tls
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from expediter.core.errors import ConfigurationError
from expediter.gateway.http.chunks import NUM_PLAIN, PLAIN_STARTS, ChunkError, ChunkTracker
from expediter.gateway.http.known_heads import HeadPattern
from expediter.gateway.http.response_heads import ResponseError, ResponseHead, parse_response_head

_MAX_HEAD_BYTES: Final = 65536
_MAX_HEADS: Final = 4
_JOIN_BYTES: Final = 65536
"""A request up to here goes out as one piece; above, copying it would cost more than a second write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a backend listens.

    Args:
        host, port: of a TCP socket.
        path: of a Unix socket instead, which never talks TLS.
        ssl: how to talk TLS with it, None for none.
        connect_timeout_s: for TCP and TLS to be set up.
        max_idle: connections that are kept open without a request.
    Raises:
        ConfigurationError: neither or both kinds of socket are named.
    """

    host: str = ""
    port: int = 0
    path: str | None = None
    ssl: tls.SSLContext | None = None
    connect_timeout_s: float = 2.0
    max_idle: int = 512

    def __post_init__(self) -> None:
        if bool(self.host) == bool(self.path):
            raise ConfigurationError("a backend needs a host, or the path of a Unix socket")


class UpstreamFailure(enum.Enum):
    """Why there is no whole response."""

    CONNECT = "connect"
    """The backend could not be reached; it has seen nothing of the request."""
    BROKEN = "broken"
    """The connection broke."""
    PROTOCOL = "protocol"
    """What came is no HTTP response."""


class UpstreamListener(Protocol):
    """Hears of a response. After the last data or a failure nothing more comes."""

    def upstream_head(self, head: ResponseHead) -> None:
        """The head is here."""

    def upstream_data(self, data: bytes, is_last: bool) -> None:
        """Body bytes; of a chunked body whole chunks with their framing, as far as they are not very long."""

    def upstream_failed(self, failure: UpstreamFailure) -> None:
        """There will be no (whole) response."""


def _to_nobody(data: bytes, is_last: bool) -> None:
    """Take body bytes that nobody waits for."""


class UpstreamCall:
    """One request to a backend.

    Attributes:
        listener: hears of the response; None once it is over, or not wanted any more.
        unwraps: the listener wants a chunked body without its framing.
    """

    __slots__ = ("_connecting", "_connection", "_pool", "_request", "listener", "unwraps")

    def __init__(
        self, pool: UpstreamPool, request: tuple[bytes, bytes], listener: UpstreamListener, unwraps: bool
    ) -> None:
        self._pool = pool
        self.unwraps = unwraps
        self._request = request
        self.listener: UpstreamListener | None = listener
        self._connection: _Connection | None = None
        self._connecting: asyncio.Task[None] | None = None

    def cancel(self) -> None:
        """Want no more of it: the connection is closed at once, and the listener hears nothing any more."""
        self.listener = None
        if self._connection is not None:
            self._connection.abort()
        if self._connecting is not None:
            self._connecting.cancel()

    def pause(self) -> None:
        """Read no more until `resume`; the backend is slowed down by TCP."""
        if self._connection is not None:
            self._connection.pause_reading()

    def resume(self) -> None:
        """Go on reading."""
        if self._connection is not None:
            self._connection.resume_reading()

    def take_chunks(self, receiver: Callable[[bytes], None]) -> None:
        """Hand pieces of a chunked body that are one whole chunk each to this receiver instead of `upstream_data`.

        A stream consists of them but for its end, and they come by the thousand: this is the short way.
        """
        if self._connection is not None:
            self._connection.take_chunks(receiver)

    @property
    def at_boundary(self) -> bool:
        """Whether what was passed on of a chunked body ends with a whole chunk."""
        return self._connection is not None and self._connection.at_boundary

    # ---- for the pool and its connections

    def start(self, connection: _Connection | None) -> None:
        if connection is None:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())
        else:
            self._connection = connection
            connection.send(self._request, self)

    async def _connect(self) -> None:
        try:
            connection = await self._pool.connect()
        except (OSError, TimeoutError):  # a failed handshake is an OSError, too
            self.failed(UpstreamFailure.CONNECT)
            return
        finally:
            self._connecting = None
        if self.listener is None:
            connection.abort()
            return
        self._connection = connection
        connection.send(self._request, self)

    def failed(self, failure: UpstreamFailure) -> None:
        listener, self.listener = self.listener, None
        if listener is not None:
            listener.upstream_failed(failure)

    def again(self) -> None:
        """The kept connection was closed by the backend before it answered: try once more on a new one."""
        self._connection = None
        if self.listener is not None:
            self.start(None)


class UpstreamPool:
    """Connections to one backend; one that has answered is kept for the next request."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._idle: list[_Connection] = []
        self._heads: list[tuple[HeadPattern, ResponseHead, bool]] = []  # the newest first: they tell the time
        self._is_closed = False

    def send(self, head: bytes, body: bytes, listener: UpstreamListener, *, unwraps: bool = False) -> UpstreamCall:
        """Send a request; the listener is called from the event loop, never from in here.

        Args:
            head: request line and headers with Host and Content-Length, empty line included.
            unwraps: the listener wants a chunked body without its framing.
        """
        call = UpstreamCall(self, (head, body), listener, unwraps)
        call.start(self._idle.pop() if self._idle else None)
        return call

    def close(self) -> None:
        """Close idle connections; those in use close behind their response."""
        self._is_closed = True
        for connection in tuple(self._idle):
            connection.abort()

    async def connect(self) -> _Connection:
        address, loop = self.address, asyncio.get_running_loop()
        async with asyncio.timeout(address.connect_timeout_s):
            if address.path is not None:
                _, connection = await loop.create_unix_connection(
                    lambda: _Connection(self),
                    address.path,
                    ssl=address.ssl,
                    server_hostname="" if address.ssl else None,
                )
            else:
                _, connection = await loop.create_connection(
                    lambda: _Connection(self), address.host, address.port, ssl=address.ssl
                )
        return connection

    def read_head(self, data: bytes) -> tuple[ResponseHead, bool, int] | None:
        """Return the head that data begins with, as `parse_response_head` does, and where the body begins.

        Heads that came before, in whatever response of this backend, are not parsed again.

        Returns:
            None if the head is not whole.
        Raises:
            ResponseError: it is malformed, or too long.
        """
        for pattern, head, keeps_alive in self._heads:
            found = pattern.find(data)
            if found is not None:
                return (head if pattern.length is None else head.with_length(found[0])), keeps_alive, found[1]
        end = data.find(b"\r\n\r\n")
        if (len(data) if end < 0 else end) > _MAX_HEAD_BYTES:
            raise ResponseError
        if end < 0:
            return None
        head, keeps_alive = parse_response_head(data[: end + 2])
        pattern = HeadPattern(data[: end + 4])
        if pattern.is_plain and head.length == pattern.length:
            self._heads = [(pattern, head, keeps_alive), *self._heads[: _MAX_HEADS - 1]]
        return head, keeps_alive, end + 4

    def keep(self, connection: _Connection) -> None:
        if self._is_closed or len(self._idle) >= self.address.max_idle:
            connection.abort()
        else:
            self._idle.append(connection)

    def drop(self, connection: _Connection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)


class _Connection(asyncio.Protocol):
    """One connection to a backend: at most one request at a time."""

    def __init__(self, pool: UpstreamPool) -> None:
        self._pool = pool
        self._transport: Any = None
        self._call: UpstreamCall | None = None
        self._was_used = False
        self._begin()

    def _begin(self) -> None:
        self._buffer = b""
        self._got_bytes = False
        self._head: ResponseHead | None = None
        self._chunks: ChunkTracker | None = None
        self._left: int | None = None
        self._keeps_alive = True
        self._is_paused = False
        self._deliver: Callable[[bytes, bool], None] = _to_nobody
        self._chunk_receiver: Callable[[bytes], None] | None = None
        self._take_chunk: Callable[[bytes], None] | None = None  # the receiver while the next byte begins a chunk

    def send(self, request: tuple[bytes, bytes], call: UpstreamCall) -> None:
        self._begin()
        self._call = call
        head, body = request
        if len(body) <= _JOIN_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)

    def take_chunks(self, receiver: Callable[[bytes], None]) -> None:
        self._chunk_receiver = receiver

    def abort(self) -> None:
        self._call = None
        self._deliver = _to_nobody
        self._take_chunk = self._chunk_receiver = None
        self._transport.abort()

    def pause_reading(self) -> None:
        if not self._is_paused and not self._transport.is_closing():
            self._is_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._is_paused and not self._transport.is_closing():
            self._is_paused = False
            self._transport.resume_reading()

    @property
    def at_boundary(self) -> bool:
        return self._chunks is not None and self._chunks.at_boundary

    # ---- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        call, self._call = self._call, None
        self._take_chunk = self._chunk_receiver = None
        if call is None:
            self._pool.drop(self)
        elif self._head is not None and self._head.length is None and not self._head.is_chunked:
            self._deliver(b"", True)  # the body ends with the connection
        elif self._was_used and not self._got_bytes:
            call.again()
        else:
            call.failed(UpstreamFailure.BROKEN)

    def data_received(self, data: bytes) -> None:
        take_chunk = self._take_chunk
        if take_chunk is not None:
            num_bytes = len(data)
            if num_bytes < NUM_PLAIN and data.startswith(PLAIN_STARTS[num_bytes]) and data.endswith(b"\r\n"):
                take_chunk(data)
                return
        if self._call is None:  # nothing was asked: a backend that talks by itself is not to be trusted
            self._transport.abort()
            return
        try:
            if self._head is None:
                self._got_bytes = True
                rest = self._read_head(data)
                if rest is None:
                    return
                data = rest
            chunks = self._chunks
            if chunks is None:
                self._read_body(data)
                return
            data = chunks.feed(data)
            if chunks.ended:
                self._end(data)
            else:
                if data:
                    self._deliver(data, False)
                self._take_chunk = self._chunk_receiver if chunks.is_between else None
        except (ChunkError, ResponseError):
            self._transport.abort()
            self._take_chunk = None
            call, self._call = self._call, None
            if call is not None:
                call.failed(UpstreamFailure.PROTOCOL)

    def _read_head(self, data: bytes) -> bytes | None:
        """Take the head in; return what is there of the body, None if there is none to be read yet, or ever."""
        if self._buffer:
            data = self._buffer + data
        read = self._pool.read_head(data)
        if read is None:
            self._buffer = data
            return None
        self._buffer = b""
        head, keeps_alive, body_at = read
        rest = data[body_at:]
        if head.status < 200:
            return self._read_head(rest) if rest else None
        self._head, self._keeps_alive, self._left = head, keeps_alive, head.length
        call = self._call
        assert call is not None
        self._chunks = ChunkTracker(unwraps=call.unwraps) if head.is_chunked else None
        listener = call.listener
        assert listener is not None, "a call that is cancelled has no connection"
        self._deliver = listener.upstream_data
        listener.upstream_head(head)
        return None if self._call is None else rest

    def _read_body(self, data: bytes) -> None:
        """Take in a part of a body that is not chunked."""
        if self._left is not None:
            self._left -= len(data)
            if self._left < 0:
                raise ResponseError
            if self._left == 0:
                self._end(data)
                return
        if data:
            self._deliver(data, False)

    def _end(self, data: bytes) -> None:
        self._call = None
        self._was_used = True
        # First of all: an idle connection keeps nobody alive, and a pool that does not keep it drops who listens.
        deliver, self._deliver = self._deliver, _to_nobody
        self._take_chunk = self._chunk_receiver = None
        if not self._keeps_alive:
            self._transport.abort()
        elif not self._transport.is_closing():
            if self._is_paused:
                self.resume_reading()
            self._pool.keep(self)
        deliver(data, True)
