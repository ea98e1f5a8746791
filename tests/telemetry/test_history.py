"""The last quarter of an hour is kept in bounded room, and right whatever came when."""

from __future__ import annotations

import math
import random

import msgspec
import pytest
from exchange_records import answered
from hypothesis import given
from hypothesis import strategies as st

from expediter.core.slo import NO_SLO, Slo
from expediter.telemetry.exchanges import ExchangeRecord, Outcome
from expediter.telemetry.history import (
    INTERVAL_S,
    NUM_INTERVALS,
    History,
    Interval,
    merged,
    percentiles,
    slowness,
    wait_s,
)


def ended(at_s: float, wait: float, *, met: bool = True, tenant: str = "t") -> ExchangeRecord:
    fields = {"arrived_s": at_s - wait, "first_byte_s": at_s, "ended_s": at_s, "queued_s": None, "tenant": tenant}
    return answered(**fields, slo=NO_SLO if met else Slo(ttft_s=wait / 2))


@given(st.lists(st.tuples(st.floats(0.001, 100), st.booleans()), max_size=40), st.integers(1, 3))
def test_the_slowest_are_kept_in_one_process_and_in_several(waits: list[tuple[float, bool]], num_parts: int) -> None:
    records = [ended(1000.0, wait, met=met) for wait, met in waits]
    worst = sorted(map(slowness, records))[:4]
    parts = [Interval(200) for _ in range(num_parts)]
    for number, record in enumerate(records):
        parts[number % num_parts].add(record)
    (whole,) = merged([[part] for part in parts])
    assert list(map(slowness, whole.slow)) == worst
    assert sum(counts.ended for counts in whole.tenants.values()) == len(records)


@given(st.lists(st.floats(1e-5, 1e4), min_size=1, max_size=200), st.floats(0.01, 1))
def test_percentiles_are_within_their_bound(seconds: list[float], share: float) -> None:
    interval = Interval(0)
    for number in seconds:
        interval.add(ended(1e5, number))
    exact = sorted(seconds)[math.ceil(share * len(seconds)) - 1]
    (found,) = percentiles(interval.ttft, (share,))
    assert found == pytest.approx(exact, rel=0.026)


def test_it_stays_small() -> None:
    history, rng = History(), random.Random(0)
    for number in range(20_000):
        history.record(ended(number * 0.1, rng.lognormvariate(0, 3), tenant=f"tenant-{number % 500}"))
    intervals = history.since(0)
    assert len(intervals) == NUM_INTERVALS
    assert intervals[-1].index == int(1999.9 // INTERVAL_S)
    for interval in intervals:
        assert len(interval.tenants) <= 51
        assert len(interval.slow) == 4
        assert len(interval.ttft) < 400
    assert len(msgspec.msgpack.encode(intervals)) < 2_000_000


def test_what_did_not_end_well() -> None:
    interval = Interval(0)
    outcomes = (Outcome.FAILED, Outcome.EXPIRED, Outcome.OVER_LIMIT, Outcome.CLIENT_ERROR, Outcome.CLIENT_GONE)
    for outcome in outcomes:
        interval.add(answered(outcome=outcome, attempts=(), first_byte_s=None))
    counts = interval.tenants["alice"]
    assert (counts.ended, counts.met, counts.missed, counts.limited, counts.wrong) == (5, 0, 2, 1, 1)
    assert {record.outcome for record in interval.slow} == {Outcome.FAILED, Outcome.EXPIRED}
    assert wait_s(interval.slow[0]) == 2.0
    assert percentiles(interval.ttft, (0.5,)) == [None]


def test_a_record_that_comes_late_counts_with_the_newest() -> None:
    history = History()
    history.record(ended(1000.0, 1.0))
    history.record(ended(994.0, 1.0))
    assert [(i.index, i.tenants["t"].ended) for i in history.since(0)] == [(200, 2)]
