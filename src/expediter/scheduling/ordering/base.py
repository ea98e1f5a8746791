"""What an ordering is, and the base of those that sort by a key."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from expediter.core.explanation import Detail, Reason
from expediter.core.request import RequestState
from expediter.scheduling.lazy_heap import Key, LazyHeap


class Ordering(Protocol):
    """The requests that do not run, in the order in which the scheduler should try them.

    Each change costs O(log n); nothing may be sorted per step. An ordering that depends on service received learns of
    it through the last four methods; *decode clock* is the number of decode steps that the replica has run, so what a
    sequence got between joining and leaving is a difference, and no step has to be reported.

    Attributes:
        max_wait_s: ageing bound; a request that has waited longer since its arrival goes ahead of the order.
        is_static: while no request comes or goes, neither the order changes (but for age) nor whom `outranks` favours.
        displaces: a waiting request may preempt running ones that it `outranks` when it does not fit.
        interleaves: prompts under way and waiting requests share the budget in one order, by `urgency`; else prompts
            under way go first, in order of admission.
        num_late: waiting requests that are deferred because they are certain to miss their targets.
        may_refuse: one that waits asked to be refused when that is certain.
    """

    max_wait_s: float
    is_static: bool
    displaces: bool
    interleaves: bool

    @property
    def num_late(self) -> int: ...

    @property
    def may_refuse(self) -> bool: ...

    def push(self, state: RequestState, now_s: float) -> None:
        """Take a request in: new, or preempted."""
        ...

    def put_back(self, state: RequestState, now_s: float) -> None:
        """Take a request in again that was removed to be tried, and did not fit: it has been waiting all the time."""
        ...

    def remove(self, state: RequestState) -> None:
        """Take a request out: tried, or ended."""
        ...

    def first(self, now_s: float) -> RequestState | None:
        """Return who should be tried next, or None if nobody waits; changes nothing that shows."""
        ...

    def outranks(self, waiting: RequestState, running: RequestState) -> bool:
        """Return whether a waiting request is worth preempting a running one for; must be a strict order."""
        ...

    def urgency(self, state: RequestState, now_s: float) -> Key:
        """Return the key by which prompts under way and waiting requests compare, least first."""
        ...

    def tick(self, decode_clock: int) -> None:
        """The queue is about to be asked; so far the clock has come."""
        ...

    def newly_late(self, now_s: float) -> Sequence[tuple[RequestState, float]]:
        """Return who was found certain to miss its targets since the last call, and when; some may wait no more."""
        ...

    def place(self, state: RequestState) -> tuple[Reason, dict[str, Detail]]:
        """Return why a waiting request stands where it does, for explanations."""
        ...

    def admitted(self, state: RequestState, num_new_tokens: int, decode_clock: int) -> None:
        """A request has entered the running set with that many tokens to compute; a follower does when it forks."""
        ...

    def joined(self, state: RequestState, decode_clock: int) -> None:
        """A sequence decodes from now on, one token per tick of the decode clock."""
        ...

    def left(self, state: RequestState, decode_clock: int) -> None:
        """A request that was admitted has ended or been preempted, decoding or with its prompt under way."""
        ...


class WithoutTargets:
    """Base of orderings that look at no targets: nobody is late to them, and nobody is refused."""

    num_late = 0
    may_refuse = False

    def newly_late(self, now_s: float) -> Sequence[tuple[RequestState, float]]:  # noqa: ARG002 - the protocol's
        return ()

    def place(self, state: RequestState) -> tuple[Reason, dict[str, Detail]]:  # noqa: ARG002 - the protocol's
        return Reason.QUEUED, {}


class KeyOrdering(WithoutTargets):
    """Base of orderings by a key that is fixed while a request waits: subclass it and write `key`."""

    max_wait_s = math.inf
    is_static = True
    displaces = False
    interleaves = False

    def __init__(self) -> None:
        self._heap: LazyHeap[RequestState] = LazyHeap()

    def key(self, state: RequestState, now_s: float) -> Key:
        """Return the sort key, least first, asked for when the request is queued; ties go to the earlier arrival."""
        raise NotImplementedError

    def push(self, state: RequestState, now_s: float) -> None:
        self._heap.put(state, self.key(state, now_s))

    def put_back(self, state: RequestState, now_s: float) -> None:
        self.push(state, now_s)

    def remove(self, state: RequestState) -> None:
        self._heap.remove(state)

    def first(self, now_s: float) -> RequestState | None:  # noqa: ARG002 - the protocol's; a fixed key needs no time
        entry = self._heap.first()
        return None if entry is None else entry[1]

    def outranks(self, waiting: RequestState, running: RequestState) -> bool:  # noqa: ARG002 - the protocol's
        """Nobody is displaced unless a subclass says so (and sets `displaces`)."""
        return False

    def urgency(self, state: RequestState, now_s: float) -> Key:
        """The same key as in the queue."""
        return self.key(state, now_s)

    def tick(self, decode_clock: int) -> None:
        """Fixed keys depend on no service."""

    def admitted(self, state: RequestState, num_new_tokens: int, decode_clock: int) -> None:
        """Fixed keys depend on no service."""

    def joined(self, state: RequestState, decode_clock: int) -> None:
        """Fixed keys depend on no service."""

    def left(self, state: RequestState, decode_clock: int) -> None:
        """Fixed keys depend on no service."""
