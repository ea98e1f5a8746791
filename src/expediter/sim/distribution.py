"""Means and percentiles of any number of values in bounded memory."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

_PERCENTS: Final = (50.0, 90.0, 99.0)
MAX_EXACT: Final = 100_000
"""Values of which percentiles are exact."""
RELATIVE_ERROR: Final = 0.001
"""Of the percentiles of more values than that, at most."""
_LOG_GAMMA: Final = math.log((1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR))
_SMALLEST: Final = 1e-9
"""What is smaller counts as 0, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Mean and percentiles (linear interpolation) of a sample; all None if it is empty."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Distribution:
        """Return the distribution of the values that are there."""
        sample = Sample()
        for value in values:
            if value is not None:
                sample.add(value)
        return sample.distribution()


class Sample:
    """Values that are at least 0, such as durations; O(1) per value.

    Percentiles of up to `MAX_EXACT` values are exact. Of more, they are off by at most the share `RELATIVE_ERROR`, and
    memory grows no further; the mean is exact always.

    Source: buckets whose bounds grow by a constant factor, as in DDSketch (Masson, Rim and Lee, VLDB 2019).
    """

    __slots__ = ("_buckets", "_num_folded", "_sum", "_values")

    def __init__(self) -> None:
        self._values = array("d")
        self._buckets: dict[int | None, int] = {}
        self._num_folded = 0
        self._sum = 0.0

    def add(self, value: float) -> None:
        """Take a value in."""
        self._values.append(value)
        if len(self._values) > MAX_EXACT:
            self._fold()

    def __len__(self) -> int:
        return len(self._values) + self._num_folded

    def distribution(self) -> Distribution:
        """Return mean and percentiles of what was taken in so far."""
        if not len(self):
            return Distribution(mean=None, p50=None, p90=None, p99=None)
        p50, p90, p99 = self.percentiles(_PERCENTS)
        return Distribution(mean=(self._sum + math.fsum(self._values)) / len(self), p50=p50, p90=p90, p99=p99)

    def percentiles(self, percents: Sequence[float]) -> list[float]:
        """Return the values at these percents of what was taken in so far, which must not be nothing."""
        if not self._num_folded:
            values: list[float] = np.percentile(np.frombuffer(self._values), percents).tolist()
            return values
        if self._values:
            self._fold()
        return self._folded_percentiles(percents)

    def _fold(self) -> None:
        """Count the values by bucket: number i holds those in (gamma^(i - 1), gamma^i], None what counts as 0."""
        self._sum += math.fsum(self._values)
        self._num_folded += len(self._values)
        values = np.frombuffer(self._values)
        above = values[values >= _SMALLEST]
        numbers, counts = np.unique(np.ceil(np.log(above) / _LOG_GAMMA).astype(np.int64), return_counts=True)
        for number, count in zip((None, *numbers.tolist()), (len(values) - len(above), *counts.tolist()), strict=True):
            self._buckets[number] = self._buckets.get(number, 0) + count
        self._values = array("d")

    def _folded_percentiles(self, percents: Sequence[float]) -> list[float]:
        numbers = sorted(number for number in self._buckets if number is not None)
        # From the middle of a bucket, both its bounds are the same share away.
        middles = np.array([0.0, *(2 * math.exp(i * _LOG_GAMMA) / (1 + math.exp(_LOG_GAMMA)) for i in numbers)])
        ends = np.array([self._buckets.get(None, 0), *(self._buckets[number] for number in numbers)]).cumsum()

        def value_at(ranks: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
            return middles[np.searchsorted(ends, ranks, side="right")]

        ranks = np.array(percents) / 100 * (self._num_folded - 1)
        lower = np.floor(ranks)
        below, above = value_at(lower), value_at(np.ceil(ranks))
        values: list[float] = (below + (above - below) * (ranks - lower)).tolist()
        return values
