"""What became of one request at the gateway, written once at its end; everything shown is made from it."""

from __future__ import annotations

import enum
from typing import Final, Protocol

import msgspec

from expediter.control.routing.base import Placement
from expediter.core.slo import NO_SLO, Slo
from expediter.telemetry.trace_context import TraceContext


class Outcome(enum.Enum):
    """How a request ended, as the gateway saw it."""

    OK = "ok"
    CLIENT_ERROR = "client_error"
    """The request can never work: a 4xx that is no limit."""
    CLIENT_GONE = "client_gone"
    OVER_LIMIT = "over_limit"
    """A limit of its tenant (429)."""
    NO_CAPACITY = "no_capacity"
    """Nobody was up, or the queue was full (503)."""
    LATE = "late"
    """Refused early: it could not have been in time."""
    EXPIRED = "expired"
    """Its deadline passed while it waited."""
    FAILED = "failed"
    """Whoever computed it failed, and nobody else could take over."""
    OPEN = "open"
    """It goes on; only for who asks meanwhile, no sink hears of it."""

    __hash__ = object.__hash__
    """That of `enum.Enum` hashes a name, in interpreted code; every request's outcome is looked up in tables."""


_FAULTS: Final = frozenset({Outcome.NO_CAPACITY, Outcome.LATE, Outcome.EXPIRED, Outcome.FAILED})
"""Outcomes that the service has to answer for: the request has missed its targets."""


class Attempt(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One dispatch of a request to a backend.

    Attributes:
        failure: what went wrong, None for the attempt that answered.
        span_id: what the backend was told as its parent in the trace; None if no trace is kept.
    """

    backend: str
    dispatched_s: float
    ended_s: float
    failure: str | None = None
    span_id: int | None = None


class ExchangeRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One request and its response; times in seconds of the gateway's monotonic clock.

    What becomes a label of a metric comes from a bounded set: model ("" if the client named one that is not there),
    tenant, SLO class, path (a route's), backend, failure and error code. Thousands are kept, and none is part of a
    cycle: the garbage collector need not look at them.

    Attributes:
        request_id: the gateway's own.
        client_request_id: the client's X-Request-Id.
        path: of the endpoint, without a query.
        arrived_s: its head was here. `queued_s`: it began to wait in the central queue, None if it never did.
        queued_behind_requests, queued_behind_tokens: in the central queue when it came.
        dispatched_s: last attempt, None if there was none. `first_byte_s`: of the response's body.
        route: why its last backend was chosen.
        route_backends: names of the route's candidates, once somebody has asked: they are ranked only then.
        num_prompt_tokens, num_output_tokens: as the backend said, or estimated where `usage_is_exact` is false.
        num_cached_tokens: of the prompt, None if the backend did not say.
        num_bytes_in, num_bytes_out: of the bodies, to and from the client.
        predicted_ttft_s: what the router expected, None if it did not.
        trace: its place in a trace, None if none is kept.
    """

    request_id: str
    client_request_id: str | None = None
    tenant: str = ""
    model: str = ""
    path: str
    is_stream: bool = False
    slo_class: str = ""
    slo: Slo = NO_SLO
    arrived_s: float
    queued_s: float | None = None
    queued_behind_requests: int = 0
    queued_behind_tokens: int = 0
    dispatched_s: float | None = None
    first_byte_s: float | None = None
    ended_s: float
    attempts: tuple[Attempt, ...] = ()
    route: Placement | None = None
    route_backends: tuple[str, ...] = ()
    status: int
    outcome: Outcome
    error_code: str | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int | None = None
    usage_is_exact: bool = False
    num_bytes_in: int = 0
    num_bytes_out: int = 0
    predicted_ttft_s: float | None = None
    trace: TraceContext | None = None

    @property
    def backend(self) -> str:
        """Who had it last; "" if it was never dispatched."""
        return self.attempts[-1].backend if self.attempts else ""

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.arrived_s

    @property
    def ttft_s(self) -> float | None:
        """Arrival to the first byte of a stream; None for what is answered in one piece, or not at all."""
        if not self.is_stream or self.first_byte_s is None:
            return None
        return self.first_byte_s - self.arrived_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token of a stream after the first; None where there is no second one."""
        if not self.is_stream or self.first_byte_s is None or self.num_output_tokens < 2:
            return None
        return (self.ended_s - self.first_byte_s) / (self.num_output_tokens - 1)

    @property
    def left_queue_s(self) -> float | None:
        """When it left the central queue, for a backend or by ending there; None if it never waited there."""
        if self.queued_s is None:
            return None
        # Whose first backend failed may have waited only after that.
        dispatched_s = (attempt.dispatched_s for attempt in self.attempts if attempt.dispatched_s >= self.queued_s)
        return next(dispatched_s, self.ended_s)

    @property
    def queue_s(self) -> float | None:
        """Time in the central queue; None if it never waited there."""
        if self.queued_s is None or self.left_queue_s is None:
            return None
        return self.left_queue_s - self.queued_s

    @property
    def met_slo(self) -> bool | None:
        """Whether it met its targets; None if it is not judged.

        Who leaves, asks for what cannot be, or for more than its tenant may, is not. When the first token of an answer
        in one piece came is not known here, so that such an answer is held against its end-to-end target alone.
        """
        if self.outcome is Outcome.OK:
            if self.slo is NO_SLO:  # as most: there is nothing to compute
                return True
            return self.slo.is_met(self.ttft_s or 0.0, self.tpot_s, self.e2e_s)
        return False if self.outcome in _FAULTS else None


class ExchangeSink(Protocol):
    """Hears of every request that has ended."""

    def record(self, record: ExchangeRecord) -> None: ...


class BackendEvents(Protocol):
    """Hears what the gateway decides about a backend's health."""

    def ejected(self, backend: str) -> None:
        """Note that it gets no requests for a time."""
        ...

    def probed(self, backend: str, *, succeeded: bool) -> None:
        """Note the result of a half-open probe: one request, or one of the gateway's own."""
        ...
