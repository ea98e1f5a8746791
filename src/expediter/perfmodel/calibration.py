"""Fits an engine's constants to measured step times: published ones, or a file of one's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from expediter.core.errors import ConfigurationError
from expediter.perfmodel.constants import Engine
from expediter.perfmodel.dimensions import ModelShape
from expediter.perfmodel.hardware import Gpu
from expediter.perfmodel.measurements import Measurement, read_measurements
from expediter.perfmodel.parallelism import Parallelism
from expediter.perfmodel.roofline import RooflineModel

Vector = npt.NDArray[np.float64]

_ROUNDS: Final = 60
_NEARLY_EXACT: Final = 0.02
"""Relative error below which a measurement weighs no more for being closer."""


def predicted_s(measurements: Sequence[Measurement], engine: Engine) -> Vector:
    """Return what the model says of each measurement in seconds, float64, shape [measurements]."""
    models: dict[tuple[ModelShape, Gpu, Parallelism], RooflineModel] = {}
    times = np.empty(len(measurements))
    for i, row in enumerate(measurements):
        key = (row.shape, row.gpu, row.parallelism)
        if key not in models:
            split = row.parallelism
            models[key] = RooflineModel(row.shape, row.gpu, split.tensor, split.pipeline, split.expert, engine=engine)
        times[i] = sum(weight * models[key].step_time_s(step) for weight, step in row.parts)
    return times


SCALES: Final = {
    "step_s": 1e-3,
    "worker_s": 1e-3,
    "prefill_step_s": 1e-3,
    "seq_s": 1e-5,
    "decode_launch_s": 5e-2,
    "prefill_launch_s": 5e-2,
    "compute_factor": 1.0,
    "memory_factor": 1.0,
    "all_reduce_factor": 1.0,
    "bulk_all_reduce_factor": 1.0,
}
"""Constants of `Engine` that can be fitted, with where the search starts."""

_FACTORS: Final = frozenset({"compute_factor", "memory_factor", "all_reduce_factor"})
_BELIEF: Final = 0.01
"""Weight of the belief that a factor is 1, as a share of all measurements' weight."""


def fit_engine(
    measurements: Sequence[Measurement], free: Sequence[str] = tuple(SCALES), *, base: Engine | None = None
) -> Engine:
    """Return the engine whose predictions are nearest to the measurements by relative error.

    Args:
        free: names of `SCALES` to fit; the rest stay as in `base`.
    Raises:
        ConfigurationError: fewer measurements than constants to fit.
    """
    if len(measurements) < len(free):
        raise ConfigurationError(f"{len(measurements)} measurements cannot determine {len(free)} constants")
    base = Engine() if base is None else base

    def engine_of(values: Vector) -> Engine:
        return replace(base, **dict(zip(free, values.tolist(), strict=True)))

    # Factors on kernels are believed to be 1 unless the measurements say otherwise: a few that hardly depend on one
    # must not bend what thousands of its own measurements showed.
    kept = [i for i, name in enumerate(free) if name in _FACTORS]
    measured = np.array([row.time_s for row in measurements] + [1.0] * len(kept))
    weights = np.ones(len(measured))
    weights[len(measurements) :] = _BELIEF * len(measurements)
    found = fit_relative(
        lambda values: np.concatenate([predicted_s(measurements, engine_of(values)), np.maximum(values[kept], 1e-9)]),
        measured,
        np.array([SCALES[name] for name in free]),
        weights=weights,
    )
    return engine_of(found)


def fit_relative(
    predict: Callable[[Vector], Vector], measured: Vector, start: Vector, *, weights: Vector | None = None
) -> Vector:
    """Return the non-negative values that minimize about the mean of |log(predicted / measured)|.

    Levenberg-Marquardt on the roots of the values, so that none becomes negative, with rows reweighted by 1 / error: a
    few measurements that no model can meet do not pull the rest.

    Args:
        predict: from values, float64, shape [values], to predictions, float64, shape [measurements], all above 0.
        start: float64, shape [values], all above 0; the search is scaled by it.
        weights: of the measurements, float64, shape [measurements]; 1 if there are none.
    """
    roots, importance = np.ones(len(start)), np.sqrt(np.ones(len(measured)) if weights is None else weights)

    def residuals(at: Vector) -> Vector:
        return np.log(predict(start * at * at) / measured)

    error, damping = residuals(roots), 1e-2
    for _ in range(_ROUNDS):
        scale = importance / np.sqrt(np.maximum(np.abs(error), _NEARLY_EXACT))
        steps = np.maximum(np.abs(roots), 1e-3) * 1e-5
        slopes = np.stack([(residuals(roots + step) - error) / size for step, size in _axes(steps)], axis=1)
        slopes *= scale[:, None]
        normal, pull = slopes.T @ slopes, slopes.T @ (scale * error)
        cost = float(np.sum((scale * error) ** 2))
        for _ in range(12):
            lifted = normal + damping * np.diag(np.diag(normal) + 1e-9)
            moved = roots - np.linalg.solve(lifted, pull)
            moved_error = residuals(moved)
            if np.isfinite(moved_error).all() and np.sum((scale * moved_error) ** 2) < cost:
                break
            damping *= 4
        else:
            break
        gained = cost - float(np.sum((scale * moved_error) ** 2))
        roots, error, damping = moved, moved_error, damping / 4
        if gained < 1e-7 * cost:
            break
    return start * roots * roots


def _axes(steps: Vector) -> list[tuple[Vector, float]]:
    return [(np.where(np.arange(len(steps)) == i, size, 0.0), float(size)) for i, size in enumerate(steps)]


def calibrated_engine(path: Path, base: Engine) -> Engine:
    """Return `base` with the constants that the file at `path` determines fitted to it.

    Host time per step and per sequence and the factors on computing and reading always; the host time of prompt chunks
    if there is a prefill, and the factor on all-reduces if there are several GPUs.

    Raises:
        ConfigurationError: see `read_measurements`, or there are fewer measurements than constants.
    """
    rows = read_measurements(path)
    free = ["step_s", "seq_s", "compute_factor", "memory_factor"]
    if any(step.num_prefill_tokens for row in rows for _, step in row.parts):
        free.append("prefill_step_s")
    if any(row.parallelism.tensor > 1 for row in rows):
        free.append("all_reduce_factor")
    try:
        return fit_engine(rows, free, base=base)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from error
