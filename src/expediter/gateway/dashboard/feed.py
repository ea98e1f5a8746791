"""What the live page shows, as JSON. All of it is worked out when somebody looks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from expediter.core.slo import SloClass
from expediter.gateway.dashboard.slow import SlowReasons
from expediter.gateway.siblings import Siblings
from expediter.telemetry.exchanges import ExchangeRecord
from expediter.telemetry.gateway_metrics import AtGateway
from expediter.telemetry.history import INTERVAL_S, NUM_INTERVALS, Interval, TenantCounts, merged, percentiles, wait_s
from expediter.telemetry.shown_backend import ShownBackend

_SHARES: Final = (0.5, 0.99)
_PAUSE_EVERY: Final = 20
"""Intervals worked out before requests get their turn again."""


class SlowRequest(msgspec.Struct, frozen=True):
    """One of the slowest requests of an interval; `wait_s` until the client had something to read."""

    id: str
    ended_at: float
    tenant: str
    model: str
    backend: str
    outcome: str
    met: bool | None
    wait_s: float
    e2e_s: float
    output_tokens: int
    why: str


class Point(msgspec.Struct, frozen=True):
    """One interval: p50 and p99 in seconds; requests by tenant.

    Attributes:
        at: when it began, in seconds since 1970.
        hit_rate: cached share of the prompt tokens of requests whose backend said so; None if none did.
    """

    index: int
    at: float
    ttft_s: list[float | None]
    tpot_s: list[float | None]
    hit_rate: float | None
    tenants: dict[str, TenantCounts]
    slow: list[SlowRequest]


class Targets(msgspec.Struct, frozen=True):
    """Of an SLO class."""

    name: str
    ttft_s: float | None
    tpot_s: float | None


class Feed(msgspec.Struct, frozen=True):
    """Everything; `points` from the interval on that was asked for. The last one may still grow."""

    now: float
    interval_s: float
    num_intervals: int
    num_processes: int
    num_answered: int
    in_flight: int
    queue_requests: int
    queue_tokens: int
    models: list[str]
    targets: list[Targets]
    backends: list[ShownBackend]
    points: list[Point]


class Feeder:
    """Makes feeds.

    Args:
        siblings: who knows the newest intervals.
        at_gateway: what is at the gateway now.
        backends: those to be shown, an own pool as its replicas.
        models: names that clients may use.
        slo_classes: whose targets are drawn, as they are now.
    """

    def __init__(
        self,
        siblings: Siblings,
        at_gateway: Callable[[], AtGateway],
        backends: Callable[[], Sequence[ShownBackend]],
        models: Callable[[], Sequence[str]],
        slo_classes: Callable[[], Mapping[str, SloClass]],
        reasons: SlowReasons,
    ) -> None:
        self._siblings = siblings
        self._at_gateway = at_gateway
        self._backends = backends
        self._models = models
        self._slo_classes = slo_classes
        self._reasons = reasons

    async def feed(self, since: int) -> Feed:
        """Return the state of this moment, and the intervals from `since` on."""
        now_s, now = time.monotonic(), time.time()
        since = max(since, int(now_s // INTERVAL_S) - NUM_INTERVALS + 1)
        told = await self._siblings.intervals(since)
        points = []
        for number, interval in enumerate(merged(told), 1):
            points.append(await self._point(interval, now - now_s))
            if number % _PAUSE_EVERY == 0:
                await asyncio.sleep(0)
        here = self._at_gateway()
        return Feed(
            now=now,
            interval_s=INTERVAL_S,
            num_intervals=NUM_INTERVALS,
            num_processes=self._siblings.num_processes,
            num_answered=len(told),
            in_flight=here.num_in_flight,
            queue_requests=here.queue_requests,
            queue_tokens=here.queue_tokens,
            models=list(self._models()),
            targets=[
                Targets(name, of.ttft_s, of.tpot_s)
                for name, of in self._slo_classes().items()
                if of.ttft_s or of.tpot_s
            ],
            backends=list(self._backends()),
            points=points,
        )

    async def _point(self, interval: Interval, epoch_s: float) -> Point:
        told = interval.num_told_tokens
        return Point(
            index=interval.index,
            at=interval.index * INTERVAL_S + epoch_s,
            ttft_s=percentiles(interval.ttft, _SHARES),
            tpot_s=percentiles(interval.tpot, _SHARES),
            hit_rate=interval.num_cached_tokens / told if told else None,
            tenants=interval.tenants,
            slow=[await self._slow(record, epoch_s) for record in interval.slow],
        )

    async def _slow(self, record: ExchangeRecord, epoch_s: float) -> SlowRequest:
        return SlowRequest(
            id=record.request_id,
            ended_at=record.ended_s + epoch_s,
            tenant=record.tenant,
            model=record.model,
            backend=record.backend,
            outcome=record.outcome.value,
            met=record.met_slo,
            wait_s=wait_s(record),
            e2e_s=record.e2e_s,
            output_tokens=record.num_output_tokens,
            why=await self._reasons.of(record),
        )
