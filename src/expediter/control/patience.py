"""How long a backend may be silent before it counts as hung: by what it usually takes, not by one fixed time.

The time to the first byte of an answer in one piece, the time to that of a stream, and the gaps inside a stream differ
by orders of magnitude, and so do requests, models and machines. For each backend, model and kind of silence the door
keeps the longest that ended well for the size of its request; it fades with time. Several times that long is too long.

A request's own silence is not enough: an overloaded engine leaves it in its queue, or pushes it aside and computes it
again. Whoever sends others something meanwhile is busy and not hung; to give up all that wait there, and then whoever
else they are sent to, would make an overload an outage. So the backend must have been silent to everybody for as long,
and its metrics, where it has any, must not have counted work: those others may be asking through another door.

Nor is what is usual for a request alone enough: engines compute several prompts in one step and say nothing to anybody
until all are done. So the wait for a stream's first byte is measured by all prompt tokens to be computed before it, and
whatever is waited for may take as long as those that are pending there.

Where nothing is known yet, what is usual for the same model elsewhere counts, then what is usual for any. If that is
not known either, the first byte may take as long as anything may: it depends on the prompt, the queue and the machine.
But who has begun to stream goes on steadily, so gaps have a usual length to begin with. A stream's own gaps count at
once.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Final

from expediter.core.errors import ConfigurationError
from expediter.core.ranges import require_above_zero, require_at_least

_FADE_S: Final = 300.0
_MAX_PAUSE: Final = 8.0
"""Between two questions whether somebody lives, as a multiple of the first."""
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
        max_progress_s: and never any longer, known or not, and whatever others hear.
        factor: times the longest usual silence.
        usual_gap_s: longest silence inside of a body that is taken for usual before any was seen.
    Raises:
        ConfigurationError: the bounds are out of order, or the factor is below 1.
    """

    min_progress_s: float = 10.0
    max_progress_s: float = 300.0
    factor: float = 4.0
    usual_gap_s: float = 10.0

    def __post_init__(self) -> None:
        if not 0 < self.min_progress_s <= self.max_progress_s < math.inf:
            raise ConfigurationError("min_progress_s must be above 0, and max_progress_s not below it")
        require_at_least(1, self, "factor")
        require_above_zero(self, "usual_gap_s")


def size_of(silence: Silence, num_prompt_tokens: int, num_output_tokens: float) -> float:
    """Return what a silence's length is measured by.

    Args:
        num_prompt_tokens: that are computed before the first byte comes.
    """
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
        # Per backend and model: the longest, and when it was.
        self._longest: dict[Silence, dict[tuple[int, str], tuple[float, float]]] = {kind: {} for kind in Silence}

    def configure(self, config: PatienceConfig) -> None:
        """Take other bounds; what is known stays known."""
        self.min_s, self._config = config.min_progress_s, config

    def borne(self, backend_id: int, model: str, silence: Silence, length_s: float, size: float, now_s: float) -> None:
        """Hear of a silence that ended well."""
        known, place, length = self._longest[silence], (backend_id, model), length_s / size
        longest, at_s = known.get(place, (0.0, now_s))
        if length >= longest * math.exp((at_s - now_s) / _FADE_S):
            known[place] = (length, now_s)

    def limit_s(
        self,
        backend_id: int,
        model: str,
        silence: Silence,
        size: float,
        *,
        own_gap_s: float = 0.0,
        num_pending_tokens: int = 0,
    ) -> float:
        """Return how long a backend may be silent.

        Args:
            size: by `size_of`; infinite where the client sets no bound on what is computed.
            own_gap_s: the longest gap that the same body has had so far.
            num_pending_tokens: of all prompts that are to be computed there.
        """
        config = self._config
        token_s = self._usual(backend_id, model, Silence.START)
        prompts_s = num_pending_tokens * token_s if token_s < math.inf else 0.0
        usual_s = max(own_gap_s, prompts_s, self._usual(backend_id, model, silence) * size)
        return min(config.max_progress_s, max(config.min_progress_s, config.factor * usual_s))

    def is_over(self, silent_s: float, backend_silent_s: float, limit_s: float) -> bool:
        """Return whether a request has waited for too long.

        Args:
            silent_s: how long it has heard nothing.
            backend_silent_s: how long nobody has heard anything from the backend, and it has not counted work.
            limit_s: by `limit_s`.
        """
        if silent_s < limit_s:
            return False
        return backend_silent_s >= limit_s or silent_s >= self._config.max_progress_s

    def forget(self, backend_id: int) -> None:
        """Forget a backend that is gone."""
        for known in self._longest.values():
            for place in [each for each in known if each[0] == backend_id]:
                del known[place]

    def _usual(self, backend_id: int, model: str, silence: Silence) -> float:
        known = self._longest[silence]
        here = known.get((backend_id, model))
        if here is not None:
            return here[0]
        same_model = [longest for (_, other), (longest, _) in known.items() if other == model]
        if same_model or known:
            return max(same_model or [longest for longest, _ in known.values()])
        return self._config.usual_gap_s if silence is Silence.GAP else math.inf


class Suspicion:
    """When one that has requests and says nothing is to be asked whether it is there, long before it counts as hung.

    It may compute a long prompt, or send a plain response at its end: each time in a row it is asked twice as late.

    Args:
        silent_s: silence after which it is asked first.
    """

    def __init__(self, silent_s: float) -> None:
        self._silent_s = silent_s
        self._pause_s = silent_s
        self._asked_s = -math.inf

    def arises(self, heard_s: float, now_s: float) -> bool:
        """Return whether it is to be asked now; if so, it is taken to be.

        Args:
            heard_s: when it last said anything, or was first sent something after idling.
        """
        if heard_s > self._asked_s:
            self._pause_s = self._silent_s
        if now_s <= max(heard_s, self._asked_s) + self._pause_s:
            return False
        self._asked_s = now_s
        self._pause_s = min(2 * self._pause_s, _MAX_PAUSE * self._silent_s)
        return True
