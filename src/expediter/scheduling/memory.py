"""For how many tokens a request gets blocks when it starts."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from expediter.core.request import RequestState
from expediter.scheduling.decoding import DecodingBatch
from expediter.scheduling.knowledge import Knowledge
from expediter.scheduling.running import RunningSet


class MemoryRule(Protocol):
    """Decides what a request must find free to start; it gets blocks for at least its known tokens.

    Asked for the leader of a group: its followers get the same, less the full blocks of the prompt, which they share.
    """

    def reserve_tokens(self, state: RequestState) -> int:
        """Return the tokens that the request gets blocks for at once."""
        ...

    def spare_blocks(self, state: RequestState, running: RunningSet) -> int:
        """Return the blocks that must stay available once it has started."""
        ...


class PagedMemory:
    """Blocks for the known tokens, more on demand. Source: PagedAttention (vLLM, 2309.06180).

    Args:
        max_preemptions: after so many, a request starts only with blocks for its whole life, and is safe then.
        watermark_blocks: kept available for the growth of what runs already.
    """

    def __init__(self, max_preemptions: int, watermark_blocks: int = 0) -> None:
        self._max_preemptions = max_preemptions
        self._watermark_blocks = watermark_blocks

    def reserve_tokens(self, state: RequestState) -> int:
        reserves = state.num_preemptions >= self._max_preemptions
        return _whole_life(state) if reserves else state.num_known_tokens

    def spare_blocks(self, state: RequestState, running: RunningSet) -> int:  # noqa: ARG002 - the protocol's
        return self._watermark_blocks if len(running) else 0


class FullReservation:
    """Blocks for prompt and longest output at once: nobody is ever preempted for want of a block. Source: Orca."""

    def reserve_tokens(self, state: RequestState) -> int:
        return _whole_life(state)

    def spare_blocks(self, state: RequestState, running: RunningSet) -> int:  # noqa: ARG002 - the protocol's
        return 0


class PredictedPeak:
    """Blocks for the known tokens, if the predicted peak of everybody together fits.

    Requests free their blocks when they end, so the peak of the future is not the sum of all lives: sorted by what is
    left to generate, longest first, it is the most that the first i hold when the i-th ends. Source: Past-Future
    (2507.10150).

    Args:
        max_preemptions: after so many, a request starts only with blocks for its whole life, and is safe then.
    """

    def __init__(self, max_preemptions: int, knowledge: Knowledge) -> None:
        self._paged = PagedMemory(max_preemptions)
        self._lengths = knowledge.lengths

    def reserve_tokens(self, state: RequestState) -> int:
        return self._paged.reserve_tokens(state)

    def spare_blocks(self, state: RequestState, running: RunningSet) -> int:
        if not len(running):
            return 0  # alone it fits, whatever it grows to: else it would have been refused
        states = [member for leader in (state, *running.prefilling) for member in leader.members]
        num_output = [len(s.output) for s in states]
        states += running.decoding.states[: running.decoding.size].tolist()
        num_output += running.decoding.counters[DecodingBatch.OUTPUT, : running.decoding.size].tolist()
        left = np.array(
            [self._lengths.predict(s.request, n) - n for s, n in zip(states, num_output, strict=True)], np.int64
        )
        left[::-1].sort()
        growth = int((left * np.arange(1, len(left) + 1)).max())
        # What is held now is taken already; only the growth up to the peak must still be found. Each sequence may also
        # end in the middle of a block.
        return -(-growth // running.kv.block_size)


def _whole_life(state: RequestState) -> int:
    # The last output token is never fed back, so its KV is never stored.
    return state.request.max_total_tokens - 1
