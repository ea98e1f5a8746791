"""Sizes and prices on the command line."""

from __future__ import annotations

import math


def gibibytes(text: str) -> int:
    """Return a number of GiB in bytes.

    Raises:
        ValueError: it is no finite number of at least 0; argparse turns that into its message.
    """
    size = float(text)
    if not (math.isfinite(size) and size >= 0):
        raise ValueError(text)
    return int(size * (1 << 30))


def price(text: str) -> tuple[str, float]:
    """Return the GPU and the dollars per hour of `GPU=USD`.

    Raises:
        ValueError: it is not of that form, or no finite number of at least 0.
    """
    gpu, _, amount = text.partition("=")
    dollars = float(amount)
    if not gpu or not (math.isfinite(dollars) and dollars >= 0):
        raise ValueError(text)
    return gpu, dollars
