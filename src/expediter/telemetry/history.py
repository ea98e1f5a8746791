"""The last quarter of an hour of the gateway, in intervals of some seconds: what the live page draws.

An interval holds counts only, whose size does not grow with the traffic, and can be added to the same interval of
another process. Percentiles come from counts of logarithmic buckets, so they are within 2.5 % of the exact ones.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Iterable
from typing import Final

import msgspec

from expediter.telemetry.exchanges import ExchangeRecord, Outcome

INTERVAL_S: Final = 5.0
NUM_INTERVALS: Final = 180
_NUM_SLOW: Final = 4
"""Slowest requests kept of an interval."""
_MAX_TENANTS: Final = 50
_OTHER: Final = "other"
_GROWTH: Final = math.log(1.05)
_LEAST_S: Final = 1e-5

Buckets = dict[int, int]
"""How often a latency lay in each bucket; bucket `k` ends at 1.05 to the power of `k`, in seconds."""


class TenantCounts(msgspec.Struct):
    """Requests of a tenant: within their targets, not within them, refused for its limits, wrong, all that ended."""

    met: int = 0
    missed: int = 0
    limited: int = 0
    wrong: int = 0
    ended: int = 0
    output_tokens: int = 0


class Interval(msgspec.Struct):
    """What ended in `INTERVAL_S` seconds.

    Attributes:
        index: time of the system's monotonic clock, in intervals.
        ttft, tpot: of streams.
        num_told_tokens, num_cached_tokens: prompt tokens of requests whose backend said how many it had cached.
        slow: those that waited longest, the worst first; who has missed its targets is worse than who has not.
        slow_wait_s: who has met its targets and waited no longer is not among them.
    """

    index: int
    ttft: Buckets = {}
    tpot: Buckets = {}
    tenants: dict[str, TenantCounts] = {}
    num_told_tokens: int = 0
    num_cached_tokens: int = 0
    slow: list[ExchangeRecord] = []
    slow_wait_s: float = -1.0

    def add(self, record: ExchangeRecord) -> None:
        """Count a request that has ended."""
        tenant = self._tenant(record.tenant)
        tenant.ended += 1
        met, outcome = record.met_slo, record.outcome
        if met:
            tenant.met += 1
        elif met is False:
            tenant.missed += 1
        if outcome is not Outcome.OK:
            if outcome is Outcome.OVER_LIMIT:
                tenant.limited += 1
            elif outcome is Outcome.CLIENT_ERROR:
                tenant.wrong += 1
            elif met is False:
                self._keep_slow(record)
            return
        tenant.output_tokens += record.num_output_tokens
        if record.num_cached_tokens is not None:
            self.num_told_tokens += record.num_prompt_tokens
            self.num_cached_tokens += record.num_cached_tokens
        ttft_s = record.ttft_s if record.is_stream else None
        if ttft_s is not None:
            _count(self.ttft, ttft_s)
            tpot_s = record.tpot_s
            if tpot_s is not None:
                _count(self.tpot, tpot_s)
        # Hardly any request is among the slowest: most are told from them by one comparison.
        if met is False or (record.ended_s - record.arrived_s if ttft_s is None else ttft_s) > self.slow_wait_s:
            self._keep_slow(record)

    def merge(self, other: Interval) -> None:
        """Add what another process counted in the same interval."""
        for mine, theirs in ((self.ttft, other.ttft), (self.tpot, other.tpot)):
            for bucket, number in theirs.items():
                mine[bucket] = mine.get(bucket, 0) + number
        for name, counts in other.tenants.items():
            own = self._tenant(name)
            for field in TenantCounts.__struct_fields__:
                setattr(own, field, getattr(own, field) + getattr(counts, field))
        self.num_told_tokens += other.num_told_tokens
        self.num_cached_tokens += other.num_cached_tokens
        for record in other.slow:
            self._keep_slow(record)

    def _tenant(self, name: str) -> TenantCounts:
        counts = self.tenants.get(name)
        if counts is None:
            if len(self.tenants) >= _MAX_TENANTS:
                name = _OTHER
            counts = self.tenants.setdefault(name, TenantCounts())
        return counts

    def _keep_slow(self, record: ExchangeRecord) -> None:
        slow = self.slow
        if len(slow) == _NUM_SLOW and slowness(record) >= slowness(slow[-1]):
            return
        insort(slow, record, key=slowness)
        del slow[_NUM_SLOW:]
        if len(slow) == _NUM_SLOW:
            self.slow_wait_s = math.inf if slow[-1].met_slo is False else wait_s(slow[-1])


def slowness(record: ExchangeRecord) -> tuple[bool, float]:
    """Return a key that puts who missed its targets before who met them, and longer waits before shorter ones."""
    return record.met_slo is not False, -wait_s(record)


def wait_s(record: ExchangeRecord) -> float:
    """Return how long the client waited for something to read."""
    ttft_s = record.ttft_s
    return record.e2e_s if ttft_s is None else ttft_s


class History:
    """Hears of every request (`ExchangeSink`) and keeps the newest `NUM_INTERVALS` intervals in which some ended."""

    def __init__(self) -> None:
        self._intervals: deque[Interval] = deque(maxlen=NUM_INTERVALS)

    def record(self, record: ExchangeRecord) -> None:
        index = int(record.ended_s // INTERVAL_S)
        if not self._intervals or self._intervals[-1].index < index:
            self._intervals.append(Interval(index))
        # A record whose end lies a moment back counts where the newest ones do.
        self._intervals[-1].add(record)

    def since(self, index: int) -> list[Interval]:
        """Return the intervals from `index` on, in order; the last one may still grow."""
        return [interval for interval in self._intervals if interval.index >= index]


def merged(parts: Iterable[Iterable[Interval]]) -> list[Interval]:
    """Return the intervals of several processes as one list, in order."""
    total: dict[int, Interval] = {}
    for intervals in parts:
        for interval in intervals:
            total.setdefault(interval.index, Interval(interval.index)).merge(interval)
    return [total[index] for index in sorted(total)]


def percentiles(buckets: Buckets, shares: tuple[float, ...]) -> list[float | None]:
    """Return latencies in seconds that each share of the counted ones does not exceed; None if nothing was counted."""
    number = sum(buckets.values())
    if not number:
        return [None] * len(shares)
    found: list[float | None] = []
    for share in shares:
        rank, below = max(math.ceil(share * number), 1), 0
        for bucket in sorted(buckets):
            below += buckets[bucket]
            if below >= rank:
                found.append(math.exp((bucket - 0.5) * _GROWTH))
                break
    return found


def _count(buckets: Buckets, seconds: float) -> None:
    bucket = math.ceil(math.log(max(seconds, _LEAST_S)) / _GROWTH)
    buckets[bucket] = buckets.get(bucket, 0) + 1
