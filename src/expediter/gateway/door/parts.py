"""What all exchanges of one door share."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
from starlette.types import ASGIApp

from expediter.control.limits import Exceeded, Reservation
from expediter.control.patience import Patience
from expediter.control.retry import RetryBudget, RetryConfig
from expediter.gateway.backends.backend import Backend
from expediter.gateway.backends.registry import Backends
from expediter.gateway.door.identity import RequestIds
from expediter.gateway.door.waiting_room import WaitingRoom
from expediter.gateway.http.upstream import Address, UpstreamPool
from expediter.gateway.salts import CacheSalts
from expediter.telemetry.trace_context import Tracer

CONNECT_TIMEOUT_S: Final = 2.0
"""For a backend to accept a connection; its kernel does that even while it is busy."""


class Pools:
    """The connections to each backend."""

    def __init__(self) -> None:
        self._pools: dict[int, UpstreamPool] = {}
        self._tls: ssl.SSLContext | None = None

    def of(self, backend: Backend) -> UpstreamPool:
        """Return the pool of a backend."""
        pool = self._pools.get(backend.replica_id)
        if pool is None:
            pool = self._pools[backend.replica_id] = UpstreamPool(self._address(backend))
        return pool

    def close(self, backend_id: int) -> None:
        """Let go of a backend; what is in flight goes on."""
        pool = self._pools.pop(backend_id, None)
        if pool is not None:
            pool.close()

    def close_all(self) -> None:
        """Let go of all."""
        for backend_id in tuple(self._pools):
            self.close(backend_id)

    def _address(self, backend: Backend) -> Address:
        address = backend.address
        if address.uds is not None:
            return Address(path=address.uds, connect_timeout_s=CONNECT_TIMEOUT_S)
        if address.is_tls and self._tls is None:
            self._tls = ssl.create_default_context()
        return Address(
            host=address.host,
            port=address.port,
            ssl=self._tls if address.is_tls else None,
            connect_timeout_s=CONNECT_TIMEOUT_S,
        )


class Reserving(Protocol):
    """The limits of tenants."""

    def reserve(self, tenant: str, num_tokens: int, now_s: float) -> Reservation | Exceeded:
        """Count a request in that may take so many tokens, or say which limit keeps it out."""
        ...

    def refusal(self, tenant: str, now_s: float) -> Exceeded | None:
        """Return which limit would keep any request out; nothing is counted."""
        ...


@dataclass(slots=True, eq=False, kw_only=True)
class DoorParts:
    """The parts.

    Args:
        own_app: the API of our own replicas, None if there are none.
        tracer: chooses the ids of spans; None if no traces are kept.
    """

    backends: Backends
    limits: Reserving
    room: WaitingRoom
    patience: Patience
    retry: RetryConfig
    budget: RetryBudget
    rng: np.random.Generator
    salts: CacheSalts
    own_app: ASGIApp | None = None
    tracer: Tracer | None = None
    pools: Pools = field(default_factory=Pools)
    ids: RequestIds = field(default_factory=RequestIds)
