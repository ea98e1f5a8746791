"""Who watches a simulation: the metrics, the event log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from expediter.control.routing.base import Decision, Refusal
from expediter.control.routing.notes import RoutingNotes, span_of
from expediter.core.events import ClusterEvent, Event, Finished, HandedOff, Rejected, Routed
from expediter.core.explanation import Reason, Span
from expediter.core.request import Request


class Observer(Protocol):
    """Hears of everything in the order in which it happens."""

    def arrived(self, request: Request, decision: Decision, now_s: float) -> None:
        """A request came in and was sent to a replica, or refused: then nothing follows."""
        ...

    def record(self, replica_id: int, events: Sequence[Event | ClusterEvent]) -> None:
        """A replica's scheduler reported events, or a request moved from or to that replica.

        `Tokens`, one per step, are left out.
        """
        ...


class ReplicaLoad(NamedTuple):
    """What a replica holds at a moment: requests, those that wait in its inbox included, and KV blocks."""

    num_waiting: int
    num_running: int
    num_used_blocks: int
    num_cached_blocks: int


class Probe(Protocol):
    """Looks into replicas whenever what they hold begins to change in another way: at an arrival, after a plan, and
    before a step or a jump of steps is applied."""

    def sample(self, replica_id: int, now_s: float, load: ReplicaLoad) -> None: ...


class Observers:
    """Several observers as one."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = list(observers)

    def add(self, observer: Observer) -> None:
        self._observers.append(observer)

    def arrived(self, request: Request, decision: Decision, now_s: float) -> None:
        for observer in self._observers:
            observer.arrived(request, decision, now_s)

    def record(self, replica_id: int, events: Sequence[Event | ClusterEvent]) -> None:
        for observer in self._observers:
            observer.record(replica_id, events)


class Explainer:
    """`Observer` that asks what held some requests as soon as they have ended, while their scheduler knows.

    Args:
        request_ids: which ones.
        ask: scheduler of a replica: (replica, request, time) -> spans.
        notes: keeps why they were sent where they were; None where there was no choice.
    Attributes:
        spans: what the schedulers said, by request; only of those that ended.
    """

    def __init__(
        self,
        request_ids: Iterable[str],
        ask: Callable[[int, str, float], tuple[Span, ...] | None],
        notes: RoutingNotes | None = None,
    ) -> None:
        self.spans: dict[str, tuple[Span, ...]] = {}
        self._wanted = frozenset(request_ids)
        self._legs: dict[str, list[Span]] = {}
        self._ask = ask
        self._notes = notes

    def arrived(self, request: Request, decision: Decision, now_s: float) -> None:
        if request.request_id not in self._wanted:
            return
        if isinstance(decision, Refusal):
            self.spans[request.request_id] = (span_of(decision, now_s),)
        elif self._notes is not None:
            self._notes.note((request,), decision, now_s)

    def record(self, replica_id: int, events: Sequence[Event | ClusterEvent]) -> None:
        for event in events:
            match event:
                case HandedOff() if event.request_id in self._wanted:
                    leg = self._ask(replica_id, event.request_id, event.now_s) or ()
                    because = f"it goes on there, with the KV of {event.num_tokens} tokens"
                    self._move(event.request_id, leg[:-1], event.target_id, because, event.now_s)
                case Routed() if event.request_id in self._wanted:
                    self._move(event.request_id, (), replica_id, "no other replica has it any more", event.now_s)
                case Finished() | Rejected() if event.request_id in self._wanted:
                    self._end(replica_id, event.request_id, event.now_s)
                case _:
                    pass

    def _move(self, request_id: str, leg: Sequence[Span], replica_id: int, because: str, now_s: float) -> None:
        """Keep what a leg told, without its end, and that the request went to another replica."""
        since_s = leg[-1].to_s if leg and leg[-1].to_s is not None else now_s
        moved = Span(since_s, None, Reason.ROUTED, {"replica": replica_id, "because": because})
        self._legs.setdefault(request_id, []).extend([*leg, moved])

    def _end(self, replica_id: int, request_id: str, now_s: float) -> None:
        spans = self._ask(replica_id, request_id, now_s)
        if spans is None:
            return
        told = [*self._legs.pop(request_id, []), *spans]
        for place, span in enumerate(told[:-1]):
            if span.to_s is None:  # it was on its way until the next leg began
                told[place] = replace(span, to_s=told[place + 1].from_s)
        notes, whole = self._notes, tuple(told)
        self.spans[request_id] = whole if notes is None else notes.before(request_id, whole)
