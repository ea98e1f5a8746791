"""Percentiles: exact while there are few values, within the stated error once there are many, in bounded memory."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expediter.sim import distribution
from expediter.sim.distribution import MAX_EXACT, RELATIVE_ERROR, Distribution, Sample

durations = st.one_of(st.just(0.0), st.floats(1e-6, 1e6))


def numbers(values):
    return [values.mean, values.p50, values.p90, values.p99]


def expected(values):
    return [np.mean(values), *np.percentile(values, (50, 90, 99))]


def sample_of(values):
    sample = Sample()
    for value in values:
        sample.add(value)
    return sample


@given(st.lists(durations, min_size=1, max_size=50))
def test_few_values_are_exact(values):
    got = numbers(Distribution.of([None, *values]))
    assert got[1:] == expected(values)[1:]
    assert got[0] == pytest.approx(expected(values)[0])


def test_no_values_have_no_percentiles():
    assert numbers(Distribution.of([None])) == [None] * 4


@settings(deadline=None)
@given(st.lists(durations, min_size=1, max_size=200), st.integers(1, 40))
def test_many_values_are_within_the_stated_error(values, max_exact):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distribution, "MAX_EXACT", max_exact)
        got = numbers(sample_of(values).distribution())
    assert got[0] == pytest.approx(expected(values)[0])
    assert got[1:] == pytest.approx(expected(values)[1:], rel=RELATIVE_ERROR * 1.0001, abs=1e-9)


def test_memory_does_not_grow_with_the_number_of_values():
    rng = np.random.default_rng(0)
    sample = Sample()
    for value in rng.lognormal(0.0, 2.0, 3 * MAX_EXACT).tolist():
        sample.add(value)
    values = rng.lognormal(0.0, 2.0, 10).tolist()
    for value in values:
        sample.add(value)
    assert len(sample._values) <= MAX_EXACT
    assert len(sample._buckets) < 20_000
    p50 = sample.distribution().p50
    assert p50 == pytest.approx(1.0, rel=0.02), "the median of that distribution"
    assert sample.distribution().p50 == p50, "asking changes nothing"
