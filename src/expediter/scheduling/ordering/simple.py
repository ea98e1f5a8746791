"""Orderings by a fixed key."""

from __future__ import annotations

from expediter.core.request import RequestState
from expediter.scheduling.knowledge import Knowledge
from expediter.scheduling.lazy_heap import Key
from expediter.scheduling.ordering.base import KeyOrdering


class Fcfs(KeyOrdering):
    """First come, first served. Its own ageing bound: whoever came earlier is tried earlier."""

    def key(self, state: RequestState, now_s: float) -> Key:  # noqa: ARG002 - the key is the arrival
        return (state.request.arrival_s,)


class Lifo(KeyOrdering):
    """Last come, first served: under overload some are served at once and the others late, not all late."""

    max_wait_s = 60.0

    def key(self, state: RequestState, now_s: float) -> Key:  # noqa: ARG002 - the key is the arrival
        return (-state.request.arrival_s,)


class PriorityOrder(KeyOrdering):
    """Lower priority numbers first, then arrival. Source: vLLM's `priority` policy."""

    max_wait_s = 600.0
    displaces = True

    def key(self, state: RequestState, now_s: float) -> Key:  # noqa: ARG002 - priorities do not change
        return (state.request.priority, state.request.arrival_s)

    def outranks(self, waiting: RequestState, running: RequestState) -> bool:
        """Strictly lower priority only, so that equals never push each other out in turn."""
        return waiting.request.priority < running.request.priority


class EarliestDeadline(KeyOrdering):
    """Earliest deadline of the first token first; who has none comes last, in order of arrival.

    It makes the most of a load that can be met, and collapses past it: it always serves who is about to be late.
    """

    max_wait_s = 600.0

    def __init__(self, knowledge: Knowledge) -> None:
        super().__init__()
        self._knowledge = knowledge

    def key(self, state: RequestState, now_s: float) -> Key:  # noqa: ARG002 - deadlines do not change
        return (self._knowledge.first_token_deadline_s(state.request), state.request.arrival_s)


class ShortestPredicted(KeyOrdering):
    """Least predicted work first: known tokens to compute and output still expected.

    Best for the mean, and unfair to the long: it needs its ageing bound. Source: shortest job first with predicted
    lengths, as in LTR and others.
    """

    max_wait_s = 60.0

    def __init__(self, knowledge: Knowledge) -> None:
        super().__init__()
        self._knowledge = knowledge

    def key(self, state: RequestState, now_s: float) -> Key:  # noqa: ARG002 - fixed when queued
        num_output = len(state.output)
        expected = self._knowledge.lengths.predict(state.request, num_output) - num_output
        return (state.num_known_tokens + expected,)
