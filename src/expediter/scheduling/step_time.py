"""A step-time model that learns from the replica's own steps.

Least squares on the features of a step (`least_squares.py`), starting from an analytic prior: the prior's prediction
is itself a feature, of weight 1 before anything was seen. Errors are weighted by 1 / duration, so that long prefills do
not drown the many short decodes. A replica that does nothing but decode for an hour keeps what it knew of prompts. The
model also tracks how far it is off, so that who needs a bound can ask for one.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from expediter.core.plan import StepFeatures
from expediter.core.ports import StepTimeModel
from expediter.scheduling.least_squares import LeastSquares

_FLOOR_S = 1e-6
_FORGETTING = 0.998
_FIRST_STEPS = 256
_EVERY = 8
_SCALE = np.array([1.0, 1.0, 1e-4, 1e-4, 1e-7, 1e-8])
"""Brings features near 1: prior, constant, tokens, decodes, context tokens, attention."""


class OnlineStepTime:
    """`StepTimeModel` that is fitted step by step.

    Args:
        prior: an analytic model, if there is one.
    Attributes:
        actual_s, predicted_s, error_s: sums over all observed steps: how long they took, were expected to take before
            they were learned from, and by how much that was off, either way.
        relative_error: smoothed mean of |predicted - actual| / actual, 0 before the first step.
        shortest_s: of the steps seen; no prediction is below it, so extrapolation cannot make a step free.
    """

    def __init__(self, prior: StepTimeModel | None = None) -> None:
        self._prior = prior
        weights = np.zeros(len(_SCALE))
        weights[0] = 1.0 if prior is not None else 0.0
        # A prior is trusted like some hundred steps; without one the first steps decide.
        self._fit = LeastSquares(weights, 0.01 if prior is not None else 100.0, _FORGETTING)
        self._num_seen = 0
        self.relative_error = 0.0
        self.shortest_s = math.inf
        self.actual_s = self.predicted_s = self.error_s = 0.0

    def observe(self, features: StepFeatures, elapsed_s: float) -> None:
        """Learn from a finished step."""
        if not 0 < elapsed_s < math.inf:
            return
        self.shortest_s = min(self.shortest_s, elapsed_s)
        error = self._fit.observe(self._row(features) / elapsed_s)
        self.actual_s += elapsed_s
        self.predicted_s += elapsed_s * (1.0 - error)
        self.error_s += elapsed_s * abs(error)
        rate = 0.05 if self._num_seen > 20 else 1.0 / (self._num_seen + 1)
        self.relative_error += rate * (abs(error) - self.relative_error)
        self._num_seen += 1

    @property
    def knows_something(self) -> bool:
        return self._prior is not None or self._num_seen > 0

    def wants(self, step_id: int) -> bool:
        """Return whether a step should be learned from: the first ones all, later ones now and then."""
        return self._num_seen < _FIRST_STEPS or step_id % _EVERY == 0

    def step_time_s(self, features: StepFeatures) -> float:
        """Return the expected duration of a step in seconds; above 0, and not below any step seen."""
        floor_s = self.shortest_s if self._num_seen else _FLOOR_S
        return max(floor_s, float(self._row(features) @ self._fit.weights))

    def bound_s(self, features: StepFeatures) -> float:
        """Return a duration that a step exceeds rarely: the expected one and twice the usual error, at most half."""
        return self.step_time_s(features) * (1 + min(0.5, 2 * self.relative_error))

    def decode_run_s(self, features: StepFeatures, num_steps: int) -> npt.NDArray[np.float64]:
        """Return the durations of `num_steps` successive decode steps, float64, shape [num_steps]."""
        grown = (
            features._replace(decode_context_tokens=features.decode_context_tokens + k * features.num_decodes)
            for k in range(num_steps)
        )
        return np.array([self.step_time_s(each) for each in grown])

    def _row(self, features: StepFeatures) -> npt.NDArray[np.float64]:
        prior_s = 0.0 if self._prior is None else self._prior.step_time_s(features)
        row = np.array(
            [
                prior_s,
                1.0,
                features.num_tokens,
                features.num_decodes,
                features.decode_context_tokens,
                features.prefill_attention,
            ]
        )
        row *= _SCALE
        return row
