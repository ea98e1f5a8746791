"""The largest request rate that a system sustains, by bisection."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt

from expediter.core.errors import ConfigurationError

_MAX_DOUBLINGS = 8


def capacity(meets: Callable[[float], bool], start: float, *, resolution: float = 0.03) -> float:
    """Return the largest rate at which `meets` holds, to within `resolution` of itself; 0 if it holds nowhere.

    The rate is doubled or halved from `start` until the limit lies in between, and then bisected by ratio. What holds at
    one rate should hold at lower ones; around the limit random arrivals may break that a little, so the answer is a rate
    at which it does hold, and above which it was seen not to.

    Args:
        meets: whether the system keeps its objective at a rate; asked about ten times.
        start: a guess of the limit, above 0; the search goes from a 256th of it to 256 times it.
        resolution: relative width at which the search ends.
    Raises:
        ConfigurationError: a number is not above 0, or the objective holds at 256 times `start` still.
    """
    if not (start > 0 and resolution > 0):
        raise ConfigurationError(f"start ({start}) and resolution ({resolution}) of a capacity search must be above 0")
    low, high = start, start
    if meets(start):
        for _ in range(_MAX_DOUBLINGS):
            high *= 2
            if not meets(high):
                break
            low = high
        else:
            raise ConfigurationError(f"the objective holds at {high:g} requests/s still: it limits nothing")
    else:
        for _ in range(_MAX_DOUBLINGS):
            low /= 2
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
