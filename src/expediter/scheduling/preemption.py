"""Who gives way, and whether its KV is kept in host memory or computed again."""

from __future__ import annotations

from typing import Protocol

from expediter.core.request import RequestState
from expediter.kvcache.manager import KVCacheManager
from expediter.scheduling.decoding import DecodingBatch
from expediter.scheduling.knowledge import Knowledge
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


class PreemptionMode(Protocol):
    """Decides what becomes of a preempted request's KV. Where the host has no room, it is computed again anyway."""

    def swaps(self, state: RequestState, num_kept_tokens: int, running: RunningSet) -> bool:
        """Return whether the KV of `state` should go to the host; asked only where there is such a tier.

        Args:
            state: just taken out of its batch; its counts are exact.
            num_kept_tokens: leading tokens whose blocks others own too; fewer than it has computed.
            running: those who stay.
        """
        ...


class Recompute:
    """Never to the host."""

    def swaps(self, state: RequestState, num_kept_tokens: int, running: RunningSet) -> bool:  # noqa: ARG002
        return False


class Swap:
    """Always to the host."""

    def swaps(self, state: RequestState, num_kept_tokens: int, running: RunningSet) -> bool:  # noqa: ARG002
        return True


class Cheaper:
    """To the host if moving out and in takes less time than computing again is predicted to take.

    Recomputing rides along with the decodes of those who stay, so it costs what it adds to their step, and that for
    tokens that nobody else keeps cached. Of the cache's own chances to keep the others until then nothing is assumed:
    who is preempted for want of blocks will see its own evicted first. Where either time is not known, it recomputes.
    """

    def __init__(self, kv: KVCacheManager, knowledge: Knowledge) -> None:
        self._kv = kv
        self._knowledge = knowledge
        if kv.host.num_blocks and knowledge.block_swap_s is not None:
            knowledge.ask()

    def swaps(self, state: RequestState, num_kept_tokens: int, running: RunningSet) -> bool:
        block_swap_s = self._knowledge.block_swap_s
        if block_swap_s is None:
            return False
        num_lost = state.num_computed_tokens - num_kept_tokens
        decoding = running.decoding
        recompute_s = self._knowledge.recompute_s(num_lost, num_kept_tokens, decoding.size, decoding.context_tokens)
        return 2 * self._kv.blocks_for(num_lost) * block_swap_s < recompute_s
