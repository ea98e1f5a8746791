"""In which order waiting requests are tried. A policy is one small class with a key."""

from __future__ import annotations

from typing import Protocol

from expediter.core.errors import ConfigurationError
from expediter.core.request import RequestState


class Ordering(Protocol):
    """Order of the waiting queue.

    Attributes:
        displaces: a waiting request may preempt running ones of strictly lower priority when it does not fit.
    """

    displaces: bool

    def key(self, state: RequestState) -> tuple[float, ...]:
        """Return the sort key of a waiting request, least first.

        Asked once, when the request is queued (again after a preemption); ties go to the earlier arrival.
        """
        ...


class Fcfs:
    """First come, first served. A preempted request keeps its place, because its arrival does not change."""

    displaces = False

    def key(self, state: RequestState) -> tuple[float, ...]:
        return (state.request.arrival_s,)


class PriorityOrder:
    """Lower priority numbers first, then arrival. Source: vLLM's `priority` policy, with strict displacement."""

    displaces = True

    def key(self, state: RequestState) -> tuple[float, ...]:
        return (state.request.priority, state.request.arrival_s)


_ORDERINGS: dict[str, type[Fcfs] | type[PriorityOrder]] = {"fcfs": Fcfs, "priority": PriorityOrder}
ORDERING_NAMES = tuple(_ORDERINGS)


def make_ordering(name: str) -> Ordering:
    """Return an ordering by name.

    Raises:
        ConfigurationError: there is none of that name; the message lists those that exist.
    """
    if name not in _ORDERINGS:
        raise ConfigurationError(f"no scheduling policy {name!r}; there are: {', '.join(ORDERING_NAMES)}")
    return _ORDERINGS[name]()
