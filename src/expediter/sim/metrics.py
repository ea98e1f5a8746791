"""What became of the requests, derived from events alone, in memory that does not grow with their number."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass

from expediter.control.routing.base import Decision, Placement, Refusal
from expediter.core.errors import InvariantError
from expediter.core.events import Admitted, ClusterEvent, Event, Finished, FirstToken, Preempted, Rejected, RejectReason
from expediter.core.request import FinishReason, Request
from expediter.core.slo import NO_SLO, Slo
from expediter.sim.distribution import Sample


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

    request_id: str
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
    def missed(self) -> str | None:
        """The first target that it missed in its life: `served` if it did not finish, else `ttft`, `tpot` or `e2e`."""
        if self.e2e_s is None or self.ttft_s is None:
            return "served"
        if self.is_met:
            return None
        if self.slo.ttft_s is not None and self.ttft_s > self.slo.ttft_s:
            return "ttft"
        is_slow = self.slo.tpot_s is not None and self.tpot_s is not None and self.tpot_s > self.slo.tpot_s
        return "tpot" if is_slow else "e2e"

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


class Tally:
    """Requests that have ended, added up.

    Attributes:
        num_ended: by outcome.
        num_met, value, value_met: of those that met their targets; weights of all and of those.
        missed: the others by `RequestRecord.missed`.
        num_prompt_tokens, num_output_tokens: of all.
        num_admitted_tokens, num_cached_tokens: prompt tokens of those that were ever scheduled, and how many of them
            came from the cache.
        ttft_s, tpot_s, e2e_s, queueing_s: of those that have one (see `RequestRecord`).
    """

    def __init__(self) -> None:
        self.num_ended = dict.fromkeys(Outcome, 0)
        self.num_met = 0
        self.missed: dict[str, int] = {}
        self.value = self.value_met = 0.0
        self.num_prompt_tokens = self.num_output_tokens = 0
        self.num_admitted_tokens = self.num_cached_tokens = 0
        self.ttft_s, self.tpot_s, self.e2e_s, self.queueing_s = Sample(), Sample(), Sample(), Sample()

    @property
    def num_arrived(self) -> int:
        return sum(self.num_ended.values())

    def add(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        assert record.outcome is not None
        self.num_ended[record.outcome] += 1
        self.value += record.value
        self.num_prompt_tokens += record.num_prompt_tokens
        self.num_output_tokens += record.num_output_tokens
        if record.first_scheduled_s is not None:
            self.num_admitted_tokens += record.num_prompt_tokens
            self.num_cached_tokens += record.num_cached_tokens
        self._add_to(self.queueing_s, record.queueing_s)
        self._add_to(self.ttft_s, record.ttft_s)
        self._add_to(self.tpot_s, record.tpot_s)
        self._add_to(self.e2e_s, record.e2e_s)
        missed = record.missed
        if missed is None:
            self.num_met += 1
            self.value_met += record.value
        else:
            self.missed[missed] = self.missed.get(missed, 0) + 1

    @staticmethod
    def _add_to(sample: Sample, value: float | None) -> None:
        if value is not None:
            sample.add(value)


class Groups:
    """A tally per name, as soon as any request has one; until then the tally of all is that of the nameless."""

    def __init__(self) -> None:
        self.tallies: dict[str, Tally] = {}

    def add(self, name: str, record: RequestRecord, before: Tally) -> None:
        """Count a request that has ended.

        Args:
            before: tally of all requests that ended before it.
        """
        if not self.tallies:
            if not name:
                return
            if before.num_arrived:
                self.tallies[""] = deepcopy(before)
        tally = self.tallies.get(name)
        if tally is None:
            tally = self.tallies[name] = Tally()
        tally.add(record)


class MetricsCollector:
    """`Observer` that adds requests up as they end, and keeps a record of those that have not.

    Attributes:
        total, classes, tenants: of the requests that have ended; by SLO class and by tenant.
        preemptions: of all requests together, by cause.
        held_s: seconds that requests waited, all together, by what held them.
        first_event_s: time of the first arrival, None before it.
        last_event_s: time of the latest arrival or scheduler event.
        on_end: called with the record of each request that ends, which nobody keeps otherwise.
    """

    def __init__(self) -> None:
        self.total = Tally()
        self.classes, self.tenants = Groups(), Groups()
        self.preemptions: dict[str, int] = {}
        self.held_s: dict[str, float] = {}
        self.first_event_s: float | None = None
        self.last_event_s = 0.0
        self.on_end: list[Callable[[RequestRecord], None]] = []
        self._live: dict[str, RequestRecord] = {}

    def arrived(self, request: Request, decision: Decision, now_s: float) -> None:
        if request.request_id in self._live:
            raise InvariantError(f"request {request.request_id} arrived twice")
        self._live[request.request_id] = RequestRecord(
            request.request_id,
            now_s,
            request.num_prompt_tokens,
            decision.replica_id if isinstance(decision, Placement) else None,
            request.slo,
            request.tenant,
            request.slo_class,
            request.value,
        )
        if self.first_event_s is None:
            self.first_event_s = now_s
        self.last_event_s = now_s
        if isinstance(decision, Refusal):
            self._end(request.request_id, Outcome.REJECTED, now_s)

    def record(self, replica_id: int, events: Sequence[Event | ClusterEvent]) -> None:
        for event in events:
            match event:
                case Admitted():
                    for reason, seconds in event.held_s.items():
                        self.held_s[reason] = self.held_s.get(reason, 0.0) + seconds
                    if not event.resumed:
                        record = self._record_of(event.request_id)
                        record.first_scheduled_s = event.now_s
                        record.num_cached_tokens = event.num_cached_tokens
                case FirstToken():
                    self._record_of(event.request_id).first_token_s = event.now_s
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

    def _record_of(self, request_id: str) -> RequestRecord:
        record = self._live.get(request_id)
        if record is None:
            raise InvariantError(f"an event of request {request_id}, which never arrived or has ended already")
        return record

    def _finish(self, event: Finished, replica_id: int) -> None:
        if event.reason is FinishReason.ERROR:
            raise InvariantError(f"request {event.request_id} failed on replica {replica_id}")
        self._record_of(event.request_id).num_output_tokens = event.num_output_tokens
        outcome = Outcome.ABORTED if event.reason is FinishReason.ABORT else Outcome.FINISHED
        self._end(event.request_id, outcome, event.now_s)

    def _end(self, request_id: str, outcome: Outcome, now_s: float) -> None:
        record = self._record_of(request_id)
        del self._live[request_id]
        record.outcome = outcome
        record.ended_s = now_s
        self.classes.add(record.slo_class, record, self.total)
        self.tenants.add(record.tenant, record, self.total)
        self.total.add(record)
        for told in self.on_end:
            told(record)

    def counts(self) -> RequestCounts:
        """Return how the requests ended.

        Raises:
            InvariantError: a request has not ended, so that arrived is not finished + rejected + unservable + aborted.
        """
        for request_id in self._live:
            raise InvariantError(f"request {request_id} neither finished nor was it rejected or aborted")
        ended = self.total.num_ended
        return RequestCounts(
            arrived=self.total.num_arrived,
            finished=ended[Outcome.FINISHED],
            rejected=ended[Outcome.REJECTED],
            unservable=ended[Outcome.UNSERVABLE],
            aborted=ended[Outcome.ABORTED],
        )
