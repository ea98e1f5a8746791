"""How fast requests get away from a central queue, and what follows: who is too late, and when to come back."""

from __future__ import annotations

import math
from typing import Final

from expediter.core.request import Request
from expediter.scheduling.knowledge import Knowledge

_MEMORY_S: Final = 30.0
"""Time spent with somebody waiting after which what was seen counts 1/e."""
_UNKNOWN_RETRY_S: Final = 1.0
_MAX_RETRY_S: Final = 60.0
_HOPELESS: Final = 1.25
"""A prediction may be off; who would only just be late is not refused for it."""


class Drain:
    """How fast the queue empties, counted over the time in which somebody waits."""

    def __init__(self) -> None:
        self._seen_s: float | None = None
        self._waited_s = 0.0
        self._num_requests = 0.0
        self._num_tokens = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens per second; 0 if nothing was seen yet."""
        return self._num_tokens / self._waited_s if self._waited_s > 0 else 0.0

    def pass_time(self, now_s: float, *, somebody_waits: bool) -> None:
        """Go on to now; somebody waited up to here or not."""
        if somebody_waits and self._seen_s is not None:
            passed_s = max(0.0, now_s - self._seen_s)
            fade = math.exp(-passed_s / _MEMORY_S)
            self._waited_s = self._waited_s * fade + passed_s
            self._num_requests *= fade
            self._num_tokens *= fade
        self._seen_s = now_s

    def started(self, num_tokens: int) -> None:
        """Somebody who waited has got a replica."""
        self._num_requests += 1
        self._num_tokens += num_tokens

    def time_s(self, num_requests: float, num_tokens: float) -> float | None:
        """Return how long so many of either take to get away, whichever takes longer; None if nothing was seen yet."""
        if not self._num_requests or self._waited_s <= 0:
            return None
        return self._waited_s * max(num_requests / self._num_requests, num_tokens / max(self._num_tokens, 1.0))

    def retry_after_s(self, num_requests: float, num_tokens: float) -> float:
        """Return when to come back if so many go first; never in so long a time that no observation vouches for it."""
        time_s = self.time_s(num_requests, num_tokens)
        return _UNKNOWN_RETRY_S if time_s is None else min(time_s, _MAX_RETRY_S)


class FleetKnowledge(Knowledge):
    """What orderings ask about a replica, as observed of the fleet: how fast prompts get away."""

    def __init__(self, drain: Drain) -> None:
        super().__init__()
        self._drain = drain

    @property
    def prefill_token_s(self) -> float:
        return 1 / self._drain.tokens_per_s if self._drain.tokens_per_s else 0.0

    @property
    def busy_tokens_per_s(self) -> float:
        return self._drain.tokens_per_s or math.inf

    @property
    def loaded_token_s(self) -> float:
        return 0.0  # no step is seen here, so all of a deadline is left for the first token


def is_hopeless(request: Request, predicted_ttft_s: float, now_s: float) -> bool:
    """Return whether a request would rather be refused now: it said so, and is expected to miss its TTFT by far.

    Args:
        predicted_ttft_s: from now on; infinity or not a number where nothing is known, which refuses nobody.
    """
    if not request.refuse_late or request.slo.ttft_s is None or not math.isfinite(predicted_ttft_s):
        return False
    return now_s - request.arrival_s + predicted_ttft_s > _HOPELESS * request.slo.ttft_s


def excess_s(request: Request, predicted_ttft_s: float, now_s: float) -> float:
    """Return by how much a prediction exceeds the TTFT target: when a request like it may be in time, if none comes."""
    allowed_s = math.inf if request.slo.ttft_s is None else request.slo.ttft_s
    return max(0.0, now_s - request.arrival_s + predicted_ttft_s - allowed_s)
