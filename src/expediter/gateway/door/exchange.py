"""One request at the door, from the whole body to its record.

    checked ──> routed ──> attempt ──> answered
                  ↑  │        │ failed before the first byte
                  │  │        └─> pause ─┐
                  │  └─> queued ─┐       │
                  └──────────────┴───────┘

All of it is callbacks: whoever has news calls, and what follows happens at once. After `_finish` nothing does.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Final

from expediter.control.draining import excess_s, is_hopeless
from expediter.control.health import Failure
from expediter.control.limits import Exceeded, Reservation
from expediter.control.retry import backoff_s
from expediter.control.waiting import Cause, Leaver
from expediter.core.request import Request
from expediter.gateway.backends.backend import Backend, Dispatch
from expediter.gateway.backends.dispatcher import Busy, Chosen, NobodyUp
from expediter.gateway.door import refusals
from expediter.gateway.door.bodies import body_for, decode_door_body, with_field
from expediter.gateway.door.heads import OWN_ID, TRACEPARENT, forwarded_headers, request_line
from expediter.gateway.door.own_answer import OwnAnswer
from expediter.gateway.door.parts import DoorParts
from expediter.gateway.door.relay import SERVER_ERROR, Relay
from expediter.gateway.door.story import Story
from expediter.gateway.door.usage import Answered
from expediter.gateway.errors import ApiError, deadline_exceeded, no_such_model, over_limit
from expediter.gateway.http.reply import Reply
from expediter.gateway.http.wire import HttpRequest
from expediter.gateway.tenants import Tenant
from expediter.gateway.terms import TERM_HEADERS, terms_of
from expediter.telemetry.exchanges import ExchangeRecord, Outcome
from expediter.telemetry.trace_context import new_id

_DEFAULT_OUTPUT_TOKENS: Final = 1024
"""Reserved, and expected, for a request that does not say how much it wants at most."""
_EXPIRED_STATUS: Final = 504
"""What our own API says of a request whose deadline has passed before it was started, and of nothing else."""
_GONE_STATUS: Final = 499
"""nginx's status for a client that left; nobody reads it."""


class Exchange:
    """A request that some backend shall answer."""

    __slots__ = (
        "_dispatch",
        "_excluded",
        "_headers",
        "_is_over",
        "_max_output_tokens",
        "_on_ended",
        "_parts",
        "_pause",
        "_relay",
        "_reply",
        "_request",
        "_reservation",
        "_story",
        "_tenant",
        "core",
        "model",
        "request_id",
    )

    core: Request  # once it has been checked

    def __init__(
        self,
        parts: DoorParts,
        request: HttpRequest,
        reply: Reply,
        tenant: Tenant,
        on_ended: Callable[[ExchangeRecord], None],
    ) -> None:
        self._parts = parts
        self._request = request
        self._reply = reply
        self._tenant = tenant
        self._on_ended = on_ended
        self.request_id = parts.ids.new()
        self.model = ""
        self._story = Story(self.request_id, request, reply, tenant.name)
        self._max_output_tokens: int | None = None
        self._headers = b""
        self._reservation: Reservation | None = None
        self._excluded: set[int] = set()
        self._dispatch: Dispatch | None = None
        self._relay: Relay | None = None
        self._pause: asyncio.TimerHandle | None = None
        self._is_over = False

    # ---- in

    def begin(self) -> None:
        """Check the request and send it on its way."""
        self._reply.listener = self
        if self._parts.tracer is not None:
            self._story.trace = self._parts.tracer.begin(self._request.fields.get(TRACEPARENT))
        try:
            self._check()
        except ApiError as error:
            self._refuse(error, refusals.outcome_of(error.status))
            return
        self._parts.budget.earn()
        room = self._parts.room
        if (room.is_used and room.somebody_waits(self.model)) or not self.called(time.monotonic()):
            self._wait()

    def _check(self) -> None:
        """Find out what is asked for, and whether it may be.

        Raises:
            ApiError: it may not.
        """
        parts, request, tenant = self._parts, self._request, self._tenant
        body = decode_door_body(request.body)
        story = self._story
        story.is_stream, self._max_output_tokens = bool(body.stream), body.output_tokens
        model = body.model
        if model is None:
            model = next(filter(tenant.may_use, parts.backends.models), "")
            request.body = with_field(request.body, "model", model)  # a backend's default may be another
        if not parts.backends.knows(model) or not tenant.may_use(model):
            raise self._unknown_model()
        self.model = story.model = model
        terms = story.terms = terms_of(body, () if TERM_HEADERS.isdisjoint(request.fields) else request.headers, tenant)
        max_tokens = max(1, self._max_output_tokens or _DEFAULT_OUTPUT_TOKENS)
        self.core = Request(
            request_id=story.request_id,
            prompt=parts.backends.contents.prompt_tokens(model, body),
            max_tokens=max_tokens,
            priority=terms.priority,
            cache_salt=terms.cache_salt,
            tenant=tenant.name,
            session=terms.session,
            slo=terms.slo,
            slo_class=terms.slo_class,
            value=terms.value,
            refuse_late=terms.refuse_late,
            arrival_s=request.arrived_s,
        )
        num_tokens = self.core.num_prompt_tokens + max_tokens * max(1, body.n or 1)
        reserved = parts.limits.reserve(tenant.name, num_tokens, request.arrived_s)
        if isinstance(reserved, Exceeded):
            raise over_limit(reserved, tenant.limits)
        self._reservation = reserved

    def _unknown_model(self) -> ApiError:
        backends = self._parts.backends
        if any(not backend.models and not backend.is_draining for backend in backends) or not list(backends):
            return refusals.nobody_up("no backend is up, or one that is not may serve this model", 1.0)
        return no_such_model(filter(self._tenant.may_use, backends.models))

    # ---- to a backend

    def _choose(self, now_s: float) -> Chosen | Busy | NobodyUp:
        choice = self._parts.backends.dispatcher.choose(self.core, self.model, now_s, excluded=self._excluded)
        if isinstance(choice, NobodyUp) and self._excluded:
            self._excluded.clear()  # whoever has failed it once is better than nobody
            choice = self._parts.backends.dispatcher.choose(self.core, self.model, now_s)
        return choice

    def _try(self, chosen: Chosen, now_s: float) -> None:
        """Send the request to whom it was given, unless that would be too late for it."""
        parts, backend, predicted_s = self._parts, chosen.backend, chosen.predicted_ttft_s
        if predicted_s is not None and is_hopeless(self.core, predicted_s, now_s):
            self._refuse(refusals.too_late(excess_s(self.core, predicted_s, now_s)), Outcome.LATE)
            return
        story = self._story
        story.chosen = chosen
        dispatch = parts.backends.dispatcher.dispatched(chosen, self.core, now_s, is_stream=story.is_stream)
        self._dispatch = dispatch
        if parts.room.is_used:
            parts.room.started(self, now_s)
        if backend.is_own:
            self._ask_own(dispatch)
            return
        trace, parent = story.trace, None
        if trace is not None:
            story.span_id = new_id(64)
            parent = trace.traceparent(story.span_id)
        if not self._headers:
            is_traced = trace is not None
            self._headers = forwarded_headers(self._request, story.own_id, story.shown_id, is_traced=is_traced)
        body, max_output = body_for(backend, self._request, self.core.cache_salt, parts.salts), self._max_output_tokens
        line = request_line(self._request, backend, parent, len(body))
        self._relay = Relay(
            self,
            dispatch,
            self._reply,
            parts.patience,
            story.shown_id,
            self._request.path,
            math.inf if max_output is None else max_output,
        )
        self._relay.start(parts.pools.of(backend), line + self._headers, body)

    def _ask_own(self, dispatch: Dispatch) -> None:
        app, request = self._parts.own_app, self._request
        assert app is not None
        story = self._story
        own_id = (OWN_ID, story.own_id)
        request.headers = [*(pair for pair in request.headers if pair[0] != OWN_ID), own_id]
        OwnAnswer(self, dispatch).start(app, request, self._reply, story.shown_id, self._tenant)

    # ---- the queue

    def _wait(self) -> None:
        room, story = self._parts.room, self._story
        if story.queued_s is None:
            story.queued_s = time.monotonic()
            story.queued_behind = (len(room), room.num_tokens)
        deadline_s = story.terms.deadline_s
        full = room.offer(self, math.inf if deadline_s is None else self._request.arrived_s + deadline_s)
        if full is not None:
            self._refuse(refusals.queue_full(full.retry_after_s), Outcome.NO_CAPACITY)
        else:
            room.call_soon()

    def called(self, now_s: float) -> bool:
        """It is this one's turn: return whether it has gone, to a backend or otherwise; False if there is no room."""
        choice = self._choose(now_s)
        if isinstance(choice, Busy):
            return False
        if isinstance(choice, Chosen):
            self._try(choice, now_s)
        else:
            self._refuse(refusals.nobody_up(choice.message, choice.retry_after_s), Outcome.NO_CAPACITY)
        return True

    def dismissed(self, leaver: Leaver) -> None:
        """It has left the queue without having been served."""
        match leaver.cause:
            case Cause.EXPIRED:
                self._refuse(deadline_exceeded(), Outcome.EXPIRED)
            case Cause.LATE:
                self._refuse(refusals.too_late(leaver.retry_after_s), Outcome.LATE)
            case Cause.PUSHED_OUT:
                self._refuse(refusals.queue_full(leaver.retry_after_s), Outcome.NO_CAPACITY)

    # ---- news of an attempt

    def may_try_again(self, now_s: float) -> bool:
        """Return whether another attempt is allowed."""
        parts = self._parts
        return len(self._story.attempts) + 1 < parts.retry.max_attempts and parts.budget.may_retry(now_s)

    def answering(self, now_s: float) -> None:
        """The first token is here, or the first byte of what is no stream."""
        self._story.first_byte_s = now_s
        if self._parts.room.is_used:
            self._parts.room.prefilled(self)

    def answered(self, answered: Answered, now_s: float) -> None:
        """The response has ended as it should."""
        outcome = refusals.outcome_of(answered.status)
        dispatch = self._dispatch
        if dispatch is not None:
            if dispatch.backend.is_own and answered.status == _EXPIRED_STATUS:
                outcome = Outcome.EXPIRED
            is_failure = answered.status >= SERVER_ERROR and not dispatch.backend.is_own
            dispatch.ended(Failure.STATUS_5XX if is_failure else outcome, now_s, answered.usage)
        self._finish(answered.status, outcome, now_s, answered=answered)

    def failed(self, failure: Failure, now_s: float, *, is_retried: bool = False) -> None:
        """There is no response, and nothing has gone to the client: try another backend, after a pause.

        Args:
            is_retried: `may_try_again` has said so already.
        """
        may_try_again = is_retried or self.may_try_again(now_s)
        self._end_attempt(failure, now_s)
        parts = self._parts
        if may_try_again:
            pause_s = backoff_s(parts.retry, len(self._story.attempts), parts.rng)
            self._pause = asyncio.get_running_loop().call_later(pause_s, self._resume)
            return
        outcome = Outcome.NO_CAPACITY if failure is Failure.CONNECT else Outcome.FAILED
        self._refuse(refusals.backend_failed(failure), outcome)

    def _resume(self) -> None:
        self._pause = None
        if not self.called(time.monotonic()):
            self._wait()

    def broke(self, status: int, failure: Failure | None, now_s: float) -> None:
        """The response broke off; the client knows."""
        if failure is not None:
            self._end_attempt(failure, now_s)
        elif self._dispatch is not None:
            self._dispatch.ended(Outcome.FAILED, now_s)
        self._finish(status, Outcome.FAILED, now_s, "backend_error")

    def _end_attempt(self, failure: Failure, now_s: float) -> None:
        dispatch, self._dispatch, self._relay = self._dispatch, None, None
        if dispatch is not None:
            self._story.attempted(dispatch, now_s, failure.value)
            self._excluded.add(dispatch.backend.replica_id)
            self._parts.room.ended(self, 0)
            dispatch.ended(failure, now_s)

    # ---- the client, and time

    def client_left(self, answered: Answered | None = None) -> None:
        """The client has closed its connection: nobody works for it any longer. What it has had counts."""
        now_s = time.monotonic()
        if self._relay is not None:
            answered = self._relay.so_far()
            self._relay.cancel()
        if self._dispatch is not None:
            self._dispatch.ended(Outcome.CLIENT_GONE, now_s)
        self._finish(_GONE_STATUS, Outcome.CLIENT_GONE, now_s, answered=answered)

    def reply_gone(self) -> None:
        """See `ReplyListener`."""
        self.client_left()

    def reply_paused(self) -> None:
        """See `ReplyListener`."""
        if self._relay is not None:
            self._relay.pause()

    def reply_resumed(self) -> None:
        """See `ReplyListener`."""
        if self._relay is not None:
            self._relay.resume()

    def check(self, now_s: float) -> None:
        """Look whether a backend has been silent for too long."""
        if self._relay is not None:
            self._relay.check(now_s)

    def leave(self, backend: Backend, failure: Failure) -> None:
        """Try elsewhere if this one still waits for a backend that has failed others, and may."""
        relay = self._relay
        if relay is None or relay.first_byte_s is not None or self._dispatch is None:
            return
        now_s = time.monotonic()
        if self._dispatch.backend is backend and self.may_try_again(now_s):  # or it may be answered yet
            relay.cancel()
            self.failed(failure, now_s, is_retried=True)

    def end_now(self, retry_after_s: float) -> None:
        """End with an error, whatever it is at: the server is about to stop. The own API ends its requests itself."""
        relay = self._relay
        if relay is not None and relay.first_byte_s is not None:
            relay.give_up(Failure.BROKEN, time.monotonic())
        elif self._dispatch is None or relay is not None:
            if relay is not None:
                relay.cancel()
            self._refuse(refusals.shutting_down(retry_after_s), Outcome.NO_CAPACITY)

    # ---- out

    def _refuse(self, error: ApiError, outcome: Outcome) -> None:
        """Answer with an error, before anything of a response was sent."""
        now_s = time.monotonic()
        if self._dispatch is not None:
            self._dispatch.ended(outcome, now_s)
        self._reply.send(*refusals.answer(error, self._story.shown_id, self._request.path))
        self._finish(error.status, outcome, now_s, refusals.recorded_code(error))

    def _finish(
        self, status: int, outcome: Outcome, now_s: float, code: str | None = None, answered: Answered | None = None
    ) -> None:
        if self._is_over:
            return
        self._is_over = True
        parts, dispatch, story = self._parts, self._dispatch, self._story
        if self._pause is not None:
            self._pause.cancel()
        num_tokens = story.num_tokens(answered, 0 if story.first_byte_s is None else self.core.num_prompt_tokens)
        if dispatch is not None:
            story.attempted(dispatch, now_s)
            if parts.room.is_used:
                parts.room.ended(self, num_tokens[1])
        elif story.queued_s is not None:
            parts.room.remove(self)
        if self._reservation is not None:
            if story.first_byte_s is None and dispatch is None:
                self._reservation.cancel(now_s)
            else:
                self._reservation.settle(sum(num_tokens), now_s)
        self._relay = None
        self._on_ended(story.told(status, outcome, now_s, code, answered, num_tokens))

    def record(self, now_s: float) -> ExchangeRecord:
        """Return what there is to say of it while it goes on."""
        return self._story.so_far(self._dispatch, now_s)
