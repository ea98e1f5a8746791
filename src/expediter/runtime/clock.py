"""The machine's monotonic clock."""

from __future__ import annotations

import time


class MonotonicClock:
    """Seconds since boot; every process of one machine reads the same origin, so times cross sockets unchanged."""

    def now(self) -> float:
        return time.monotonic()
