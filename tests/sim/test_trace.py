"""Traces in memory: which prompts share tokens, rate and limit."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim_builders import make_trace

from expediter.core.errors import ConfigurationError
from expediter.sim.synthetic_tokens import VOCAB_SIZE, output_base, output_tokens, prompt_tokens
from expediter.sim.trace import TraceError, trace_summary


def common_prefix(first, second):
    n = min(len(first), len(second))
    differs = np.flatnonzero(first[:n] != second[:n])
    return int(differs[0]) if len(differs) else n


ids = st.lists(st.integers(0, 5), max_size=6)
rows = st.tuples(st.integers(1, 30), ids)


@given(st.lists(rows, min_size=2, max_size=8))
def test_prompts_share_exactly_what_their_ids_say(prompts):
    trace = make_trace([(0.0, n, 1, own) for n, own in prompts])
    made = [request.prompt for request in trace.requests()]
    for (n, _), prompt in zip(prompts, made, strict=True):
        assert prompt.dtype == np.int32
        assert len(prompt) == n
        assert prompt.min() >= 0
        assert prompt.max() < VOCAB_SIZE
    for first in range(len(prompts)):
        for second in range(first):
            (n1, ids1), (n2, ids2) = prompts[first], prompts[second]
            num_equal = next((i for i, (a, b) in enumerate(zip(ids1, ids2, strict=False)) if a != b), None)
            num_equal = min(len(ids1), len(ids2)) if num_equal is None else num_equal
            assert common_prefix(made[first], made[second]) == min(4 * num_equal, n1, n2)


@given(st.integers(0, 2**29 - 1), st.integers(0, 2**29 - 1), st.integers(0, 2**24))
def test_outputs_are_shared_with_nothing(first, second, position):
    bases = np.array([output_base(first), output_base(second)], np.int32)
    tokens = output_tokens(bases, np.array([position, position], np.int32), 3)
    assert tokens.shape == (3, 2)
    assert tokens.min() >= 0
    assert tokens.max() < VOCAB_SIZE
    assert (tokens[:, 0] == tokens[:, 1]).all() == (first == second)
    prompt = prompt_tokens(first, 8, np.array([second], np.int64), 4)
    assert not np.isin(tokens, prompt).any()


def test_outputs_depend_on_position_not_on_where_the_run_began():
    base = np.array([output_base(7)], np.int32)
    run = output_tokens(base, np.array([10], np.int32), 5)[:, 0].tolist()
    assert run[2:] == output_tokens(base, np.array([12], np.int32), 3)[:, 0].tolist()
    assert len(set(run)) == 5


def test_twice_the_rate_means_half_the_gaps():
    trace = make_trace([(2.0, 1, 1), (4.0, 1, 1), (10.0, 1, 1)])
    assert trace.at_rate(2).arrival_s.tolist() == [2.0, 3.0, 6.0]
    assert trace.at_rate(0.5).arrival_s.tolist() == [2.0, 6.0, 18.0]
    rates = [trace_summary(trace.at_rate(scale)).mean_rate_rps for scale in (0.5, 1, 2, 1000)]
    assert all(slow < fast for slow, fast in pairwise(rates))


@pytest.mark.parametrize("scale", [0, -1, float("nan"), float("inf")])
def test_scales_that_mean_nothing(scale):
    with pytest.raises(ConfigurationError, match="rate scale"):
        make_trace([(0.0, 1, 1)]).at_rate(scale)


def test_take():
    trace = make_trace([(0.0, 5, 1, [1]), (1.0, 6, 1, [2, 3]), (2.0, 7, 1)], priorities=[1, 2, 3])
    first = trace.take(2)
    assert [len(first), first.prefix_ids.tolist(), first.priorities.tolist()] == [2, [1, 2, 3], [1, 2]]
    assert [r.prompt.tolist() for r in first.requests()] == [r.prompt.tolist() for r in trace.requests()][:2]
    assert len(trace.take(99)) == 3
    with pytest.raises(ConfigurationError, match="limit"):
        trace.take(0)


def test_a_trace_has_requests():
    with pytest.raises(TraceError, match="no requests"):
        make_trace([])


def test_summary_counts_a_leading_run_of_seen_blocks():
    trace = make_trace([(0.0, 8, 2, [1, 2]), (0.0, 10, 4, [1, 2, 3]), (0.0, 6, 6, [9, 2]), (0.0, 3, 8, [1])])
    summary = trace_summary(trace)
    assert summary.prefix_reuse == (8 + 0 + 3) / 27
    assert summary.mean_rate_rps is None
    assert (summary.output_tokens_mean, summary.output_tokens_p50, summary.output_tokens_max) == (5.0, 5.0, 8)
    assert trace_summary(make_trace([(0.0, 1, 1), (4.0, 1, 1)])).prefix_reuse is None
