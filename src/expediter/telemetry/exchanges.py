"""What became of one request at the gateway, written once at its end; everything shown is made from it."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

from expediter.core.explanation import Span
from expediter.core.slo import NO_SLO, Slo


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One dispatch of a request to a backend.

    Attributes:
        failure: what went wrong, None for the attempt that answered.
    """

    backend: str
    dispatched_s: float
    ended_s: float
    failure: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeRecord:
    """One request and its response; times in seconds of the gateway's monotonic clock.

    Attributes:
        request_id: the gateway's own.
        client_request_id: the client's X-Request-Id.
        path: of the endpoint, without a query.
        arrived_s: its head was here. `queued_s`: it began to wait in the central queue, None if it never did.
        dispatched_s: last attempt, None if there was none. `first_byte_s`: of the response's body.
        route: why its backend was chosen.
        num_prompt_tokens, num_output_tokens: as the backend said, or estimated where `usage_is_exact` is false.
        num_cached_tokens: of the prompt, None if the backend did not say.
        predicted_ttft_s: what the router expected, None if it did not.
        traceparent: of the client's trace.
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
    dispatched_s: float | None = None
    first_byte_s: float | None = None
    ended_s: float
    attempts: tuple[Attempt, ...] = ()
    route: Span | None = None
    status: int
    outcome: Outcome
    error_code: str | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int | None = None
    usage_is_exact: bool = False
    predicted_ttft_s: float | None = None
    traceparent: str | None = None


class ExchangeSink(Protocol):
    """Hears of every request that has ended."""

    def record(self, record: ExchangeRecord) -> None: ...
