"""When generated requests arrive: a rate that may change, and how bursty arrivals are around it.

A renewal process of mean gap 1 is stretched so that the rate over it becomes what is asked for (the time change of an
inhomogeneous process): gaps and rates combine freely, and each keeps its meaning.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from expediter.core.errors import ConfigurationError

_DRAWN_AT_ONCE: Final = 1024
_GAP_SHARE: Final = 0.02
"""Windows below this share of a curve's median are missing data: in ServeGen's rates all clients vanish in them."""

_JITTER_ARRIVALS: Final = 4
"""A jittered arrival stays between its neighbours at this distance."""

Segments = Iterator[tuple[float, float]]
"""(duration in s, arrivals per s), one after the other."""


def check_positive(**values: float) -> None:
    """Raise a ConfigurationError that names the first value which is not a finite number above 0."""
    for name, value in values.items():
        if not 0 < value < float("inf"):
            raise ConfigurationError(f"{name.replace('_', ' ')} must be a finite number above 0, not {value}")


def gamma_gaps(rng: np.random.Generator, cv: float) -> Iterator[float]:
    """Yield gaps of mean 1 that are gamma-distributed with this coefficient of variation; 1 gives a Poisson process.

    Raises:
        ConfigurationError: `cv` is not above 0.
    """
    check_positive(cv=cv)
    return _gamma_gaps(rng, cv)


def _gamma_gaps(rng: np.random.Generator, cv: float) -> Iterator[float]:
    while True:
        yield from rng.gamma(1 / cv**2, cv**2, _DRAWN_AT_ONCE).tolist()


def constant(rate_rps: float) -> Segments:
    """Yield one rate for ever.

    Raises:
        ConfigurationError: it is not above 0.
    """
    check_positive(rate=rate_rps)
    return iter([(float("inf"), rate_rps)])


def on_off(rng: np.random.Generator, rate_rps: float, on_s: float, off_s: float) -> Segments:
    """Yield bursts and silences of exponential length; over a long time the rate is `rate_rps`.

    Args:
        on_s, off_s: mean lengths.
    Raises:
        ConfigurationError: a number is not above 0.
    """
    check_positive(rate=rate_rps, on_s=on_s, off_s=off_s)
    in_burst_rps = rate_rps * (on_s + off_s) / on_s
    return ((rng.exponential(mean), rate) for mean, rate in itertools.cycle([(on_s, in_burst_rps), (off_s, 0.0)]))


def curve(rates_rps: Sequence[float], window_s: float, mean_rps: float | None = None) -> Segments:
    """Yield a curve's rates, window by window, over and over; missing windows are interpolated.

    Args:
        rates_rps: NaN, or less than 2 % of the median, is missing.
        mean_rps: scale the curve to this mean; None leaves it.
    Raises:
        ConfigurationError: a number is not above 0, or all windows are missing.
    """
    check_positive(window_s=window_s)
    rates = np.array(rates_rps, np.float64)
    there = np.isfinite(rates)
    there[there] = rates[there] > 0
    if not there.any():
        raise ConfigurationError("the rate curve has no rate above 0")
    there[there] = rates[there] >= _GAP_SHARE * np.median(rates[there])
    places = np.arange(len(rates))
    rates = np.interp(places, places[there], rates[there])
    if mean_rps is not None:
        check_positive(rate=mean_rps)
        rates *= mean_rps / rates.mean()
    return ((window_s, rate) for rate in itertools.cycle(rates.tolist()))


def arrival_times(gaps: Iterator[float], segments: Segments) -> Iterator[float]:
    """Yield times from 0 s on: gaps of mean 1, stretched to the segments' rates."""
    now_s = 0.0
    left_s, rate = next(segments)
    for gap in gaps:
        wanted = gap
        while wanted > left_s * rate:
            wanted -= left_s * rate
            now_s += left_s
            left_s, rate = next(segments)
        step_s = wanted / rate if wanted else 0.0
        now_s += step_s
        left_s -= step_s
        yield now_s


def jittered(arrival_s: npt.NDArray[np.float64], rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Return another draw of the same traffic: its rate over time stays, the gaps between neighbours are new.

    Every arrival moves by up to half of the time that the eight around it take, either way, so that what is longer
    than a few requests (bursts, the time of day) is kept. The first arrival and the order of requests stay.

    Args:
        arrival_s: ascending, float64, shape [n].
    Returns:
        Ascending, float64, shape [n].
    """
    rows = np.arange(len(arrival_s))
    before, after = np.maximum(rows - _JITTER_ARRIVALS, 0), np.minimum(rows + _JITTER_ARRIVALS, len(rows) - 1)
    reach_s = (arrival_s[after] - arrival_s[before]) / 2
    moved: npt.NDArray[np.float64] = np.sort(arrival_s + rng.uniform(-1, 1, len(rows)) * reach_s)
    moved -= max(moved[0] - arrival_s[0], 0.0)
    moved[:] = np.maximum(moved, arrival_s[0])
    return moved
