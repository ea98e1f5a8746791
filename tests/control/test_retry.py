"""Retries are bounded to a share of the requests, and spread in time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expediter.control.retry import RetryBudget, RetryConfig, backoff_s
from expediter.core.errors import ConfigurationError


@given(
    st.floats(0, 1),
    st.floats(0, 20),
    st.floats(0, 50),
    st.lists(st.tuples(st.floats(0, 2), st.integers(0, 9), st.integers(0, 9)), max_size=60),
)
def test_retries_never_exceed_what_was_earned(share, min_per_s, max_saved, happenings):
    budget, now_s, num_requests, num_retries = (
        RetryBudget(RetryConfig(share=share, min_per_s=min_per_s, max_saved=max_saved), 0.0),
        0.0,
        0,
        0,
    )
    for elapsed_s, requests, attempts in happenings:
        now_s += elapsed_s
        num_requests += requests
        for _ in range(requests):
            budget.earn()
        num_retries += sum(budget.may_retry(now_s) for _ in range(attempts))
        assert num_retries <= max_saved + share * num_requests + min_per_s * now_s + 1e-6


def test_a_dying_backend_is_covered_and_a_storm_is_not():
    budget = RetryBudget(RetryConfig(), 0.0)
    assert sum(budget.may_retry(0.0) for _ in range(1000)) == 100
    assert budget.may_retry(0.11)
    assert not budget.may_retry(0.11)


def test_time_that_goes_back_earns_nothing():
    budget = RetryBudget(RetryConfig(max_saved=1.0), 10.0)
    assert budget.may_retry(10.0)
    assert not budget.may_retry(5.0)
    assert not budget.may_retry(10.05)


@given(st.integers(1, 100), st.integers(0, 9))
def test_pauses_grow_to_their_bound_and_differ(num_attempts, seed):
    config = RetryConfig(backoff_s=0.1, max_backoff_s=1.0)
    pause_s = backoff_s(config, num_attempts, np.random.default_rng(seed))
    assert 0 <= pause_s < min(1.0, 0.1 * 2 ** (num_attempts - 1))


def test_figures_out_of_range():
    with pytest.raises(ConfigurationError):
        RetryConfig(max_attempts=0)
    with pytest.raises(ConfigurationError):
        RetryConfig(share=-1.0)
