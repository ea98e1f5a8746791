"""The server's side of a connection: requests are parsed once, limits are held, replies go out in order.

Whoever answers is called, never awaited: there is no task and no queue between the socket and an `Application`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import Any, Final

import httptools

from expediter.gateway.http.known_heads import HeadPattern, KnownHeads, pattern_of
from expediter.gateway.http.reply import Answer, Reply
from expediter.gateway.http.server_state import ServerState
from expediter.gateway.http.wire import CLOSE_HEADER, KEEP_ALIVE_HEADER, Headers, HttpRequest

logger = logging.getLogger(__name__)

_LINGER_S: Final = 3.0
"""A client that is turned away may go on sending for so long, so that it gets to read why."""
_NEVER: Final = float("inf")


class _Turn:
    """A request whose turn to be answered has come or will come; `refusal` is set if the answer is known."""

    __slots__ = ("keeps_alive", "refusal", "request")

    def __init__(self, request: HttpRequest, keeps_alive: bool, refusal: Answer | None) -> None:
        self.request = request
        self.keeps_alive = keeps_alive
        self.refusal = refusal


class HttpConnection(asyncio.Protocol):
    """One client's connection."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self.keeps_alive = True
        self.is_write_paused = False
        self.deadline_s = _NEVER
        self.write_deadline_s = _NEVER
        self._limits = state.limits
        self._max_head_bytes = state.limits.max_head_bytes
        self._known = KnownHeads()
        self._pattern: HeadPattern | None = None  # of the request that is read, if it came in one piece
        self._transport: Any = None
        self._parser = httptools.HttpRequestParser(self)
        self._turns: deque[_Turn] = deque()
        self._reply: Reply | None = None
        self._is_answering = False
        self._is_deaf = False  # what still comes is read and thrown away
        self._peer: tuple[str, int] | None = None
        self._sock: tuple[str, int] | None = None
        self._reset()

    def _reset(self) -> None:
        """Forget the message that was read; the next one has not begun."""
        self._target = b""
        self._headers: Headers = []
        self._head_bytes = 0
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._request: HttpRequest | None = None
        self._in_message = False
        self._upgrades = False

    # ---- transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._transport.set_write_buffer_limits(high=self._limits.write_buffer_bytes)
        self._peer = _address(transport.get_extra_info("peername"))
        self._sock = _address(transport.get_extra_info("sockname"))
        self.deadline_s = time.monotonic() + self._limits.keep_alive_s
        self._state.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._state.left(self)
        self._state.buffered_bytes -= self._body_bytes
        self._body_bytes = 0
        self._turns.clear()
        self._is_deaf = True
        reply, self._reply = self._reply, None
        if reply is not None and not reply.ended:
            listener = reply.listener
            reply.forget()
            if listener is not None:
                listener.reply_gone()

    def pause_writing(self) -> None:
        self.is_write_paused = True
        self.write_deadline_s = time.monotonic() + self._limits.write_timeout_s
        if self._reply is not None and self._reply.listener is not None:
            self._reply.listener.reply_paused()

    def resume_writing(self) -> None:
        self.is_write_paused = False
        self.write_deadline_s = _NEVER
        if self._reply is not None and self._reply.listener is not None:
            self._reply.listener.reply_resumed()

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        if not self._in_message and self._reply is None:
            now_s = time.monotonic()
            if self._take_known(data, now_s):
                return
            self.deadline_s = now_s + self._limits.head_timeout_s
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._go_on_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self._parsing_failed(error)
        else:
            if self._request is None and self._in_message:
                self._head_bytes += len(data)
                if self._head_bytes > 2 * self._max_head_bytes:
                    self._turn_away(self._refuse(431, "the head of the request is too large"))

    def _take_known(self, data: bytes, now_s: float) -> bool:
        """Take a whole request in whose head was seen before; return False if it is none."""
        request = self._known.request(data, now_s)
        if request is None or (request.length or 0) > self._limits.max_body_bytes:
            self._pattern = pattern_of(data)
            return False
        refusal = self._state.app.admit(request)
        if refusal is not None:
            self._request = request
            self._turn_away(refusal)
        else:
            self._answer(request, True, None)
        return True

    def close(self) -> None:
        """Close once everything that was written has gone out, or the client has refused to read it for too long."""
        self._is_deaf = True
        self.deadline_s = time.monotonic() + self._limits.write_timeout_s
        self._transport.close()

    def sweep(self, now_s: float) -> None:
        """Close the connection if its time is up."""
        if now_s >= self.write_deadline_s:
            self._transport.abort()
        elif now_s >= self.deadline_s:
            if self._transport.is_closing():
                self._transport.abort()
            elif self._in_message and not self._is_deaf:
                self._turn_away(self._refuse(408, "the request took too long to arrive"))
            else:
                self.close()

    def abort(self) -> None:
        """Close at once, whatever has not gone out."""
        self._transport.abort()

    # ---- httptools

    def on_message_begin(self) -> None:
        self._reset()
        self._in_message = True

    def on_url(self, url: bytes) -> None:
        self._target += url
        self._head_bytes += len(url)
        if self._head_bytes > self._max_head_bytes:
            raise self._head_refusal()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > self._max_head_bytes:
            raise self._head_refusal()
        if self._request is None:  # else it is a trailer, which nobody here has a use for
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        parser = self._parser
        now_s = time.monotonic()
        method, version = parser.get_method().decode("ascii"), parser.get_http_version()
        request = HttpRequest(method, self._target, version, self._headers, now_s, self._peer, self._sock)
        self._request = request
        fault = request.fault
        if len(self._headers) > self._limits.max_headers:
            raise self._refusal(431, f"more than {self._limits.max_headers} headers")
        if fault:
            raise self._refusal(400, fault)
        self._upgrades = parser.should_upgrade()
        if self._upgrades and method == "CONNECT":
            raise self._refusal(400, "CONNECT is not supported")
        if (request.length or 0) > self._limits.max_body_bytes:
            raise self._body_refusal()
        refusal = self._state.app.admit(request)
        if refusal is not None:
            raise _RefusedError(refusal)
        if self._reply is None:
            self.deadline_s = now_s + self._limits.body_timeout_s
            if version == "1.1" and request.fields.get(b"expect", b"").lower() == b"100-continue":
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        if self._upgrades:
            return
        self._body.append(data)
        self._body_bytes += len(data)
        self._state.buffered_bytes += len(data)
        if self._body_bytes > self._limits.max_body_bytes:
            raise self._body_refusal()
        if self._state.buffered_bytes > self._limits.max_buffered_bytes:
            raise self._refusal(503, "too many request bodies are under way")

    def on_message_complete(self) -> None:
        request = self._request
        assert request is not None
        if self._upgrades:
            return
        keeps_alive = self._parser.should_keep_alive()
        body = self._body
        request.body = body[0] if len(body) == 1 else b"".join(body)
        self._forget_body()
        if self._pattern is not None and keeps_alive:
            self._known.learn(self._pattern, request)
        self._pattern = None
        self._request = None
        self._in_message = False
        self._head_bytes = 0
        if self._is_deaf:
            return
        if len(self._turns) >= self._limits.max_pipelined:
            self._is_deaf = True
            self._turns[-1].keeps_alive = False
        elif self._reply is None and not self._turns and not self._transport.is_closing():
            self._answer(request, keeps_alive, None)
        else:
            self._turns.append(_Turn(request, keeps_alive, None))

    # ---- what is wrong

    def _head_refusal(self) -> _RefusedError:
        return self._refusal(431, f"the head of the request exceeds {self._max_head_bytes} bytes")

    def _body_refusal(self) -> _RefusedError:
        return self._refusal(413, f"the body exceeds {self._limits.max_body_bytes} bytes")

    def _refusal(self, status: int, message: str) -> _RefusedError:
        return _RefusedError(self._refuse(status, message))

    def _refuse(self, status: int, message: str) -> Answer:
        """Return what the client is told of the message that is being read."""
        target = self._target if self._in_message else b""
        return self._state.app.refuse(status, message, target.partition(b"?")[0].decode("latin-1"))

    def _forget_body(self) -> None:
        self._state.buffered_bytes -= self._body_bytes
        self._body_bytes = 0
        self._body = []

    def _parsing_failed(self, error: httptools.HttpParserError) -> None:
        cause = error.__context__
        if isinstance(cause, _RefusedError):
            self._turn_away(cause.answer)
        elif isinstance(error, httptools.HttpParserCallbackError):
            logger.error("internal error", exc_info=cause)
            self._turn_away(self._refuse(500, "internal error"))
        elif self._turns[-1].keeps_alive if self._turns else self.keeps_alive:
            self._turn_away(self._refuse(400, "the request is no valid HTTP/1.1"))
        else:
            self._is_deaf = True  # behind a request that closes the connection anything may come

    def _turn_away(self, answer: Answer) -> None:
        """Answer a message that is read no further, after those before it, and close the connection behind it."""
        request = self._request or HttpRequest("GET", b"/", "1.1", [], time.monotonic())
        self._is_deaf = True
        self._forget_body()
        self._turns.append(_Turn(request, False, answer))
        self._answer_next()

    def _go_on_without_upgrade(self, rest: bytes) -> None:
        """Read the message again as if it had not asked for another protocol: a server may ignore that (RFC 9110, 7.8).

        Java's client asks for h2c with every first request; its body would be taken for bytes of that protocol.
        """
        request = self._request
        assert request is not None
        kept = [pair for pair in request.headers if pair[0] not in {b"upgrade", b"http2-settings", b"connection"}]
        line = b"%b %b HTTP/%b\r\n" % (request.method.encode(), request.target, request.version.encode())
        if request.length is not None:
            kept.append((b"content-length", b"%d" % request.length))
        head = b"".join(b"%b: %b\r\n" % pair for pair in kept)
        self._parser = httptools.HttpRequestParser(self)
        self._reset()
        self.data_received(b"%b%b\r\n%b" % (line, head, rest))

    # ---- replies

    def date_header(self) -> bytes:
        return self._state.date_header

    def connection_header(self, version: str) -> bytes:
        """Return the line that says what becomes of the connection behind a response, where that has to be said."""
        if not self.keeps_alive or self._state.is_closing:
            return CLOSE_HEADER
        return KEEP_ALIVE_HEADER if version == "1.0" else b""

    def reply_ended(self, reply: Reply) -> None:
        """Go on to the next request, or close."""
        if reply is not self._reply:
            return
        self._reply = None
        if not self.keeps_alive or self._state.is_closing:
            if self._is_deaf and not self._state.is_closing:
                self._linger()
            else:
                self.close()
            return
        if not self._in_message:
            self.deadline_s = time.monotonic() + self._limits.keep_alive_s
        elif self._request is None:
            self.deadline_s = time.monotonic() + self._limits.head_timeout_s
        else:
            self.deadline_s = time.monotonic() + self._limits.body_timeout_s
        self._answer_next()

    def _linger(self) -> None:
        """Close our half, and the rest when the client has: closing with unread bytes would take the answer along."""
        self._transport.write_eof()
        self.deadline_s = time.monotonic() + _LINGER_S

    def _answer_next(self) -> None:
        if self._is_answering:
            return
        self._is_answering = True
        try:
            while self._turns and self._reply is None and not self._transport.is_closing():
                turn = self._turns.popleft()
                self._answer(turn.request, turn.keeps_alive, turn.refusal)
        finally:
            self._is_answering = False

    def _answer(self, request: HttpRequest, keeps_alive: bool, refusal: Answer | None) -> None:
        self.keeps_alive = keeps_alive
        self.deadline_s = _NEVER
        reply = self._reply = Reply(self, self._transport, request)
        if refusal is not None:
            reply.send(*refusal)
            return
        try:
            self._state.app.handle(request, reply)
        except Exception:
            logger.exception("internal error")
            if reply.started:
                reply.cut()
            else:
                reply.send(*self._state.app.refuse(500, "internal error", request.path))

    @property
    def is_idle(self) -> bool:
        """Whether nothing is read or answered."""
        return self._reply is None and not self._turns and not self._in_message


class _RefusedError(Exception):
    """A message is not read to its end."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.status)
        self.answer = answer


def _address(found: object) -> tuple[str, int] | None:
    return (str(found[0]), int(found[1])) if isinstance(found, tuple | list) and len(found) >= 2 else None
