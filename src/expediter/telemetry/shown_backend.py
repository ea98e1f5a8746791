"""What is shown of a backend, or of one replica of an own pool, at a moment: in metrics and on the live page."""

from __future__ import annotations

from typing import Final

import msgspec

STATES: Final = ("up", "ejected", "probing", "draining", "unknown", "starting", "stalled", "down")
"""Of foreign backends, as their health is judged, and of own replicas, whose processes are watched."""


class ShownBackend(msgspec.Struct, frozen=True, kw_only=True):
    """One backend; what it has not told is None.

    Attributes:
        models: that it serves; an own replica serves the server's.
        state: one of `STATES`.
        is_own: whether it is this server's own.
        num_in_flight: requests sent to it that have not ended.
        max_requests: that it may have at a time.
        num_running, num_waiting: requests, by its own metrics.
        kv_usage: used share of its KV blocks, from 0 to 1.
        num_pending_tokens: of prompts sent to it, whose KV is to be computed.
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
    num_pending_tokens: int | None = None
    metrics_age_s: float | None = None
