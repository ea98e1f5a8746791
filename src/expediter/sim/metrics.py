"""What became of each request, derived from events alone."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from expediter.control.routing.base import Decision, Placement, Refusal
from expediter.core.errors import InvariantError
from expediter.core.events import Admitted, Event, Finished, FirstToken, JourneyEvent, Preempted, Rejected, RejectReason
from expediter.core.request import FinishReason, Request
from expediter.core.slo import NO_SLO, Slo


class Outcome(enum.Enum):
    """How a request ended."""

    FINISHED = "finished"
    REJECTED = "rejected"
    UNSERVABLE = "unservable"
    ABORTED = "aborted"


@dataclass(slots=True)
class RequestRecord:
    """One request's life. Times are in seconds of virtual time, None where it did not come to that.

    Attributes:
        replica_id: where it was sent first; None if it was refused on arrival.
        num_cached_tokens: prompt tokens reused at the first admission.
        num_output_tokens: set at the end.
    """

    arrival_s: float
    num_prompt_tokens: int
    replica_id: int | None
    slo: Slo = NO_SLO
    tenant: str = ""
    slo_class: str = ""
    value: float = 1.0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    outcome: Outcome | None = None

    @property
    def queueing_s(self) -> float | None:
        """Arrival to first scheduled."""
        return None if self.first_scheduled_s is None else self.first_scheduled_s - self.arrival_s

    @property
    def ttft_s(self) -> float | None:
        """Arrival to first output token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def e2e_s(self) -> float | None:
        """Arrival to last output token, of finished requests."""
        if self.outcome is not Outcome.FINISHED or self.ended_s is None:
            return None
        return self.ended_s - self.arrival_s

    @property
    def is_met(self) -> bool:
        """Whether it finished within its targets."""
        return (
            self.e2e_s is not None and self.ttft_s is not None and self.slo.is_met(self.ttft_s, self.tpot_s, self.e2e_s)
        )

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first, of finished requests with more than one."""
        if self.e2e_s is None or self.ended_s is None or self.first_token_s is None or self.num_output_tokens < 2:
            return None
        return (self.ended_s - self.first_token_s) / (self.num_output_tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCounts:
    """Requests by how they ended; `rejected` are those over a limit, `unservable` those that would never fit."""

    arrived: int
    finished: int
    rejected: int
    unservable: int
    aborted: int


class MetricsCollector:
    """`Observer` that keeps a record per request.

    Args:
        on_end: told of each request that has ended, if anybody wants to know.
    Attributes:
        preemptions: of all requests together, by cause.
        held_s: seconds that requests waited, all together, by what held them.
        last_event_s: time of the latest arrival or scheduler event.
    """

    def __init__(self, on_end: Callable[[RequestRecord], None] | None = None) -> None:
        self._on_end = on_end
        self._records: dict[str, RequestRecord] = {}
        self.preemptions: dict[str, int] = {}
        self.held_s: dict[str, float] = {}
        self.last_event_s = 0.0

    @property
    def records(self) -> Sequence[RequestRecord]:
        """All records in order of arrival."""
        return list(self._records.values())

    def arrived(self, request: Request, decision: Decision, now_s: float) -> None:
        if request.request_id in self._records:
            raise InvariantError(f"request {request.request_id} arrived twice")
        self._records[request.request_id] = RequestRecord(
            now_s,
            request.num_prompt_tokens,
            decision.replica_id if isinstance(decision, Placement) else None,
            request.slo,
            request.tenant,
            request.slo_class,
            request.value,
        )
        self.last_event_s = now_s
        if isinstance(decision, Refusal):
            self._end(request.request_id, Outcome.REJECTED, now_s)

    def record(self, replica_id: int, events: Sequence[Event | JourneyEvent]) -> None:
        for event in events:
            match event:
                case Admitted():
                    for reason, seconds in event.held_s.items():
                        self.held_s[reason] = self.held_s.get(reason, 0.0) + seconds
                    if not event.resumed:
                        record = self._records[event.request_id]
                        record.first_scheduled_s = event.now_s
                        record.num_cached_tokens = event.num_cached_tokens
                case FirstToken():
                    self._records[event.request_id].first_token_s = event.now_s
                case Preempted():
                    self.preemptions[event.cause.value] = self.preemptions.get(event.cause.value, 0) + 1
                case Finished():
                    self._finish(event, replica_id)
                case Rejected():
                    unservable = event.reason is RejectReason.UNSERVABLE
                    self._end(event.request_id, Outcome.UNSERVABLE if unservable else Outcome.REJECTED, event.now_s)
                case _:
                    pass
        if events:
            # A request that is refused after a step is refused with the time of its arrival.
            self.last_event_s = max(self.last_event_s, events[-1].now_s)

    def _finish(self, event: Finished, replica_id: int) -> None:
        if event.reason is FinishReason.ERROR:
            raise InvariantError(f"request {event.request_id} failed on replica {replica_id}")
        outcome = Outcome.ABORTED if event.reason is FinishReason.ABORT else Outcome.FINISHED
        self._records[event.request_id].num_output_tokens = event.num_output_tokens
        self._end(event.request_id, outcome, event.now_s)

    def _end(self, request_id: str, outcome: Outcome, now_s: float) -> None:
        record = self._records[request_id]
        if record.outcome is not None:
            raise InvariantError(f"request {request_id} ended twice: {record.outcome.value}, then {outcome.value}")
        record.outcome = outcome
        record.ended_s = now_s
        if self._on_end is not None:
            self._on_end(record)

    def counts(self) -> RequestCounts:
        """Return how the requests ended.

        Raises:
            InvariantError: a request has not ended, so that arrived is not finished + rejected + unservable + aborted.
        """
        by_outcome = dict.fromkeys(Outcome, 0)
        for request_id, record in self._records.items():
            if record.outcome is None:
                raise InvariantError(f"request {request_id} neither finished nor was it rejected or aborted")
            by_outcome[record.outcome] += 1
        return RequestCounts(
            arrived=len(self._records),
            finished=by_outcome[Outcome.FINISHED],
            rejected=by_outcome[Outcome.REJECTED],
            unservable=by_outcome[Outcome.UNSERVABLE],
            aborted=by_outcome[Outcome.ABORTED],
        )
