"""Generated traces: what was asked for is what comes, and the same seed gives the same."""

import json
from collections import Counter
from itertools import islice, pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim_builders import DATA, NO_DATA

from expediter.assembly.trace_generation import GenerationConfig, generate, read_rate_curve
from expediter.assembly.traces import load_trace
from expediter.cli.main import main
from expediter.core.errors import ConfigurationError
from expediter.sim.trace import TraceError
from expediter.sim.trace_arrivals import arrival_times, constant, curve, gamma_gaps, on_off
from expediter.sim.trace_description import describe
from expediter.sim.trace_generators import Independent, PrefixTree, Sessions
from expediter.sim.trace_readers import read_trace

CHAT = Sessions(turns_mean=4, pause_mean_s=5, system_tokens=100, max_context=4000)
AGENTS = Sessions(turns_mean=12, pause_mean_s=1, system_tokens=2048)


def rng():
    return np.random.default_rng(7)


@pytest.mark.parametrize("cv", [0.3, 1.0, 3.0])
def test_rate_and_burstiness_are_as_asked(cv):
    got = describe("t", generate(GenerationConfig(rate_rps=20.0, cv=cv, num_requests=30_000)))
    assert got.mean_rate_rps == pytest.approx(20, rel=0.06)
    assert got.gap_cv == pytest.approx(cv, rel=0.05)


def test_twice_the_rate_means_half_the_gaps():
    slow, fast = (
        [row.arrival_s for row in generate(GenerationConfig(rate_rps=rate, num_requests=50))] for rate in (2.0, 4.0)
    )
    assert fast == pytest.approx([time / 2 for time in slow])


def test_on_off_arrivals_keep_the_mean_rate_and_are_silent_between():
    times = np.array(list(islice(arrival_times(gamma_gaps(rng(), 1.0), on_off(rng(), 10, 2, 8)), 40_000)))
    assert len(times) / times[-1] == pytest.approx(10, rel=0.1)
    assert np.mean(np.diff(times) > 1.0) > 0.005
    assert np.median(np.diff(times)) == pytest.approx(np.log(2) / 50, rel=0.1)


def test_a_curve_sets_the_rate_of_each_window_and_repeats():
    times = np.array(list(islice(arrival_times(gamma_gaps(rng(), 1.0), curve([10, 40], 100)), 5900)))
    counts = np.bincount((times // 100).astype(int))
    assert counts[[0, 2]] == pytest.approx([1000, 1000], rel=0.15)
    assert counts[1] == pytest.approx(4000, rel=0.1)


def test_missing_windows_of_a_curve_are_interpolated_and_the_mean_is_kept():
    segments = curve([10, 0, 30, float("nan"), 50, 0.1], 60, mean_rps=3.5)
    rates = [rate for _, rate in islice(segments, 6)]
    assert rates == pytest.approx([10 / 10, 20 / 10, 30 / 10, 40 / 10, 50 / 10, 50 / 10], rel=0.06)
    assert np.mean(rates) == pytest.approx(3.5)


@given(st.integers(1, 30), st.floats(0.1, 50), st.floats(0.2, 4))
def test_times_ascend(num, rate, cv):
    times = list(islice(arrival_times(gamma_gaps(rng(), cv), constant(rate)), num))
    assert all(0 <= first <= second for first, second in pairwise(times))


@pytest.mark.parametrize("shape", [Independent(), PrefixTree(), CHAT, AGENTS])
def test_the_same_seed_gives_the_same_trace_in_order(shape):
    config = GenerationConfig(shape=shape, num_requests=300, rate_rps=2.0, seed=5)
    rows = list(generate(config))
    assert rows == list(generate(config))
    assert rows != list(generate(GenerationConfig(shape=shape, num_requests=300, rate_rps=2.0, seed=6)))
    assert len(rows) == 300
    assert all(first.arrival_s <= second.arrival_s for first, second in pairwise(rows))
    assert all(len(row.prefix_ids) * row.prefix_block_tokens <= row.input_tokens for row in rows)


def test_other_lengths_leave_the_arrivals_alone():
    short, long = (list(generate(GenerationConfig(num_requests=50, input_mean=mean))) for mean in (100.0, 10_000.0))
    assert [row.arrival_s for row in short] == [row.arrival_s for row in long]
    assert sum(row.input_tokens for row in long) > 50 * sum(row.input_tokens for row in short)


def test_lengths_have_the_mean_and_spread_asked_for():
    rows = list(generate(GenerationConfig(num_requests=20_000, input_mean=500, input_cv=0.5, output_mean=80)))
    inputs = np.array([row.input_tokens for row in rows])
    assert inputs.mean() == pytest.approx(500, rel=0.03)
    assert inputs.std() / inputs.mean() == pytest.approx(0.5, rel=0.05)
    assert np.mean([row.output_tokens for row in rows]) == pytest.approx(80, rel=0.05)


def test_lengths_of_a_trace_stay_in_pairs():
    demo = load_trace("demo")
    pairs = set(zip(demo.input_tokens.tolist(), demo.output_tokens.tolist(), strict=True))
    rows = list(generate(GenerationConfig(num_requests=500, lengths_from="demo")))
    assert {(row.input_tokens, row.output_tokens) for row in rows} <= pairs


def test_a_tree_shares_paths():
    shape = PrefixTree(depth=3, branches=2, node_tokens=32)
    rows = list(generate(GenerationConfig(shape=shape, num_requests=500)))
    paths = Counter(tuple(row.prefix_ids) for row in rows)
    assert all(path[:2] == (0, 1) and len(path) == 6 for path in paths)
    assert len(paths) == 4
    # Chained ids: equal ids stand at equal places, behind equal ids.
    assert len({path[:3] for path in paths}) == len({path[2] for path in paths}) == 2
    # Each step takes the first child in two cases of three.
    assert max(paths.values()) / 500 == pytest.approx(4 / 9, abs=0.07)


def test_sessions_grow_share_their_past_and_end_before_the_context_does():
    rows = list(generate(GenerationConfig(shape=CHAT, num_requests=3000, input_mean=100, output_mean=100)))
    assert all(row.input_tokens + row.output_tokens <= 4000 for row in rows)
    system = list(range(100 // 16))
    last = {}
    turns = Counter()
    for row in rows:
        assert row.prefix_ids[:6] == system
        if len(row.prefix_ids) == 6:
            continue
        session = row.prefix_ids[6]
        turns[session] += 1
        before = last.get(session)
        if before is not None:
            assert row.prefix_ids[: len(before.prefix_ids)] == before.prefix_ids
            assert row.input_tokens > before.input_tokens + before.output_tokens
            assert row.arrival_s >= before.arrival_s + before.output_tokens / 50
        last[session] = row
    ended = list(turns.values())[:300]
    assert np.mean(ended) == pytest.approx(4, rel=0.15)


def test_agents_reuse_most_of_their_prompts():
    got = describe("t", generate(GenerationConfig(shape=AGENTS, num_requests=2000, input_mean=300, output_mean=60)))
    assert got.prefix_reuse > 0.85


def test_a_turn_that_does_not_fit_is_cut_only_if_it_is_the_first():
    shape = Sessions(turns_mean=3, pause_mean_s=1, system_tokens=10, max_context=100)
    rows = list(generate(GenerationConfig(shape=shape, num_requests=200, input_mean=500, output_mean=500)))
    assert all(row.input_tokens + row.output_tokens <= 100 for row in rows)


def test_duration_ends_a_trace():
    rows = list(generate(GenerationConfig(duration_s=20.0, rate_rps=10.0)))
    assert len(rows) == pytest.approx(200, abs=60)
    assert rows[-1].arrival_s < 20


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({}, "where to stop"),
        ({"num_requests": 0}, "requests must be"),
        ({"num_requests": 1, "rate_rps": 0.0}, "rate must be"),
        ({"num_requests": 1, "cv": float("nan")}, "cv must be"),
        ({"num_requests": 1, "on_s": 1.0}, "both"),
        ({"num_requests": 1, "on_s": 1.0, "off_s": 1.0, "rate_curve": "x"}, "exclude"),
        ({"num_requests": 1, "curve_model": "x"}, "needs a rate curve"),
        ({"num_requests": 1, "rate_curve": "no such file"}, "cannot be read"),
        ({"num_requests": 1, "input_mean": -1.0}, "input mean"),
        ({"num_requests": 1, "seed": -1}, "seed"),
        ({"duration_s": -1.0}, "duration"),
    ],
)
def test_settings_that_mean_nothing(settings, problem):
    with pytest.raises(ConfigurationError, match=problem):
        generate(GenerationConfig(**settings))


@pytest.mark.parametrize(
    ("shape", "settings"),
    [
        (PrefixTree, {"node_tokens": 100}),
        (PrefixTree, {"branches": 0}),
        (PrefixTree, {"depth": 20, "branches": 100}),
        (Sessions, {"turns_mean": 0.5, "pause_mean_s": 1, "system_tokens": 0}),
        (Sessions, {"turns_mean": 2, "pause_mean_s": 0, "system_tokens": 0}),
        (Sessions, {"turns_mean": 2, "pause_mean_s": 1, "system_tokens": 99, "max_context": 100}),
    ],
)
def test_shapes_that_mean_nothing(shape, settings):
    with pytest.raises(ConfigurationError):
        shape(**settings)


def write_curve(path, **columns):
    pq.write_table(pa.table(columns), path)
    return path


def test_rate_curves(tmp_path):
    path = write_curve(
        tmp_path / "c.parquet",
        model=["a", "b", "a", "a"],
        window_start_s=[600, 0, 0, 1800],
        rate_rps=[2.0, 9.0, 1.0, None],
    )
    rates, window_s = read_rate_curve(path, "a")
    assert window_s == 600
    assert rates[:2] == [1.0, 2.0]
    assert np.isnan(rates[2:]).tolist() == [True, True]
    for model in (None, "c"):
        with pytest.raises(TraceError, match="a, b"):
            read_rate_curve(path, model)
    with pytest.raises(TraceError, match="rate_rps"):
        read_rate_curve(write_curve(tmp_path / "d.parquet", window_start_s=[0]))


@pytest.mark.skipif(not DATA.exists(), reason=NO_DATA)
def test_a_day_of_servegen_has_its_peak_in_the_evening():
    config = GenerationConfig(
        rate_curve=DATA / "servegen_rates.parquet", curve_model="deepseek-r1", rate_rps=0.5, duration_s=86_400
    )
    hours = Counter(int(row.arrival_s // 3600) for row in generate(config))
    assert sum(hours.values()) / 86_400 == pytest.approx(0.5, rel=0.05)
    assert max(hours, key=hours.__getitem__) in (21, 22, 23)
    assert max(hours.values()) / min(hours.values()) == pytest.approx(4.91, rel=0.2)


@pytest.mark.parametrize("shape", ["independent", "tree", "chat", "agents"])
def test_the_command_writes_what_can_be_read(capsys, tmp_path, shape):
    out = tmp_path / "g.jsonl.gz"
    assert main(["trace", "generate", shape, "--requests", "40", "--seed", "3", "-o", str(out)]) == 0
    assert "40 requests written" in capsys.readouterr().err
    assert len(read_trace(out, strict=True)) == 40
    assert main(["trace", "generate", shape, "--requests", "1", "-o", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["input_tokens"] >= 1
    assert main(["trace", "generate", shape, "-o", "-"]) == 2
    assert "where to stop" in capsys.readouterr().err
