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

    Attributes:
        is_static: while decodes go on and no request comes or goes, who was refused stays refused.
    """

    is_static: bool

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

    is_static = True

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

    is_static = True

    def reserve_tokens(self, state: RequestState) -> int:
        return _whole_life(state)

    def spare_blocks(self, state: RequestState, running: RunningSet) -> int:  # noqa: ARG002 - the protocol's
        return 0


_GOLDEN = 0.618034


class PredictedPeak:
    """Blocks for the known tokens, if the predicted peak of everybody together fits.

    Requests free their blocks when they end, so the peak of the future is not the sum of all lives: sorted by what is
    left to generate, longest first, it is the most that the first i hold when the i-th ends. Lengths are drawn from the
    history's distribution, one quantile per request for all its life, spread evenly over requests. When predictions are
    right and prompts are computed in order of admission, nobody is preempted for want of a block. Source: Past-Future
    (2507.10150), which counts tokens, and prompts as computed at once; this counts blocks, and what prompts wait for.

    Args:
        max_preemptions: after so many, a request starts only with blocks for its whole life, and is safe then.
        max_num_batched_tokens: of a step, for how long the prompts under way take.
    """

    is_static = False  # the later a request starts, the less of it meets the peak

    def __init__(self, max_preemptions: int, max_num_batched_tokens: int, knowledge: Knowledge) -> None:
        self._paged = PagedMemory(max_preemptions)
        self._max_num_batched_tokens = max_num_batched_tokens
        self._lengths = knowledge.lengths

    def reserve_tokens(self, state: RequestState) -> int:
        return self._paged.reserve_tokens(state)

    def spare_blocks(self, state: RequestState, running: RunningSet) -> int:
        if not len(running):
            return 0  # alone it fits, whatever it grows to: else it would have been refused
        kv, decoding, size = running.kv, running.decoding, running.decoding.size
        leaders = [state, *running.prefilling]
        num_pending = sum(s.num_known_tokens - s.num_computed_tokens for s in leaders)
        # They hold their blocks for as long as their prompts take, too.
        num_steps = -(-num_pending // max(1, self._max_num_batched_tokens - len(running)))
        left = [num_steps + self._left(s, len(s.output)) for leader in leaders for s in leader.members]
        num_output = decoding.counters[DecodingBatch.OUTPUT, :size].tolist()
        left += [self._left(s, n) for s, n in zip(decoding.states[:size].tolist(), num_output, strict=True)]
        num_own = (
            kv.blocks_for(state.num_known_tokens) - kv.match(state.token_bytes, state.request.cache_salt).num_blocks
        )
        own = [num_own] + [running.follower_blocks(state, state.num_known_tokens)] * len(state.followers)
        slots = [s.slot for leader in running.prefilling for s in leader.members] + decoding.slots[:size].tolist()
        freed = np.array(own + kv.tables.count_exclusive(np.array(slots, np.intp)).tolist())
        steps = np.array(left, np.int64)
        longest_first = np.argsort(-steps, kind="stable")
        steps, freed = steps[longest_first], freed[longest_first]
        # When the i-th ends, the first i have grown for as long, and the blocks of those behind it are back.
        growth = np.arange(1, len(steps) + 1) * -(-steps // kv.block_size)
        return max(0, int((growth - (freed.sum() - freed.cumsum())).max()))

    def _left(self, state: RequestState, num_output: int) -> int:
        quantile = 0.05 + 0.9 * (state.sequence * _GOLDEN % 1.0)
        return self._lengths.predict(state.request, num_output, quantile) - num_output


def _whole_life(state: RequestState) -> int:
    # The last output token is never fed back, so its KV is never stored.
    return state.request.max_total_tokens - 1
