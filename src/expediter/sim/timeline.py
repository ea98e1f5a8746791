"""How a simulation went over time, in a fixed number of buckets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from expediter.sim.metrics import RequestRecord
from expediter.sim.observer import ReplicaLoad

MAX_BUCKETS: Final = 128
_FINEST_BUCKET_S: Final = 1 / 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Means over buckets of equal length from the first arrival on; each series has one value per bucket.

    Requests are counted exactly. KV is known exactly when a step or a jump of equal steps begins and ends; between the
    two a straight line is drawn, which in the middle of a jump is off by less than one block per running request.

    Attributes:
        start_s: virtual time at which the first bucket begins.
        bucket_s: length of a bucket; the last one ends with the simulation.
        arrived_rps: arrivals per second.
        goodput_rps: requests that ended within their targets, per second, when they ended.
        num_waiting, num_running: requests, of all replicas.
        kv_used_share: KV blocks that running requests own, as a share of all replicas' blocks.
        kv_cached_share: blocks that only the prefix cache holds, as a share of the same.
        kv_used_share_highest: `kv_used_share` of the replica that has the highest in the bucket.
        prefix_hit_rate: of the prompt tokens first admitted in the bucket; None if there are none.
    """

    start_s: float
    bucket_s: float
    arrived_rps: tuple[float, ...]
    goodput_rps: tuple[float, ...]
    num_waiting: tuple[float, ...]
    num_running: tuple[float, ...]
    kv_used_share: tuple[float, ...]
    kv_cached_share: tuple[float, ...]
    kv_used_share_highest: tuple[float, ...]
    prefix_hit_rate: tuple[float | None, ...]


class TimelineRecorder:
    """`Probe` that sums up a run in at most `MAX_BUCKETS` buckets.

    Buckets begin short; when a run outgrows them, neighbours are added up in pairs. Memory therefore depends on the
    number of replicas alone.

    Args:
        num_blocks: KV blocks by replica.
    """

    def __init__(self, num_blocks: Mapping[int, int]) -> None:
        self._num_blocks = dict(num_blocks)
        self._bucket_s = _FINEST_BUCKET_S
        self._start_s: float | None = None
        self._last: dict[int, tuple[float, ReplicaLoad]] = {}
        # Each row is a sum over time of what `ReplicaLoad` counts, in its order, of all replicas together.
        self._sums = [[0.0] * MAX_BUCKETS for _ in ReplicaLoad._fields]
        self._used_by_replica = {replica_id: [0.0] * MAX_BUCKETS for replica_id in num_blocks}
        self._arrived = [0.0] * MAX_BUCKETS
        self._met = [0.0] * MAX_BUCKETS
        self._cached_tokens = [0.0] * MAX_BUCKETS
        self._prompt_tokens = [0.0] * MAX_BUCKETS

    # -- what is told -------------------------------------------------------------------------------------------------

    def ended(self, record: RequestRecord) -> None:
        """Count a request that has ended; `MetricsCollector` tells."""
        self._arrived[self._bucket(record.arrival_s)] += 1
        if record.first_scheduled_s is not None:
            bucket = self._bucket(record.first_scheduled_s)
            self._cached_tokens[bucket] += record.num_cached_tokens
            self._prompt_tokens[bucket] += record.num_prompt_tokens
        if record.is_met and record.ended_s is not None:
            self._met[self._bucket(record.ended_s)] += 1

    def sample(self, replica_id: int, now_s: float, load: ReplicaLoad) -> None:
        """Take a replica's load at `now_s`, no earlier than the last one's."""
        self._bucket(now_s)  # the first time that is told of is where it begins
        start_s, begin = self._last.get(replica_id, (now_s, load))
        self._last[replica_id] = (now_s, load)
        if now_s > start_s:
            self._integrate(replica_id, (start_s, begin), (now_s, load))

    # -- how it is kept -----------------------------------------------------------------------------------------------

    def _bucket(self, time_s: float) -> int:
        if self._start_s is None:
            self._start_s = time_s
        offset_s = max(time_s - self._start_s, 0.0)
        while offset_s >= MAX_BUCKETS * self._bucket_s:
            self._coarsen()
        return int(offset_s / self._bucket_s)

    def _coarsen(self) -> None:
        self._bucket_s *= 2
        counts = (self._arrived, self._met, self._cached_tokens, self._prompt_tokens)
        for row in (*self._sums, *self._used_by_replica.values(), *counts):
            half = [row[i] + row[i + 1] for i in range(0, MAX_BUCKETS, 2)]
            row[:] = half + [0.0] * (MAX_BUCKETS - len(half))

    def _integrate(self, replica_id: int, begin: tuple[float, ReplicaLoad], end: tuple[float, ReplicaLoad]) -> None:
        """Add what a replica held from one moment to another: requests come and go at samples, blocks between them."""
        (start_s, before), (end_s, after) = begin, end
        last = self._bucket(end_s)  # may coarsen, so ahead of the first
        first = self._bucket(start_s)
        used_growth = (after.num_used_blocks - before.num_used_blocks) / (end_s - start_s)
        cached_growth = (after.num_cached_blocks - before.num_cached_blocks) / (end_s - start_s)
        waiting, running, used, cached = self._sums
        own = self._used_by_replica[replica_id]
        spans: Iterable[tuple[float, float]] = ((start_s, end_s),)
        if first != last:
            assert self._start_s is not None
            edges = [self._start_s + bucket * self._bucket_s for bucket in range(first + 1, last + 1)]
            spans = pairwise([start_s, *edges, end_s])
        for bucket, (from_s, to_s) in enumerate(spans, first):
            length_s, middle_s = to_s - from_s, (from_s + to_s) / 2 - start_s
            waiting[bucket] += before.num_waiting * length_s
            running[bucket] += before.num_running * length_s
            cached[bucket] += (before.num_cached_blocks + cached_growth * middle_s) * length_s
            held = (before.num_used_blocks + used_growth * middle_s) * length_s
            used[bucket] += held
            own[bucket] += held

    # -- what came out ------------------------------------------------------------------------------------------------

    def finish(self, end_s: float) -> Timeline | None:
        """Return the timeline of a run that ended at `end_s`; None if nothing arrived."""
        if self._start_s is None:
            return None
        for replica_id, (_, load) in list(self._last.items()):
            self.sample(replica_id, end_s, load)
        last = self._bucket(end_s)
        lengths_s = [self._bucket_s] * last + [end_s - self._start_s - last * self._bucket_s]
        if not lengths_s[-1] > 0:  # what happens at the very end belongs to the bucket before it
            lengths_s.pop()
            counts = (self._arrived, self._met, self._cached_tokens, self._prompt_tokens)
            for row in counts if lengths_s else ():
                row[last - 1] += row[last]

        def means(row: Sequence[float], scale: float = 1.0) -> tuple[float, ...]:
            return tuple(value / (length_s * scale) for value, length_s in zip(row, lengths_s, strict=False))

        waiting, running, used, cached = self._sums
        num_blocks = sum(self._num_blocks.values())
        shares = [means(row, self._num_blocks[replica_id]) for replica_id, row in self._used_by_replica.items()]
        hits = zip(self._cached_tokens, self._prompt_tokens, strict=True)
        return Timeline(
            start_s=self._start_s,
            bucket_s=self._bucket_s,
            arrived_rps=means(self._arrived),
            goodput_rps=means(self._met),
            num_waiting=means(waiting),
            num_running=means(running),
            kv_used_share=means(used, num_blocks),
            kv_cached_share=means(cached, num_blocks),
            kv_used_share_highest=tuple(max(column) for column in zip(*shares, strict=True)),
            prefix_hit_rate=tuple(c / p if p else None for (c, p), _ in zip(hits, lengths_s, strict=False)),
        )
