"""For how many tokens a request gets blocks when it starts."""

from __future__ import annotations

from typing import Protocol

from expediter.core.request import RequestState
from expediter.scheduling.running import RunningSet


class MemoryRule(Protocol):
    """Decides what a request must find free to start; it gets blocks for at least its known tokens."""

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


def _whole_life(state: RequestState) -> int:
    # The last output token is never fed back, so its KV is never stored.
    return state.request.max_total_tokens - 1
