"""The largest request rate that a system sustains, by bisection."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

from expediter.core.errors import ConfigurationError

_STEP = 1.6
"""Above the limit a simulation takes longest, so the search steps carefully."""
_MAX_STEPS = 12


def capacity(meets: Callable[[float], bool], start: float, *, resolution: float = 0.03) -> float:
    """Return the largest rate at which `meets` holds, to within `resolution` of itself; 0 if it holds nowhere.

    From `start` the rate goes up or down by a constant factor until the limit lies in between, and is then bisected by
    ratio. What holds at one rate should hold at lower ones; around the limit random arrivals may break that a little,
    so the answer is a rate at which it does hold, and above which it was seen not to.

    Args:
        meets: whether the system keeps its objective at a rate; asked about eight times.
        start: a guess of the limit, above 0; the search covers more than two hundred times it either way.
        resolution: relative width at which the search ends.
    Raises:
        ConfigurationError: a number is not above 0, or the objective holds however high the rate.
    """
    if not (start > 0 and resolution > 0):
        raise ConfigurationError(f"start ({start}) and resolution ({resolution}) of a capacity search must be above 0")
    low, high = start, start
    if meets(start):
        for _ in range(_MAX_STEPS):
            high *= _STEP
            if not meets(high):
                break
            low = high
        else:
            raise ConfigurationError(f"the objective holds at {high:g} requests/s still: it limits nothing")
    else:
        for _ in range(_MAX_STEPS):
            low /= _STEP
            if meets(low):
                break
            high = low
        else:
            return 0.0
    while high / low > 1 + resolution:
        middle = sqrt(low * high)
        if meets(middle):
            low = middle
        else:
            high = middle
    return low
