"""Recorded arrivals through the runtime's loop, on a virtual clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from expediter.core.clock import VirtualClock
from expediter.core.ports import Executor
from expediter.core.request import Request
from expediter.runtime.loop import Command, ReplicaLoop, SchedulerPort, StepSink


class RecordedInbox:
    """Hands out each request once the clock has reached its arrival, in order of arrival (stable)."""

    def __init__(self, arrivals: Iterable[Request], clock: VirtualClock) -> None:
        self._arrivals = deque(sorted(arrivals, key=lambda request: request.arrival_s))
        self._clock = clock

    def take(self) -> Sequence[Command]:
        due: list[Command] = []
        while self._arrivals and self._arrivals[0].arrival_s <= self._clock.now():
            due.append((self._arrivals.popleft(),))
        return due

    @property
    def next_arrival_s(self) -> float | None:
        """When the next request comes, None after the last."""
        return self._arrivals[0].arrival_s if self._arrivals else None


def run_recorded(
    arrivals: Iterable[Request], scheduler: SchedulerPort, executor: Executor, clock: VirtualClock, sink: StepSink
) -> int:
    """Run the loop until every recorded request has ended; return the number of executed steps.

    The executor moves `clock` by each step's duration (as `FakeExecutor` does when it is given the clock); between
    steps with nothing to run, the clock jumps to the next arrival.
    """
    inbox = RecordedInbox(arrivals, clock)
    loop = ReplicaLoop(scheduler, executor, clock, inbox, sink)
    num_steps = 0
    while True:
        if loop.run_once():
            num_steps += 1
        elif inbox.next_arrival_s is not None:
            clock.advance_to(max(clock.now(), inbox.next_arrival_s))
        else:
            return num_steps
