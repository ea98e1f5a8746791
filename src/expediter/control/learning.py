"""How fast a replica is, found out from its own steps."""

from __future__ import annotations

from typing import Final

from expediter.control.speed import Speed
from expediter.core.plan import StepFeatures
from expediter.scheduling.step_time import OnlineStepTime

_FIRST_STEPS: Final = 32
_EVERY_STEPS: Final = 256


class LearnedSpeed:
    """Fits a replica's step times while it serves."""

    def __init__(self) -> None:
        self._model = OnlineStepTime()
        self._num_seen = 0

    def observe(self, step_id: int, features: StepFeatures, elapsed_s: float, budget_tokens: int) -> Speed | None:
        """Learn from a step; return the speed whenever enough is new, None in between."""
        if not self._model.wants(step_id):
            return None
        self._model.observe(features, elapsed_s)
        self._num_seen += 1
        is_due = self._num_seen % _EVERY_STEPS == 0 or self._num_seen == _FIRST_STEPS
        return Speed.of(self._model, budget_tokens) if is_due else None
