"""Recursive least squares on relative errors, with directional forgetting.

What is fitted is 1: features are divided by what was measured, so that errors are relative. Forgetting is directional:
an old observation fades only where a new one speaks of the same thing. What nobody speaks of for an hour must not be
forgotten either: with plain forgetting the doubt about it would grow without bound, and the next observation overturn
everything.

Source: recursive least squares with directional forgetting (Kulhavy, 1987).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

_NO_DOUBT: Final = 1e-12

Vector = npt.NDArray[np.float64]


class LeastSquares:
    """Weights of features, fitted observation by observation.

    Args:
        weights: to begin with, float64, shape [num_features].
        doubt: about each of them: variances, large where nothing is known.
        forgetting: share of what is known that stays when as much is learned anew, in (0, 1].
    Attributes:
        weights: as fitted so far.
        covariance: doubt about them, float64, shape [num_features, num_features].
    """

    def __init__(self, weights: Vector, doubt: float, forgetting: float) -> None:
        self.weights = weights
        self.covariance: npt.NDArray[np.float64] = np.eye(len(weights)) * doubt
        self._forgetting = forgetting

    def observe(self, row: Vector) -> float:
        """Learn from features that were divided by what was measured.

        Returns:
            The relative error of what was expected before: (measured - expected) / measured.
        """
        error = 1.0 - float(row @ self.weights)
        direction = self.covariance @ row
        doubt = float(row @ direction)  # how unsure the expectation was
        self.weights += direction * (error / (1 + doubt))
        if doubt > _NO_DOUBT:
            kept = self._forgetting - (1 - self._forgetting) / doubt
            self.covariance -= np.outer(direction, direction) * (kept / (self._forgetting * (1 + doubt)))
        return error
