"""Virtual time: events in one total order."""

from __future__ import annotations

import enum
import heapq
import math
from collections.abc import Callable

from expediter.core.errors import InvariantError


class EventKind(enum.IntEnum):
    """What happens first when several things happen at the same instant.

    A step that ends at time t is over before an arrival at t is seen, and both come before the plan that is made at t:
    it knows everything that happened up to and including t. KV that comes at t has come before a replica fails at t,
    and an arrival at t sees which replicas are left.
    """

    STEP_END = 0
    TRANSFER = 1
    FAILURE = 2
    CONTROL = 3
    ARRIVAL = 4
    PLAN = 5


class EventLoop:
    """Runs actions in the order (time, kind, sequence).

    `sequence` is the caller's number, the replica or the arrival: the order then depends on what happens and not on
    when it was scheduled. Events that agree in all three run in the order in which they were scheduled.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, int, int]] = []
        self._actions: dict[int, Callable[[float], None]] = {}
        self._next_ticket = 0

    def schedule(self, time_s: float, kind: EventKind, sequence: int, action: Callable[[float], None]) -> int:
        """Call `action(time_s)` when its turn comes; return a ticket for `cancel`.

        Raises:
            InvariantError: the time lies in the past or is not finite.
        """
        if not self.now_s <= time_s < math.inf:
            raise InvariantError(f"an event at {time_s} s cannot be scheduled at {self.now_s} s")
        ticket = self._next_ticket
        self._next_ticket += 1
        self._actions[ticket] = action
        heapq.heappush(self._heap, (time_s, kind, sequence, ticket))
        return ticket

    @property
    def num_scheduled(self) -> int:
        """Events that have not run yet."""
        return len(self._actions)

    def cancel(self, ticket: int) -> None:
        """Take an event back that has not run yet."""
        del self._actions[ticket]

    def run(self) -> None:
        """Run until nothing is scheduled."""
        heap, actions = self._heap, self._actions
        while heap:
            time_s, _, _, ticket = heapq.heappop(heap)
            action = actions.pop(ticket, None)
            if action is not None:
                self.now_s = time_s
                action(time_s)
