"""Sizes on the command line."""

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
