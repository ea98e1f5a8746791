"""Orderings by a fixed key."""

from __future__ import annotations

from expediter.core.request import RequestState
from expediter.scheduling.knowledge import Knowledge
from expediter.scheduling.lazy_heap import Key
from expediter.scheduling.ordering.base import KeyOrdering


class Fcfs(KeyOrdering):
    """First come, first served. Bound: a request is behind those that came before it, and nobody else."""

    def key(self, state: RequestState, now_s: float) -> Key:  # noqa: ARG002 - the key is the arrival
        return (state.request.arrival_s,)


class Lifo(KeyOrdering):
    """Last come, first served: under overload some are served at once and the others late, not all late.

    Bound: a request that arrived 60 s ago goes first, oldest first.
    """

    max_wait_s = 60.0

    def key(self, state: RequestState, now_s: float) -> Key:  # noqa: ARG002 - the key is the arrival
        return (-state.request.arrival_s,)


class PriorityOrder(KeyOrdering):
    """Lower priority numbers first, then arrival. Source: vLLM's `priority` policy.

    A waiting request takes the budget before prompts of a lower priority, and the memory of whoever is lower (vLLM lets
    prompts under way finish first). Bound: a request that arrived 600 s ago goes first, oldest first.
    """

    max_wait_s = 600.0
    displaces = True
    interleaves = True

    def key(self, state: RequestState, now_s: float) -> Key:  # noqa: ARG002 - priorities do not change
        return (state.request.priority, state.request.arrival_s)

    def outranks(self, waiting: RequestState, running: RequestState) -> bool:
        """Strictly lower priority only, so that equals never push each other out in turn."""
        return waiting.request.priority < running.request.priority


class EarliestDeadline(KeyOrdering):
    """Earliest deadline of the first token first; who has none comes last, in order of arrival.

    It makes the most of a load that can be met, and collapses past it: it always serves who is about to be late.
    Prompts under way share the budget in the same order, as in QoServe's comparison. Bound: a request that arrived
    600 s ago goes first, oldest first. Source: earliest deadline first, in the form of QoServe (2503.22562).
    """

    max_wait_s = 600.0
    interleaves = True

    def __init__(self, knowledge: Knowledge) -> None:
        super().__init__()
        self._knowledge = knowledge
        knowledge.ask()  # a deadline of the end becomes one of the first token through the time per token

    def key(self, state: RequestState, now_s: float) -> Key:  # noqa: ARG002 - deadlines do not change
        return (self._knowledge.first_token_deadline_s(state.request), state.request.arrival_s)


class ShortestPredicted(KeyOrdering):
    """Least predicted work first: known tokens without KV, and output still expected.

    Best for the mean, and unfair to the long. Prompts under way share the budget in the same order, so it is shortest
    remaining work first. What waits is compared by its whole prompt, cached or not. Bound: a request that arrived
    60 s ago goes first, oldest first. Source: shortest job first with predicted lengths, as in LTR (2408.15792).
    """

    max_wait_s = 60.0
    interleaves = True

    def __init__(self, knowledge: Knowledge) -> None:
        super().__init__()
        self._knowledge = knowledge

    def key(self, state: RequestState, now_s: float) -> Key:  # noqa: ARG002 - fixed when queued
        num_output = len(state.output)
        expected = self._knowledge.lengths.predict(state.request, num_output) - num_output
        return (state.num_known_tokens - state.num_computed_tokens + expected,)
