"""Whether KV of a prompt's beginning is worth fetching from elsewhere instead of computing it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from expediter.control.speed import Speed


class Source(NamedTuple):
    """Somebody who holds the beginning of a prompt.

    Attributes:
        num_tokens: of the prompt, from its first on.
        fetch_s: until those that the replica lacks have come.
    """

    num_tokens: int
    fetch_s: float


def best_source(sources: Sequence[Source], num_prompt: int, num_cached: int, speed: Speed) -> int | None:
    """Return the place of the source with which the prompt is computed soonest; None if that is without any.

    Fetching wins where what it saves, T(n - m | m) - T(n - s | s), is more than it takes. Source: the comparison of
    Mooncake (FAST 2025), section 6.

    Args:
        num_prompt: n, tokens of the prompt.
        num_cached: m, of them cached on the replica.
        speed: of the replica.
    """
    alone_s = speed.prefill_s(num_prompt - num_cached, num_cached)
    soonest: tuple[float, int] | None = None
    for place, source in enumerate(sources):
        # A step must compute a token to have something to sample from.
        num_reused = min(source.num_tokens, num_prompt - 1)
        if num_reused <= num_cached:
            continue
        total_s = source.fetch_s + speed.prefill_s(num_prompt - num_reused, num_reused)
        if total_s < alone_s and (soonest is None or total_s < soonest[0]):
            soonest = total_s, place
    return None if soonest is None else soonest[1]
