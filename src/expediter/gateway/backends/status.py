"""What there is to know of a backend at one moment, for the admin API, the live page and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from expediter.control.health import FleetHealth
from expediter.control.speed import Speed
from expediter.gateway.backends.backend import Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendStatus:
    """What there is to know of one backend at one moment.

    Attributes:
        state: "up", "ejected", "probing", "draining", or "unknown" as long as it serves no model that we know of.
        reported_age_s: of its own figures, None if there are none that count; the next three are None with it.
        speed: as learned, None before that.
        num_cache_tokens: that its KV cache keeps, as its events say; None if they do not.
        num_known_tokens: prompt tokens, as the door counts them, that it is taken to hold.
        outcomes: dispatches that have ended, by how.
    """

    replica_id: int
    name: str
    url: str
    kind: str
    state: str
    models: tuple[str, ...]
    max_model_len: int | None
    max_requests: int | None
    num_in_flight: int
    num_pending_tokens: int
    reported_age_s: float | None
    num_running: int | None
    num_waiting: int | None
    kv_use: float | None
    speed: Speed | None
    num_cache_tokens: int | None
    num_known_tokens: int
    num_dispatched: int
    outcomes: Mapping[str, int]

    @classmethod
    def of(cls, backend: Backend, health: FleetHealth, num_known_tokens: int, now_s: float) -> BackendStatus:
        """Return a backend's status.

        Args:
            num_known_tokens: as the attribute.
        """
        reported, speed = backend.reported, backend.profile.speed
        return cls(
            replica_id=backend.replica_id,
            name=backend.name,
            url=backend.config.url,
            kind=backend.kind.value,
            state=_state(backend, health),
            models=backend.models,
            max_model_len=backend.max_model_len,
            max_requests=backend.max_requests,
            num_in_flight=backend.num_in_flight,
            num_pending_tokens=backend.num_pending_tokens,
            reported_age_s=None if reported is None else now_s - reported.at_s,
            num_running=None if reported is None else reported.num_running,
            num_waiting=None if reported is None else reported.num_waiting,
            kv_use=None if reported is None else reported.kv_use,
            speed=speed if speed.is_known else None,
            num_cache_tokens=backend.num_cache_tokens,
            num_known_tokens=num_known_tokens,
            num_dispatched=backend.num_dispatched,
            outcomes=dict(backend.outcomes),
        )


def _state(backend: Backend, health: FleetHealth) -> str:
    if backend.is_draining:
        return "draining"
    if not backend.models:
        return "unknown"
    if backend.is_ready is not None:
        return "up" if backend.is_ready() else "ejected"
    return "up" if health.serves(backend.replica_id) else health.state(backend.replica_id).value
