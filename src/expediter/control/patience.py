"""How long a backend may be silent before it counts as hung: by what it usually takes, not by one fixed time.

The time to the first byte of an answer in one piece, the time to that of a stream, and the gaps inside a stream differ
by orders of magnitude, and so do requests, models and machines. For each backend and each of the three the door keeps
the longest silence that ended well for the size of its request; it fades with time. Several times that long is too
long. Of a backend of which nothing is known yet, what is usual at the others counts.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Final

from expediter.core.errors import ConfigurationError
from expediter.core.ranges import require_at_least

_FADE_S: Final = 300.0
_START_TOKENS: Final = 512
"""Of a prompt, to which the work of a short one is as good as equal."""
_WHOLE_TOKENS: Final = 64
"""Of output, whose time is that of starting a request at all."""


class Silence(enum.IntEnum):
    """What is waited for."""

    WHOLE = 0
    """The first byte of an answer in one piece: all of it has been computed by then."""
    START = 1
    """The first byte of a stream."""
    GAP = 2
    """The next bytes of a body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PatienceConfig:
    """Bounds on silence.

    Args:
        min_progress_s: silence up to here is always borne.
        max_progress_s: and never any longer, known or not.
        factor: times the longest usual silence.
    Raises:
        ConfigurationError: the bounds are out of order, or the factor is below 1.
    """

    min_progress_s: float = 10.0
    max_progress_s: float = 300.0
    factor: float = 4.0

    def __post_init__(self) -> None:
        if not 0 < self.min_progress_s <= self.max_progress_s < math.inf:
            raise ConfigurationError("min_progress_s must be above 0, and max_progress_s not below it")
        require_at_least(1, self, "factor")


def size_of(silence: Silence, num_prompt_tokens: int, num_output_tokens: float) -> float:
    """Return what a silence's length is measured by."""
    if silence is Silence.WHOLE:
        return _WHOLE_TOKENS + num_output_tokens
    return float(_START_TOKENS + num_prompt_tokens) if silence is Silence.START else 1.0


class Patience:
    """What silences are usual at each backend, in seconds for a size of 1.

    Attributes:
        min_s: silence up to here is always borne.
    """

    def __init__(self, config: PatienceConfig) -> None:
        self.min_s = config.min_progress_s
        self._config = config
        self._longest: dict[tuple[int, Silence], tuple[float, float]] = {}

    def borne(self, backend_id: int, silence: Silence, length_s: float, size: float, now_s: float) -> None:
        """Hear of a silence that ended well."""
        length = length_s / size
        longest, at_s = self._longest.get((backend_id, silence), (0.0, now_s))
        if length >= longest * math.exp((at_s - now_s) / _FADE_S):
            self._longest[backend_id, silence] = (length, now_s)

    def limit_s(self, backend_id: int, silence: Silence, size: float) -> float:
        """Return how long a backend may be silent.

        Args:
            size: by `size_of`; infinite where the client sets no bound on what is computed.
        """
        known = self._longest.get((backend_id, silence))
        if known is None:
            known = max((v for (_, other), v in self._longest.items() if other is silence), default=None)
        config = self._config
        usual_s = math.inf if known is None else known[0] * size
        return min(config.max_progress_s, max(config.min_progress_s, config.factor * usual_s))

    def forget(self, backend_id: int) -> None:
        """Forget a backend that is gone."""
        for silence in Silence:
            self._longest.pop((backend_id, silence), None)
