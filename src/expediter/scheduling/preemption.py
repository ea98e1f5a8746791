"""Who gives way."""

from __future__ import annotations

from typing import Protocol

from expediter.core.request import RequestState
from expediter.scheduling.decoding import DecodingBatch
from expediter.scheduling.running import RunningSet


class VictimRule(Protocol):
    """Ranks the running requests that may be preempted."""

    def ranked(self, running: RunningSet, now_s: float) -> list[RequestState]:
        """Return them, first victim first. O(running); asked only when somebody has to go."""
        ...


def is_safe(state: RequestState, max_preemptions: int) -> bool:
    """Return whether a running request has been preempted so often that it is not a victim any more.

    Alone, it owns blocks for its whole life then. A group cannot always find those for all of its sequences at once, so
    it is safe one preemption earlier, until it forks: each of them may be preempted once more, and comes back alone.
    """
    return state.num_preemptions + bool(state.followers) >= max_preemptions


class LowestPriority:
    """Lowest priority first, then least computed, then newest.

    Least computed loses the least work; victim choice is half of what recomputation costs. A request that has been
    preempted `max_preemptions` times owns blocks for its whole life and is never a victim again.
    """

    def __init__(self, max_preemptions: int) -> None:
        self._max_preemptions = max_preemptions

    def ranked(self, running: RunningSet, now_s: float) -> list[RequestState]:  # noqa: ARG002 - priorities keep
        decoding = running.decoding
        computed = decoding.counters[DecodingBatch.COMPUTED, : decoding.size].tolist()
        candidates = list(zip(computed, decoding.states[: decoding.size].tolist(), strict=True))
        candidates += [(state.num_computed_tokens, state) for state in running.prefilling]
        ranked = sorted(
            (-state.request.priority, count, -state.sequence, state)
            for count, state in candidates
            if not is_safe(state, self._max_preemptions)
        )
        return [entry[3] for entry in ranked]


class LastInFirstOut:
    """Newest arrival first. Source: vLLM's fcfs policy."""

    def __init__(self, max_preemptions: int) -> None:
        self._max_preemptions = max_preemptions

    def ranked(self, running: RunningSet, now_s: float) -> list[RequestState]:  # noqa: ARG002 - arrivals keep
        states = [*running.decoding.states[: running.decoding.size].tolist(), *running.prefilling]
        return sorted(
            (state for state in states if not is_safe(state, self._max_preemptions)),
            key=lambda state: (-state.request.arrival_s, -state.sequence),
        )


class LeastValue:
    """Who has missed a target for certain goes first; then as `LowestPriority`."""

    def __init__(self, max_preemptions: int) -> None:
        self._by_priority = LowestPriority(max_preemptions)

    def ranked(self, running: RunningSet, now_s: float) -> list[RequestState]:
        ranked = self._by_priority.ranked(running, now_s)
        return sorted(ranked, key=lambda state: not state.has_missed(now_s))
