"""Gaps between tokens, all requests together, from the steps of one replica."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from expediter.core.plan import StepFeatures
from expediter.core.ports import StepTimeModel


class GapRecorder:
    """A `StepTimeModel` that keeps what its steps mean for the gaps between tokens.

    It sees every step once when the simulation advances them singly (`jumps=False`) and nobody else asks it
    (`knows_step_time=False`). What decodes is known by number: those that began latest are taken to be among them, so a
    preempted request counts as one that has ended, and the gap that it suffers when it resumes is left out.

    Args:
        model: says how long steps take.
    """

    def __init__(self, model: StepTimeModel) -> None:
        self._model = model
        self._waiting: list[tuple[int, float]] = []
        self._gaps: list[float] = []
        self._counts: list[int] = []

    def step_time_s(self, features: StepFeatures) -> float:
        """Return the duration of one step in seconds, and record it."""
        duration_s = self._model.step_time_s(features)
        left = features.num_decodes
        if left:
            for count, elapsed_s in reversed(self._waiting):
                taken = min(count, left)
                if taken:
                    self._gaps.append(elapsed_s + duration_s)
                    self._counts.append(taken)
                left -= taken
            self._waiting = [(features.num_seqs, 0.0)]
        else:
            self._waiting = [(count, elapsed_s + duration_s) for count, elapsed_s in self._waiting]
            self._waiting.append((features.num_seqs, 0.0))
        return duration_s

    def decode_run_s(self, features: StepFeatures, num_steps: int) -> npt.NDArray[np.float64]:
        """Return the durations of successive decode steps without recording them: they may not all be run."""
        return self._model.decode_run_s(features, num_steps)

    def quantile_s(self, share: float) -> float:
        """Return the gap that this share of all tokens does not exceed, in seconds; 0 if there was none."""
        if not self._gaps:
            return 0.0
        gaps, counts = np.array(self._gaps), np.array(self._counts)
        order = np.argsort(gaps, kind="stable")
        reached = np.cumsum(counts[order])
        return float(gaps[order][np.searchsorted(reached, share * reached[-1])])
