"""What is known of a backend at a moment; metrics and the live page are made from it."""

from __future__ import annotations

import msgspec


class BackendStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One backend; what it has not told is None.

    Attributes:
        state: "up", "ejected", "probing", "draining" or "paused".
        is_own: whether it is this server's own pool.
        num_in_flight: requests sent to it that have not ended, of all processes of the gateway.
        max_requests: that it may have at a time.
        num_running, num_waiting: requests, by its own metrics.
        kv_usage: used share of its KV blocks, from 0 to 1.
        hit_rate: prompt tokens that it found in its prefix cache, as a share, since it started.
        metrics_age_s: since its own metrics were read.
    """

    name: str
    models: tuple[str, ...] = ()
    state: str = "up"
    is_own: bool = False
    num_in_flight: int = 0
    max_requests: int | None = None
    num_running: int | None = None
    num_waiting: int | None = None
    kv_usage: float | None = None
    hit_rate: float | None = None
    metrics_age_s: float | None = None
