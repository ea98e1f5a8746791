"""Copies one backend's response to the client, byte for byte, and watches that it goes on.

Per piece of a stream: one write, and a note for its usage. Nobody looks at the clock for it: ten times a second `check`
sees whether anything has come since it last looked, which is exact enough for silences of seconds.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from expediter.control.health import Failure
from expediter.control.patience import Patience, Silence, size_of
from expediter.gateway.backends.backend import Dispatch, Usage
from expediter.gateway.door import refusals
from expediter.gateway.door.beginnings import says_something
from expediter.gateway.door.heads import framed_head, passed_headers
from expediter.gateway.door.usage import TAIL_BYTES, Answered, ends_stream, usage_of
from expediter.gateway.http.reply import Reply
from expediter.gateway.http.response_heads import ResponseHead
from expediter.gateway.http.upstream import UpstreamCall, UpstreamFailure, UpstreamPool

_NUM_ENDS: Final = 4
"""Pieces of a response that are kept for its usage: the last event, `[DONE]` and the last chunk may come apart."""
SERVER_ERROR: Final = 500
"""A status from here on is a backend's failure."""
_FAILURES: Final = {
    UpstreamFailure.CONNECT: Failure.CONNECT,
    UpstreamFailure.BROKEN: Failure.BROKEN,
    UpstreamFailure.PROTOCOL: Failure.BROKEN,
}


class Asker(Protocol):
    """Whose request it is."""

    def may_try_again(self, now_s: float) -> bool:
        """Return whether another attempt is allowed."""

    def answering(self, now_s: float) -> None:
        """The first token is here, or the first byte of what is no stream."""

    def answered(self, answered: Answered, now_s: float) -> None:
        """The response has ended as it should."""

    def failed(self, failure: Failure, now_s: float, *, is_retried: bool = False) -> None:
        """There is no response, and nothing has gone to the client: another attempt may follow.

        Args:
            is_retried: it does, for `may_try_again` has said so.
        """

    def broke(self, status: int, failure: Failure | None, now_s: float) -> None:
        """The response broke off; the client knows. None: our own part failed."""

    def client_left(self, answered: Answered | None = None) -> None:
        """The client has left, and whoever answered it has noticed; with what had come of the answer."""


class Relay:
    """One attempt to get a request answered by a foreign backend.

    Args:
        path: of the request; it says how a stream is told of an error.
        output_tokens: that the client wants at most, infinite if it does not say.
    """

    __slots__ = (
        "_asker",
        "_call",
        "_dispatch",
        "_ends",
        "_head",
        "_is_answering",
        "_is_framed",
        "_is_paused",
        "_longest_start_s",
        "_max_gap_s",
        "_num_bytes",
        "_num_events",
        "_output_tokens",
        "_path",
        "_patience",
        "_reply",
        "_seen_bytes",
        "_shown_id",
        "_write",
        "first_byte_s",
    )

    def __init__(
        self,
        asker: Asker,
        dispatch: Dispatch,
        reply: Reply,
        patience: Patience,
        shown_id: bytes,
        path: str,
        output_tokens: float,
    ) -> None:
        self._asker = asker
        self._dispatch = dispatch
        self._reply = reply
        self._patience = patience
        self._shown_id = shown_id
        self._path = path
        self._output_tokens = output_tokens
        self._call: UpstreamCall | None = None
        self._head: ResponseHead | None = None
        self._ends: deque[bytes] = deque(maxlen=_NUM_ENDS)
        self._num_bytes = 0
        self._num_events = 0
        self._seen_bytes = 0  # of the answer, when `check` last looked
        self._max_gap_s = 0.0
        self._longest_start_s = 0.0
        self._is_answering = False
        self._is_framed = False
        self._write: Callable[[bytes], None] = reply.write
        self._is_paused = False
        self.first_byte_s: float | None = None

    def start(self, pool: UpstreamPool, head: bytes, body: bytes) -> None:
        """Send the request."""
        self._call = pool.send(head, body, self, unwraps=not self._reply.takes_chunks)

    def cancel(self) -> None:
        """Want no more of it; the backend sees its connection closed."""
        if self._call is not None:
            self._call.cancel()
            self._call = None

    def so_far(self) -> Answered | None:
        """Return what has come of the response, None before its body's first byte."""
        if self.first_byte_s is None or self._head is None:
            return None
        return Answered(self._head.status, None, self._num_bytes, self._num_events)

    def pause(self) -> None:
        """The client reads too slowly: take no more from the backend."""
        self._is_paused = True
        if self._call is not None:
            self._call.pause()

    def resume(self) -> None:
        """The client has caught up."""
        self._is_paused = False
        self._dispatch.progress_s = time.monotonic()  # what it was silent for was the client's doing
        if self._call is not None:
            self._call.resume()

    # ---- what comes

    def upstream_head(self, head: ResponseHead) -> None:
        """The head; the client gets it with the first bytes of the body, so that another may still answer."""
        now_s = self._dispatch.progress_s = time.monotonic()
        self._head = head
        if head.status >= SERVER_ERROR and self._asker.may_try_again(now_s):
            self.cancel()
            self._asker.failed(Failure.STATUS_5XX, now_s, is_retried=True)

    def upstream_data(self, data: bytes, is_last: bool) -> None:
        """Body bytes: on to the client as they are."""
        if self._is_answering:
            self._pass_on(data)
            if is_last:
                self._end(time.monotonic())
        else:
            now_s = time.monotonic()
            self._begin(data, now_s)
            if is_last:
                self._end(now_s)

    def _pass_on(self, data: bytes) -> None:
        """Copy a piece; this is all that is done for most pieces of a stream."""
        self._num_bytes += len(data)
        self._num_events += data.count(b"data: ")
        self._ends.append(data)
        self._write(data)

    def upstream_failed(self, failure: UpstreamFailure) -> None:
        """There will be no whole response."""
        self._fail(_FAILURES[failure], time.monotonic())

    def check(self, now_s: float) -> None:
        """Give the backend up if it has been silent for too long."""
        if self._call is None or self._is_paused:
            return
        dispatch = self._dispatch
        silent_s = now_s - dispatch.progress_s
        if self._seen_bytes != self._num_bytes:
            if self._seen_bytes:
                self._max_gap_s = max(self._max_gap_s, silent_s)
            self._seen_bytes = self._num_bytes
            dispatch.progress_s = now_s
            return
        if silent_s < self._patience.min_s:
            return
        silence = Silence.GAP if self._is_answering else self._first_silence
        size = size_of(silence, dispatch.num_tokens, self._output_tokens)
        backend, model, patience = dispatch.backend, dispatch.model, self._patience
        limit_s = patience.limit_s(
            backend.replica_id,
            model,
            silence,
            size,
            own_gap_s=self._max_gap_s,
            num_pending_tokens=backend.snapshot().num_pending_tokens,
        )
        if patience.is_over(silent_s, now_s - backend.heard_s(), limit_s):
            self.give_up(Failure.TIMEOUT, now_s)

    def give_up(self, failure: Failure, now_s: float) -> None:
        """Stop as if the backend had failed."""
        call = self._call
        if call is not None:
            call.cancel()
            self._fail(failure, now_s)
            self._call = None

    # ---- what becomes of it

    @property
    def _first_silence(self) -> Silence:
        return Silence.START if self._dispatch.is_stream else Silence.WHOLE

    def _begin(self, data: bytes, now_s: float) -> None:
        """Hand on what comes up to the first token, for which a stream may wait long after its first byte."""
        head, dispatch = self._head, self._dispatch
        assert head is not None
        if self.first_byte_s is None:
            self.first_byte_s = now_s
            self._longest_start_s = now_s - dispatch.at_s
            self._num_bytes, self._num_events = len(data), data.count(b"data: ")
            self._ends.append(data)
            self._start_reply(head, data)
        else:
            self._longest_start_s = max(self._longest_start_s, now_s - dispatch.progress_s)
            self._pass_on(data)
        dispatch.progress_s = now_s
        self._is_answering = not head.is_event_stream or says_something(data)
        if not self._is_answering:
            self._seen_bytes = self._num_bytes  # what comes next ends the wait for the first token, and is no gap
            return
        self._seen_bytes = 0
        if head.is_chunked and self._is_framed and self._call is not None:
            self._call.take_chunks(self._pass_on)
        if head.status < SERVER_ERROR:
            dispatch.first_byte(now_s)
            self._asker.answering(now_s)

    def _start_reply(self, head: ResponseHead, data: bytes) -> None:
        reply = self._reply
        self._is_framed = head.length is not None or (head.is_chunked and reply.takes_chunks)
        if self._is_framed:
            self._write = reply.start_framed(framed_head(head, self._shown_id), data)
        else:
            self._write = reply.write
            reply.start(head.status, passed_headers(head, self._shown_id), None)
            reply.write(data)

    def _end(self, now_s: float) -> None:
        head = self._head
        assert head is not None
        ends = self._ends
        tail = ends[0][-TAIL_BYTES:] if len(ends) == 1 else b"".join([piece[-TAIL_BYTES:] for piece in ends])
        if head.length is None and not head.is_chunked and head.is_event_stream and not ends_stream(self._path, tail):
            # Its end is that of the connection: nothing but its last event tells a whole one from a broken one.
            self._fail(Failure.BROKEN, now_s)
            return
        self._call = None
        if self._is_framed:
            self._reply.end_framed()
        else:
            self._reply.end()
        usage = usage_of(tail)
        if head.status < 400:
            self._learn(usage, now_s)
        self._asker.answered(Answered(head.status, usage, self._num_bytes, self._num_events), now_s)

    def _learn(self, usage: Usage | None, now_s: float) -> None:
        dispatch, silence = self._dispatch, self._first_silence
        num_output = self._num_bytes / 4 if usage is None else usage.num_output_tokens
        size = size_of(silence, dispatch.num_ahead + dispatch.num_tokens, num_output)
        backend_id, model = dispatch.backend.replica_id, dispatch.model
        self._patience.borne(backend_id, model, silence, self._longest_start_s, size, now_s)
        if len(self._ends) > 1:
            self._max_gap_s = max(self._max_gap_s, now_s - dispatch.progress_s)
            self._patience.borne(backend_id, model, Silence.GAP, self._max_gap_s, 1.0, now_s)

    def _fail(self, failure: Failure, now_s: float) -> None:
        if self.first_byte_s is None:
            self._call = None
            self._asker.failed(failure, now_s)
            return
        head = self._head
        assert head is not None
        self._tell(failure)
        self._call = None
        self._reply.cut()
        self._asker.broke(head.status, failure, now_s)

    def _tell(self, failure: Failure) -> None:
        """Say in an event stream that it is broken, where the framing allows another event."""
        if self._head is None or not self._head.is_event_stream:
            return
        event = refusals.backend_failed(failure).event_at(self._path, self._num_events)
        if not self._ends[-1].endswith((b"\n\n", b"\n\n\r\n")):
            event = b"\n\n" + event  # in the middle of another
        if not self._is_framed:
            self._write(event)
        elif self._call is not None and self._call.at_boundary:
            self._write(b"%x\r\n%b\r\n" % (len(event), event))
