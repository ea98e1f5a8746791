"""One scheduler in virtual time, step by step, for who must see every token or answer it."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop
from typing import NamedTuple

from expediter.core.events import Event
from expediter.core.ports import Executor
from expediter.core.request import Request
from expediter.scheduling.scheduler import Scheduler


class Arrival(NamedTuple):
    """A request and when it comes; of equal times the lower number goes first."""

    time_s: float
    number: int
    request: Request


def drive(scheduler: Scheduler, executor: Executor, arrivals: list[Arrival]) -> Iterator[tuple[float, list[Event]]]:
    """Serve until nothing is left, yielding the end of each step and what happened in it.

    A simulation says nothing of single tokens, and takes no requests that answer others; this does both and is slower.

    Args:
        arrivals: a heap; the caller may push into it between steps, nothing earlier than the time it was told last.
    """
    now_s = 0.0
    while True:
        while arrivals and arrivals[0].time_s <= now_s:
            request = heappop(arrivals).request
            scheduler.add(request, request.arrival_s)
        plan = scheduler.plan(now_s)
        if plan.is_empty:
            if not arrivals:
                return
            now_s = arrivals[0].time_s
            continue
        result = executor.execute(plan)
        now_s += result.elapsed_s
        yield now_s, [*plan.events, *scheduler.apply(result, now_s)]
