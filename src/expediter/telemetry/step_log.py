"""The newest steps of all replicas with their features and durations: what a step-time model is fitted to."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from expediter.core.plan import StepFeatures


class LoggedStep(NamedTuple):
    """One executed step. `sequence` increases over all replicas."""

    sequence: int
    replica_id: int
    features: StepFeatures
    elapsed_s: float


class StepLog:
    """Keeps the last `max_steps` steps."""

    def __init__(self, max_steps: int = 20_000) -> None:
        self._steps: deque[LoggedStep] = deque(maxlen=max_steps)
        self._next_sequence = 0

    def append(self, replica_id: int, features: StepFeatures, elapsed_s: float) -> None:
        self._steps.append(LoggedStep(self._next_sequence, replica_id, features, elapsed_s))
        self._next_sequence += 1

    def since(self, sequence: int) -> list[LoggedStep]:
        """Return the steps kept whose sequence is at least `sequence`, oldest first."""
        return [step for step in self._steps if step.sequence >= sequence]
