"""What held each request, noted where the decision falls.

A note costs when a request comes, goes or was tried and refused. A step in which nothing of that happens costs one
comparison: what holds the queue as a whole is kept as seconds per reason, and a request that was never tried reads
from it, when it starts, how long what held it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from expediter.core.explanation import Detail, Reason, Span

_MAX_SPANS = 32
"""Of one request; from then on the newest takes the place of the one before it."""


_Closed = tuple[float, float, Reason, Mapping[str, Detail]]
"""A span that is over, as its fields: it becomes a `Span` when somebody asks."""


class _HoldClock:
    """Seconds that the queue has been held, by reason."""

    def __init__(self) -> None:
        self.reason: Reason | None = None
        self._since_s = 0.0
        self._totals: dict[Reason, float] = {}

    def turn(self, reason: Reason | None, now_s: float) -> None:
        if self.reason is not None:
            self._totals[self.reason] = self._totals.get(self.reason, 0.0) + (now_s - self._since_s)
        self.reason, self._since_s = reason, now_s

    def read(self, now_s: float) -> dict[Reason, float]:
        totals = dict(self._totals)
        if self.reason is not None:
            # What came before the present moment in its own time (an arrival during a step) reads from the turn on.
            totals[self.reason] = totals.get(self.reason, 0.0) + max(0.0, now_s - self._since_s)
        return totals


@dataclass(slots=True)
class _Record:
    """One live request: closed spans, the open one, and what the clock and the count of starts said at its start."""

    spans: list[_Closed] = field(default_factory=list)
    from_s: float = 0.0
    reason: Reason = Reason.QUEUED
    details: dict[str, Detail] = field(default_factory=dict)
    clock: dict[Reason, float] | None = None
    num_started: int = 0
    held_s: dict[str, float] = field(default_factory=dict)


class Explanations:
    """Spans of live requests and of the last `max_ended` that ended.

    Times are the driver's clock, in seconds; methods that take `now_s` are called in its order.
    """

    def __init__(self, max_ended: int) -> None:
        self._max_ended = max_ended
        self._live: dict[str, _Record] = {}
        self._ended: OrderedDict[str, list[_Closed]] = OrderedDict()
        self._clock = _HoldClock()
        self._num_started = 0

    # -- notes --------------------------------------------------------------------------------------------------------

    def turn(self, held_by: Reason | None, now_s: float) -> None:
        """Note what holds the queue from now on; None if nobody waits."""
        if held_by is not self._clock.reason:
            self._clock.turn(held_by, now_s)

    def queued(
        self, request_id: str, now_s: float, place: tuple[Reason, dict[str, Detail]], waiting: tuple[int, int]
    ) -> None:
        """Note an arrival.

        Args:
            place: what the ordering says of it.
            waiting: requests and tokens in the queue before it.
        """
        record = self._live[request_id] = _Record(from_s=now_s)
        record.reason, record.details = place
        if waiting[0]:
            record.details |= {"requests": waiting[0], "tokens": waiting[1]}
        self._start_waiting(record, now_s)

    def held(self, request_id: str, now_s: float, reason: Reason, details: dict[str, Detail]) -> None:
        """Note that a waiting request was tried and refused, or moved within the order."""
        record = self._live[request_id]
        if record.reason is reason:
            record.details |= details
            return
        self._stop_waiting(record, now_s)
        self._open(record, now_s, reason, details)
        self._start_waiting(record, now_s)

    def admitted(self, request_id: str, now_s: float, details: dict[str, Detail]) -> Mapping[str, float]:
        """Note a start; return the seconds that it has waited since it was queued or preempted, by reason."""
        record = self._live[request_id]
        self._stop_waiting(record, now_s)
        self._open(record, now_s, Reason.PREFILLING, details)
        self._num_started += 1
        held_s, record.held_s = record.held_s, {}
        return held_s

    def preempted(self, request_id: str, now_s: float, details: dict[str, Detail]) -> None:
        """Note that a running request lost its blocks and waits again."""
        record = self._live[request_id]
        self._open(record, now_s, Reason.PREEMPTED, details)
        self._start_waiting(record, now_s)

    def decoding(self, request_id: str, now_s: float) -> None:
        """Note that a running request has caught up and yields tokens."""
        self._open(self._live[request_id], now_s, Reason.DECODING, {})

    def ended(self, request_id: str, now_s: float, reason: Reason, details: dict[str, Detail]) -> Mapping[str, float]:
        """Note the end of a live request, or the refusal of a new one; return what it waited for, as `admitted`."""
        record = self._live.pop(request_id, None)
        if record is None:
            record = _Record(from_s=now_s, reason=reason, details=details)
        else:
            self._stop_waiting(record, now_s)
            self._open(record, now_s, reason, details)
        record.spans.append((record.from_s, now_s, record.reason, record.details))
        self._keep(request_id, record.spans)
        return record.held_s

    def _keep(self, request_id: str, spans: list[_Closed]) -> None:
        self._ended[request_id] = spans
        self._ended.move_to_end(request_id)
        if len(self._ended) > self._max_ended:
            self._ended.popitem(last=False)

    def _open(self, record: _Record, now_s: float, reason: Reason, details: dict[str, Detail]) -> None:
        if len(record.spans) < _MAX_SPANS:
            record.spans.append((record.from_s, now_s, record.reason, record.details))
        else:
            record.spans[-1] = (record.spans[-1][0], now_s, record.reason, record.details)
        record.from_s, record.reason, record.details = now_s, reason, details

    def _start_waiting(self, record: _Record, now_s: float) -> None:
        record.clock, record.num_started = self._clock.read(now_s), self._num_started

    def _stop_waiting(self, record: _Record, now_s: float) -> None:
        """Put what held the wait that ends into its span and into the request's sum; nothing if it did not wait."""
        if record.clock is None:
            return
        held_s = self._held_s(record, now_s)
        record.details = {**record.details, **self._so_far(record, held_s)}
        for name, seconds in held_s.items():
            record.held_s[name] = record.held_s.get(name, 0.0) + seconds
        record.clock = None

    def _held_s(self, record: _Record, now_s: float) -> dict[str, float]:
        """Return how long the open wait has lasted, by what held it; what nothing held was a step in progress."""
        waited_s = now_s - record.from_s
        if waited_s <= 0:
            return {}
        if record.reason in (Reason.NO_BLOCKS, Reason.NO_SLOT):
            return {record.reason.value: waited_s}
        before = record.clock or {}
        held = {r.value: t - before.get(r, 0.0) for r, t in self._clock.read(now_s).items() if t > before.get(r, 0.0)}
        rest_s = waited_s - sum(held.values())
        if rest_s > 1e-9 * waited_s:  # what is less comes from rounding
            held[Reason.STEP.value] = rest_s
        return held

    def _so_far(self, record: _Record, held_s: Mapping[str, float]) -> dict[str, Detail]:
        details: dict[str, Detail] = {}
        if self._num_started > record.num_started:
            details["started"] = self._num_started - record.num_started
        if record.reason not in (Reason.NO_BLOCKS, Reason.NO_SLOT):
            details |= {f"{name}_s": seconds for name, seconds in held_s.items()}
        return details

    # -- answers ------------------------------------------------------------------------------------------------------

    @property
    def held_by(self) -> Reason | None:
        """What holds the queue at present."""
        return self._clock.reason

    def of(self, request_id: str, now_s: float, place: Reason, order: Mapping[str, Detail]) -> tuple[Span, ...] | None:
        """Return a request's spans, oldest first, the last one open while it lives; None if it is not known (any more).

        Args:
            place: what the ordering says of it now, for who waits; told if nothing more is known.
            order: where it stands in the queue now, for who waits.
        """
        record = self._live.get(request_id)
        if record is None:
            spans = self._ended.get(request_id)
            return None if spans is None else tuple(Span(*span) for span in spans)
        details, reason = dict(record.details), record.reason
        if record.clock is not None:
            details |= self._so_far(record, self._held_s(record, now_s))
            details |= order
            reason = place if reason is Reason.QUEUED else reason
            if self._clock.reason is not None:
                details["held_by"] = self._clock.reason.value
        return (*(Span(*span) for span in record.spans), Span(record.from_s, None, reason, details))
