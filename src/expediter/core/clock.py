"""A clock that moves only when told to."""

from __future__ import annotations

from expediter.core.errors import InvariantError


class VirtualClock:
    """Deterministic clock for simulation and tests."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance_to(self, now_s: float) -> None:
        """Move forward to `now_s`.

        Raises:
            InvariantError: `now_s` lies in the past.
        """
        if now_s < self._now_s:
            raise InvariantError(f"clock cannot go back from {self._now_s} to {now_s}")
        self._now_s = now_s
