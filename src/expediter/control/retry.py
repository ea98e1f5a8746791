"""When a request that failed before its first byte may be tried again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from expediter.core.ranges import require_at_least, require_not_negative


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryConfig:
    """How much is tried again.

    Args:
        max_attempts: of one request, the first included.
        share: retries that a request earns.
        min_per_s: retries earned by time alone, so that little traffic has some too.
        max_saved: retries that can be saved up; the beginning has all of them. It should cover what is in flight to
            one backend, since all of that fails at once when the backend dies.
        backoff_s, max_backoff_s: longest pause before the second attempt, doubled for each one after it, at most.
    Raises:
        ConfigurationError: a number is out of range.
    """

    max_attempts: int = 3
    share: float = 0.2
    min_per_s: float = 10.0
    max_saved: float = 100.0
    backoff_s: float = 0.02
    max_backoff_s: float = 0.5

    def __post_init__(self) -> None:
        require_at_least(1, self, "max_attempts")
        require_not_negative(self, "share", "min_per_s", "max_saved", "backoff_s", "max_backoff_s")


class RetryBudget:
    """Bounds retries to a share of the requests, so that they cannot double the load of those who are failing.

    Source: retry budgets of Finagle and Envoy.
    """

    def __init__(self, config: RetryConfig, now_s: float) -> None:
        self._config = config
        self._saved = config.max_saved
        self._at_s = now_s

    def configure(self, config: RetryConfig) -> None:
        """Take other rules; what is saved up stays, as far as they allow."""
        self._config = config
        self._saved = min(self._saved, config.max_saved)

    def earn(self) -> None:
        """Count a request that came in."""
        self._saved = min(self._config.max_saved, self._saved + self._config.share)

    def may_retry(self, now_s: float) -> bool:
        """Return whether there is a retry left, and take it."""
        if not self.has_retry(now_s):
            return False
        self._saved -= 1
        return True

    def has_retry(self, now_s: float) -> bool:
        """Return whether a request that begins now could be tried again."""
        config = self._config
        elapsed_s = max(0.0, now_s - self._at_s)
        self._at_s = max(self._at_s, now_s)
        self._saved = min(config.max_saved, self._saved + elapsed_s * config.min_per_s)
        return self._saved >= 1 and config.max_attempts > 1


def backoff_s(config: RetryConfig, num_attempts: int, rng: np.random.Generator) -> float:
    """Return the pause before the next attempt, drawn from [0, the longest): who failed together comes back apart.

    Args:
        num_attempts: that were made so far, at least 1.
    Source: full jitter (Brooker, Exponential Backoff and Jitter, 2015).
    """
    longest_s = min(config.max_backoff_s, config.backoff_s * 2.0 ** min(num_attempts - 1, 32))
    return float(rng.random()) * longest_s
