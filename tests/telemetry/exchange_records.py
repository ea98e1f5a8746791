"""Records of requests for tests."""

from __future__ import annotations

from typing import Any

from expediter.control.routing.base import Candidate, Placement
from expediter.core.slo import Slo
from expediter.telemetry.exchanges import Attempt, ExchangeRecord, Outcome


def routed(*costs: float, num_cached_tokens: int = 0, is_held_back: bool = False) -> Placement:
    """Return the choice of replica 0 among those with these costs."""
    candidates = tuple(Candidate(number, cost, 0) for number, cost in enumerate(costs))
    return Placement(
        replica_id=0,
        because="it costs least",
        is_held_back=is_held_back,
        candidates=candidates,
        num_cached_tokens=num_cached_tokens,
    )


def answered(**fields: Any) -> ExchangeRecord:
    """Return a stream that waited 0.5 s, began 1 s after its arrival and ended after 2 s with 11 tokens."""
    defaults: dict[str, Any] = {
        "request_id": "req-1",
        "tenant": "alice",
        "model": "m",
        "path": "/v1/chat/completions",
        "is_stream": True,
        "slo_class": "fast",
        "slo": Slo(ttft_s=1.5, tpot_s=0.2),
        "arrived_s": 100.0,
        "queued_s": 100.0,
        "dispatched_s": 100.5,
        "first_byte_s": 101.0,
        "ended_s": 102.0,
        "attempts": (Attempt(backend="b0", dispatched_s=100.5, ended_s=102.0),),
        "route": routed(0.25, 0.5, num_cached_tokens=64),
        "route_backends": ("b0", "b1"),
        "status": 200,
        "outcome": Outcome.OK,
        "num_prompt_tokens": 100,
        "num_output_tokens": 11,
        "num_cached_tokens": 60,
        "num_bytes_in": 400,
        "num_bytes_out": 1000,
        "predicted_ttft_s": 0.25,
    }
    return ExchangeRecord(**{**defaults, **fields})
