"""A step-time model fitted to the steps of a live replica.

Linear in the features, times a factor that depends on the number of tokens. The factor is what a line cannot follow:
libraries pick a kernel by the number of rows, and a step of four tokens may take less time than one of three.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log, log2
from typing import Final

import numpy as np
import numpy.typing as npt

from expediter.core.errors import ConfigurationError
from expediter.core.plan import StepFeatures

_FLOOR_S: Final = 1e-6
"""Shortest step that the model predicts; a step time of 0 would stop virtual time."""
_EXACT_TOKENS: Final = 8
"""Up to so many tokens, each number has a factor of its own: kernels differ most there."""
_PRIOR_STEPS: Final = 4
"""So many steps weigh as much as the line does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedModel:
    """`StepTimeModel`: (fixed + tokens + decodes + decode context + prefill attention) * factor(tokens of the step).

    Args:
        fixed_s: per step.
        per_prefill_token_s: per token of a chunk.
        per_decode_s: per decoding sequence.
        per_context_token_s: per KV token that a decode reads.
        per_attention_s: per unit of `StepFeatures.prefill_attention`.
        factors: (tokens, factor) by ascending number of tokens; interpolated over its logarithm, constant outside. None
            at all stands for 1 everywhere.
    """

    fixed_s: float
    per_prefill_token_s: float
    per_decode_s: float
    per_context_token_s: float
    per_attention_s: float
    factors: tuple[tuple[float, float], ...] = ()

    def step_time_s(self, features: StepFeatures) -> float:
        """Return the duration of one step in seconds, at least a microsecond."""
        linear_s = self._without_context_s(features) + self.per_context_token_s * features.decode_context_tokens
        return max(_FLOOR_S, linear_s * self._factor(features.num_tokens))

    def decode_run_s(self, features: StepFeatures, num_steps: int) -> npt.NDArray[np.float64]:
        """Return the durations of `num_steps` successive decode steps, float64, shape [num_steps]; see the port."""
        grown = np.arange(num_steps, dtype=np.float64)
        grown *= features.num_decodes
        grown += features.decode_context_tokens
        grown *= self.per_context_token_s
        grown += self._without_context_s(features)
        grown *= self._factor(features.num_tokens)
        return np.maximum(_FLOOR_S, grown)

    def _factor(self, num_tokens: int) -> float:
        """Return the factor; `bisect` and one division, as this is asked for every simulated step."""
        factors = self.factors
        if not factors:
            return 1.0
        above = bisect_left(factors, (num_tokens,))
        if above == 0:
            return factors[0][1]
        if above == len(factors):
            return factors[-1][1]
        (low, low_factor), (high, high_factor) = factors[above - 1], factors[above]
        return low_factor + (high_factor - low_factor) * log(num_tokens / low) / log(high / low)

    def _without_context_s(self, features: StepFeatures) -> float:
        return (
            self.fixed_s
            + self.per_prefill_token_s * features.num_prefill_tokens
            + self.per_decode_s * features.num_decodes
            + self.per_attention_s * features.prefill_attention
        )


def fit_step_times(steps: Sequence[tuple[StepFeatures, float]]) -> FittedModel:
    """Fit a `FittedModel` to recorded steps: least squares with non-negative coefficients, then the factors.

    Errors are weighted by 1 / elapsed, so that long prefills do not drown the many short decodes: the fit minimizes
    the relative error. A factor is the median ratio of measured to linear time among steps of about as many tokens,
    drawn towards 1 where there are few of them.

    Args:
        steps: (features, elapsed seconds) of each step; elapsed must be above 0.
    Raises:
        ConfigurationError: there is no step, or a duration is not above 0.
    """
    if not steps:
        raise ConfigurationError("a step-time model cannot be fitted to no steps at all")
    elapsed = np.array([elapsed_s for _, elapsed_s in steps], dtype=np.float64)
    if not (np.isfinite(elapsed).all() and (elapsed > 0).all()):
        raise ConfigurationError("recorded step durations must be finite and above 0")
    rows = np.array(
        [(1, f.num_prefill_tokens, f.num_decodes, f.decode_context_tokens, f.prefill_attention) for f, _ in steps],
        dtype=np.float64,
    )
    rows /= elapsed[:, None]
    # Columns differ by ten orders of magnitude; scaled to unit length the problem is well conditioned.
    scale = np.sqrt((rows * rows).sum(axis=0))
    scale[scale == 0] = 1.0
    solution = _nonnegative_least_squares(rows / scale, np.ones(len(steps))) / scale
    fixed, per_token, per_decode, per_context, per_attention = solution.tolist()
    linear = FittedModel(
        fixed_s=fixed,
        per_prefill_token_s=per_token,
        per_decode_s=per_decode,
        per_context_token_s=per_context,
        per_attention_s=per_attention,
    )
    return replace(linear, factors=_factors(linear, steps))


def _factors(linear: FittedModel, steps: Sequence[tuple[StepFeatures, float]]) -> tuple[tuple[float, float], ...]:
    """Return a factor for each group of steps of about as many tokens: each number up to 8, thirds of octaves above."""
    groups: dict[float, list[float]] = {}
    for features, elapsed_s in steps:
        tokens = float(features.num_tokens)
        if tokens > _EXACT_TOKENS:
            tokens = _EXACT_TOKENS * 2 ** (round(3 * log2(tokens / _EXACT_TOKENS)) / 3)
        groups.setdefault(tokens, []).append(elapsed_s / linear.step_time_s(features))
    return tuple(
        (tokens, 1.0 + (float(np.median(ratios)) - 1.0) * len(ratios) / (len(ratios) + _PRIOR_STEPS))
        for tokens, ratios in sorted(groups.items())
    )


def _nonnegative_least_squares(
    matrix: npt.NDArray[np.float64], target: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Return the x >= 0 that minimizes |matrix @ x - target|, float64, shape [columns].

    With five columns all subsets of non-zero coefficients can be tried: the optimum of the constrained problem is the
    unconstrained optimum on some subset, so the best subset whose optimum is non-negative is exact.
    """
    num_columns = matrix.shape[1]
    best = np.zeros(num_columns)
    best_error = float(target @ target)
    for subset in range(1, 1 << num_columns):
        columns = [i for i in range(num_columns) if subset >> i & 1]
        found = np.linalg.lstsq(matrix[:, columns], target, rcond=None)[0]
        if (found < 0).any():
            continue
        residual = matrix[:, columns] @ found - target
        error = float(residual @ residual)
        if error < best_error * (1 - 1e-12):
            best_error = error
            best = np.zeros(num_columns)
            best[columns] = found
    return best
