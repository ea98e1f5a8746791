"""What a trace asks for, from one pass over its rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from expediter.sim.trace import SeenPrefixes
from expediter.sim.trace_rows import TraceRow

MINUTE_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Lengths in tokens; percentiles are exact, interpolated as numpy does by default."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceDescription:
    """A trace in figures.

    Attributes:
        num_sequences: of all requests together; a request may ask for several.
        start_s, span_s: first arrival, and the time from it to the last.
        mean_rate_rps: arrivals per second of the span; None if all arrive at once.
        peak_minute_rps: arrivals per second of the busiest minute, in minutes from the first arrival; None if the trace
            is shorter than a minute.
        gap_cv: coefficient of variation of the time between arrivals: 1 for a Poisson process, more for bursts; None
            for fewer than three requests or if all arrive at once.
        prefix_reuse: share of the prompt tokens that an unlimited cache, fed in order of arrival, has already; outputs
            are not counted as cached. None if the trace has no prefix ids.
        slo_classes, tenants: requests of each; empty if no request has one, "" is those without.
        num_defects: rows that were left out.
    """

    name: str
    num_requests: int
    num_sequences: int
    start_s: float
    span_s: float
    mean_rate_rps: float | None
    peak_minute_rps: float | None
    gap_cv: float | None
    input_tokens: Lengths
    output_tokens: Lengths
    prefix_reuse: float | None
    prefix_block_tokens: int | None
    slo_classes: dict[str, int]
    tenants: dict[str, int]
    num_defects: int


def describe(name: str, rows: Iterable[TraceRow]) -> TraceDescription:
    """Describe rows in order of arrival; holds a number per distinct length, prefix id, class and tenant.

    Args:
        name: for the description; `num_defects` is 0, for the reader of the rows to replace.
        rows: at least one.
    """
    arrivals = _Arrivals()
    inputs: Counter[int] = Counter()
    outputs: Counter[int] = Counter()
    classes: Counter[str] = Counter()
    tenants: Counter[str] = Counter()
    seen = SeenPrefixes()
    block_tokens: int | None = None
    num_reused = num_sequences = 0
    for row in rows:
        arrivals.add(row.arrival_s)
        inputs[row.input_tokens] += 1
        outputs[row.output_tokens] += 1
        classes[row.slo_class] += 1
        tenants[row.tenant] += 1
        num_sequences += row.n
        if row.prefix_ids:
            block_tokens = row.prefix_block_tokens
            num_reused += seen.reused_tokens(row.prefix_ids, block_tokens, row.input_tokens)
    num_tokens = sum(length * count for length, count in inputs.items())
    return TraceDescription(
        name=name,
        num_requests=arrivals.count,
        num_sequences=num_sequences,
        start_s=arrivals.start_s,
        span_s=arrivals.span_s,
        mean_rate_rps=arrivals.count / arrivals.span_s if arrivals.span_s > 0 else None,
        peak_minute_rps=arrivals.peak_minute / MINUTE_S if arrivals.span_s >= MINUTE_S else None,
        gap_cv=arrivals.gap_cv(),
        input_tokens=_lengths(inputs),
        output_tokens=_lengths(outputs),
        prefix_reuse=None if block_tokens is None else num_reused / num_tokens,
        prefix_block_tokens=block_tokens,
        slo_classes=_named(classes),
        tenants=_named(tenants),
        num_defects=0,
    )


class _Arrivals:
    """Counts of arrivals, with mean and variance of their gaps after Welford (Technometrics 4(3), 1962)."""

    def __init__(self) -> None:
        self.count = 0
        self.start_s = 0.0
        self.span_s = 0.0
        self.peak_minute = 0
        self._minute = -1
        self._in_minute = 0
        self._gap_mean = 0.0
        self._gap_squares = 0.0

    def add(self, arrival_s: float) -> None:
        self.count += 1
        if self.count == 1:
            self.start_s = arrival_s
        else:
            num_gaps = self.count - 1
            gap = arrival_s - self.start_s - self.span_s
            off = gap - self._gap_mean
            self._gap_mean += off / num_gaps
            self._gap_squares += off * (gap - self._gap_mean)
            self.span_s = arrival_s - self.start_s
        minute = int(self.span_s // MINUTE_S)
        self._in_minute = self._in_minute + 1 if minute == self._minute else 1
        self._minute = minute
        self.peak_minute = max(self.peak_minute, self._in_minute)

    def gap_cv(self) -> float | None:
        if self.count < 3 or self.span_s == 0:
            return None
        return math.sqrt(self._gap_squares / (self.count - 1)) / self._gap_mean


def _lengths(counts: Counter[int]) -> Lengths:
    values = np.array(sorted(counts), np.int64)
    ends = np.cumsum([counts[value] for value in values.tolist()])
    num = int(ends[-1])

    def percentile(share: float) -> float:
        place = share * (num - 1)
        low = math.floor(place)
        first, second = (
            int(values[np.searchsorted(ends, min(index, num - 1), side="right")]) for index in (low, low + 1)
        )
        return first + (second - first) * (place - low)

    mean = sum(value * count for value, count in counts.items()) / num
    return Lengths(mean=mean, p50=percentile(0.5), p90=percentile(0.9), p99=percentile(0.99), max=int(values[-1]))


def _named(counts: Counter[str]) -> dict[str, int]:
    return dict(sorted(counts.items())) if set(counts) != {""} else {}
