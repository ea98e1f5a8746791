"""Who gives way: the running request of lowest value, least computed first, newest last.

Least computed first loses the least work (half of what recomputation costs is victim choice). A request that has been
preempted `max_preemptions` times holds blocks for its longest possible life and is never a victim again.
"""

from __future__ import annotations

from collections.abc import Iterable

from expediter.core.request import RequestState
from expediter.scheduling.decoding import DecodingBatch


def running_by_value(
    decoding: DecodingBatch, prefilling: Iterable[RequestState], max_preemptions: int
) -> list[RequestState]:
    """Return the requests that may be preempted, first victim first.

    Cost: O(running) in Python; called only when somebody has to go.
    """
    computed = decoding.counters[DecodingBatch.COMPUTED, : decoding.size].tolist()
    candidates: list[tuple[int, RequestState]] = list(zip(computed, decoding.states[: decoding.size], strict=True))
    candidates += [(state.num_computed_tokens, state) for state in prefilling]
    ranked = sorted(
        (-state.request.priority, count, -state.sequence, state)
        for count, state in candidates
        if state.num_preemptions < max_preemptions
    )
    return [entry[3] for entry in ranked]
