"""Whole simulations: jumps equal single steps, the same seed gives the same bytes, no request is lost."""

import io
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_builders import DATA, NO_DATA, ConstantTime, ContextTime, make_trace, write_jsonl

from expediter.assembly.simulation import SimulationConfig, build_simulation, simulate
from expediter.control.routing.base import Placement
from expediter.control.routing.build import ROUTINGS, RoutingConfig
from expediter.control.routing.parts import TokensToCompute
from expediter.control.routing.scored import Scored
from expediter.control.routing.simple import HandsOffToLeastLoaded
from expediter.core.errors import ConfigurationError, InvariantError
from expediter.core.request import CacheHint, Request
from expediter.core.slo import Slo, SloClass
from expediter.scheduling.build import (
    BATCHINGS,
    BUDGET_RULES,
    EVICTIONS,
    MEMORY_RULES,
    ORDERINGS,
    VICTIM_RULES,
    PolicyConfig,
)
from expediter.scheduling.ordering.base import KeyOrdering


def run(trace, *, step_time=None, **config):
    """Return the report, without the real time it took, and the lines of the event log."""
    log = io.BytesIO()
    config = {"num_blocks": 64, "block_size": 4, "max_model_len": 200} | config
    report = simulate(trace, step_time=step_time or ConstantTime(0.25), events=log, **config)
    return replace(report, wall_s=0.0), [json.loads(line) for line in log.getvalue().splitlines()]


def times(log, event, **facts):
    return [line["t"] for line in log if line["event"] == event and facts.items() <= line.items()]


# Times on a grid of a quarter: with steps of 0.25 s arrivals often fall exactly on the end of a step.
traces = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 40).map(lambda t: t / 4), st.floats(0, 10)),
        st.integers(1, 60),
        st.integers(1, 40),
        st.lists(st.integers(0, 3), max_size=4),
    ),
    min_size=1,
    max_size=12,
).map(sorted)


SLO_CLASSES = {
    "hasty": SloClass(ttft_s=0.5, refuse_late=True),
    "tight": SloClass(ttft_s=0.75, tpot_s=0.2, value=2.0),
    "whole": SloClass(e2e_s=4.0, refuse_late=True),
}


@settings(max_examples=150, deadline=None)
@given(
    traces,
    st.sampled_from([ConstantTime(0.25), ContextTime(0.013)]),
    st.integers(1, 3),
    st.sampled_from([6, 16, 30, 300]),
    st.sampled_from(tuple(ROUTINGS)),
    st.builds(
        PolicyConfig,
        ordering=st.sampled_from(sorted(ORDERINGS)),
        batching=st.sampled_from(["stall_free", *sorted(BATCHINGS)]),
        memory=st.sampled_from(["paged", *sorted(MEMORY_RULES)]),
        budget=st.sampled_from(sorted(BUDGET_RULES)),
        victims=st.sampled_from(sorted(VICTIM_RULES)),
        eviction=st.sampled_from(sorted(EVICTIONS)),
    ),
    st.booleans(),
    st.integers(1, 5),
)
def test_jumps_equal_single_steps(rows, step_time, replicas, num_blocks, routing, policy, caching, max_num_seqs):
    hints = (None, None, CacheHint(drop=True), CacheHint(pin_s=2.0))
    num_sequences = [(1, 1, 2, 3)[row[1] % 4] for row in rows]
    trace = make_trace(
        rows,
        priorities=[len(row[3]) % 3 for row in rows],
        num_sequences=num_sequences,
        tenants=tuple("ab"[row[1] % 2] for row in rows),
        cache_hints=[hints[row[2] // 4 % 4] for row in rows],
        slo_classes=tuple(("", *SLO_CLASSES)[row[2] % 4] for row in rows),
    )
    config = {
        "step_time": step_time,
        "replicas": replicas,
        "num_blocks": num_blocks,
        "routing": routing,
        "policy": policy,
        "prefix_caching": caching,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": None if BATCHINGS[policy.batching].whole_prompts else 24,
        "slo_classes": SLO_CLASSES,
    }
    report, log = run(trace, **config)
    assert (report, log) == run(trace, jumps=False, **config)
    assert_conserved(report, log, sum(num_sequences))


@settings(max_examples=60, deadline=None)
@given(
    traces,
    st.sampled_from([12, 16, 30]),
    st.sampled_from([1, 8, 40]),
    st.sampled_from(["fcfs", "priority", "slo"]),
    st.sampled_from(["swap", "cheaper"]),
    st.booleans(),
)
def test_jumps_equal_single_steps_while_blocks_move(rows, num_blocks, num_host_blocks, ordering, mode, caching):
    trace = make_trace(rows, priorities=[len(row[3]) % 3 for row in rows])
    config = {
        "step_time": ContextTime(0.25),
        "num_blocks": num_blocks,
        "num_host_blocks": num_host_blocks,
        "block_swap_s": 0.01,
        "ordering": ordering,
        "preemption_mode": mode,
        "prefix_caching": caching,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 24,
    }
    report, log = run(trace, **config)
    assert (report, log) == run(trace, jumps=False, **config)
    assert_conserved(report, log, len(rows))


def test_moving_blocks_takes_time():
    """Two decodes meet in eight blocks: one goes out and comes back, which takes as long as its blocks take."""
    rows = [(0.0, 12, 9), (0.0, 12, 9)]
    config = {"num_blocks": 8, "num_host_blocks": 8, "preemption_mode": "swap", "prefix_caching": False}
    still, log = run(make_trace(rows), **config, block_swap_s=0.0)
    moving, _ = run(make_trace(rows), **config, block_swap_s=0.125)
    (out,) = [line for line in log if line["event"] == "preempted"]
    assert out["swapped_tokens"] == out["lost_tokens"]
    num_blocks = -(-out["swapped_tokens"] // 4)
    assert [line["restored_tokens"] for line in log if line.get("resumed")] == [out["swapped_tokens"]]
    assert moving.simulated_s == still.simulated_s + 2 * 0.125 * num_blocks
    assert moving.num_steps == still.num_steps


def test_swap_space_is_counted_in_the_models_blocks():
    space = {"model": "llama-3.1-8b", "swap_space_bytes": 4 << 30}
    for gpu, tp in (("a100-80g", 1), ("h100", 2)):
        scheduler = build_simulation(SimulationConfig(gpu=gpu, tensor_parallel=tp, **space)).schedulers[0]
        # 32 layers of 8 heads of 128, keys and values in two bytes: 128 KiB per token, 2 MiB per block of 16.
        assert scheduler.kv.host.num_blocks == 2048 * tp
    assert scheduler.knowledge.block_swap_s == pytest.approx((1 << 20) / (0.8 * 64e9))
    with pytest.raises(ConfigurationError, match="swap_space_bytes must not be negative"):
        SimulationConfig(swap_space_bytes=-1)


def assert_conserved(report, log, num_requests):
    counts = report.requests
    refused = [line for line in log if line["event"] == "rejected" and line["reason"] == "overloaded"]
    assert counts.arrived == num_requests == len(times(log, "queued")) == len(times(log, "routed")) + len(refused)
    assert counts.arrived == counts.finished + counts.rejected + counts.unservable + counts.aborted
    ends = Counter(line["request"] for line in log if line["event"] in {"finished", "rejected"})
    assert len(ends) == num_requests
    assert set(ends.values()) == {1}
    in_order = [line["t"] for line in log if line["event"] != "rejected"]
    assert in_order == sorted(in_order)
    assert report.num_preemptions == len(times(log, "preempted"))


def test_one_request_step_by_step():
    report, log = run(make_trace([(1.0, 10, 4)]), max_num_batched_tokens=6, max_num_seqs=6)
    # two chunks of the prompt, the second of which yields a token, then three decodes of 0.25 s
    assert times(log, "admitted") == [1.0]
    assert times(log, "first_token") == [1.5]
    assert times(log, "finished") == [2.25]
    assert report.num_steps == 5
    assert (report.queueing_s.mean, report.ttft_s.mean, report.tpot_s.mean, report.e2e_s.mean) == (0, 0.5, 0.25, 1.25)
    assert report.simulated_s == 1.25
    assert report.output_tokens_per_s == 4 / 1.25


@pytest.mark.parametrize("jumps", [True, False])
@pytest.mark.parametrize(
    ("arrival_s", "admitted_s"),
    [
        (2.0, 2.0),  # falls on the end of a step: that step is over, the next plan knows the arrival
        (2.1, 2.25),  # inside a step: waits for its end
        (0.0, 0.0),  # together with the first
    ],
)
def test_an_arrival_ends_a_jump_with_the_step_in_progress(jumps, arrival_s, admitted_s):
    trace = make_trace(sorted([(0.0, 4, 30), (arrival_s, 4, 2)]))
    _, log = run(trace, jumps=jumps)
    assert times(log, "admitted", request="r0000001") == [admitted_s]
    assert times(log, "queued", request="r0000001") == [arrival_s]


def test_arrivals_at_one_instant_are_planned_together_in_the_traces_order():
    _, log = run(make_trace([(3.0, 4, 1)] * 3))
    assert [line["request"] for line in log if line["event"] == "admitted"] == ["r0000000", "r0000001", "r0000002"]
    assert set(times(log, "first_token")) == {3.25}


def test_shared_prefixes_hit_and_unique_prompts_never_do():
    shared = make_trace([(0.0, 16, 2, [1, 2, 3, 4]), (9.0, 20, 2, [1, 2, 3, 4, 5]), (18.0, 16, 2, [1, 2, 3, 4])])
    report, log = run(shared)
    # 16 of 20; then 12 of 16, because the last token is always computed and blocks are whole
    assert [line["cached_tokens"] for line in log if line["event"] == "finished"] == [0, 16, 12]
    assert report.prefix_hit_rate == 28 / 52
    assert run(shared, prefix_caching=False)[0].prefix_hit_rate == 0
    assert run(make_trace([(float(i), 16, 20) for i in range(9)]))[0].prefix_hit_rate == 0


def test_sequences_of_a_request_start_together_and_compute_its_prompt_once():
    shared = make_trace([(0.0, 40, 3), (0.1, 6, 2)], num_sequences=[3, 1])
    # 40 tokens in chunks of 8; the second request waits for the step in progress and then for the budget
    report, log = run(shared, max_num_seqs=4, max_num_batched_tokens=8)
    first = [line["request"] for line in log if line["event"] == "first_token"][:3]
    assert first == ["r0000000", "r0000000.1", "r0000000.2"]
    assert times(log, "first_token")[:3] == [1.25] * 3
    assert report.prefix_hit_rate == 80 / 126  # two of the three sequences compute nothing of it
    assert report.requests.finished == 4
    alone = make_trace([(0.0, 40, 3)] * 3)
    assert run(alone, max_num_seqs=4, max_num_batched_tokens=8, prefix_caching=False)[0].num_steps > report.num_steps


def test_requests_that_cannot_be_served_are_counted_and_the_run_ends():
    rows = [(0.0, 300, 10), (0.0, 150, 40), (1.0, 8, 3), (2.0, 4, 400)]
    report, log = run(make_trace(rows), num_blocks=20, slo=Slo())
    counts = report.requests
    assert (counts.finished, counts.rejected, counts.unservable, counts.aborted) == (1, 2, 1, 0)
    assert report.slo_attainment == 0.25
    assert [line["reason"] for line in log if line["event"] == "rejected"] == ["too_long", "unservable", "too_long"]
    assert_conserved(report, log, 4)


def test_a_report_without_finished_requests_has_no_nan():
    report, _ = run(make_trace([(0.0, 300, 10)]))
    text = report.to_json().decode()
    assert json.loads(text)["ttft_s"] == {"mean": None, "p50": None, "p90": None, "p99": None}
    assert "NaN" not in text
    assert report.goodput_rps is None
    assert report.prefix_hit_rate is None


def test_slo_counts():
    rows = [(0.0, 4, 1), (0.0, 4, 9), (0.0, 300, 1)]
    attained = {
        slo: run(make_trace(rows), slo=slo)[0].slo_attainment
        for slo in (Slo(ttft_s=0.25), Slo(ttft_s=0.2), Slo(tpot_s=0.2), Slo(tpot_s=0.25), Slo())
    }
    # one token has no time per output token to miss; what is rejected misses whatever the targets
    assert list(attained.values()) == [2 / 3, 0, 1 / 3, 2 / 3, 2 / 3]
    report, _ = run(make_trace(rows), slo=Slo(), replicas=2)
    assert report.goodput_rps == 2 / report.simulated_s
    assert report.goodput_rps_per_gpu == report.goodput_rps / 2


def test_faster_arrivals_wait_longer():
    trace = make_trace([(i * 1.0, 40, 20) for i in range(30)])
    waits = [run(trace, rate_scale=scale, max_num_seqs=2)[0].queueing_s.mean for scale in (0.1, 1, 4)]
    assert waits[0] < waits[1] < waits[2]


def test_routing_spreads_requests():
    trace = make_trace([(0.0, 8, 4)] * 6)
    for routing in ("round_robin", "least_load", "cache_aware", "predicted_ttft", "splitwise"):
        _, log = run(trace, replicas=3, routing=routing)
        assert Counter(line["replica"] for line in log if line["event"] == "routed") == {0: 2, 1: 2, 2: 2}


@pytest.mark.parametrize("knowledge", ["dispatched", "exact"])
def test_what_a_router_takes_to_be_cached_is_what_is_found_there(knowledge):
    """Turns of sessions, far enough apart that all is computed in between: every expected token is a hit."""
    turns = [(turn, session) for turn in range(4) for session in range(4)]
    ids = [list(range(100 * session, 100 * session + 8 * (turn + 1))) for turn, session in turns]
    rows = [(float(number), 4 * len(own), 2, own) for number, own in enumerate(ids)]
    seen = []

    class Watched(Scored):
        def __init__(self):
            config = RoutingConfig(prefix_knowledge=knowledge, index_block_tokens=4)
            super().__init__(config.caches(), TokensToCompute())

        def route(self, query, fleet):
            decision = super().route(query, fleet)
            seen.append(decision.num_cached_tokens)
            return decision

    _, log = run(make_trace(rows), replicas=2, routing=Watched, step_time=ConstantTime(0.01))
    found = {line["request"]: line["cached_tokens"] for line in log if line["event"] == "admitted"}
    assert [found[f"r{number:07d}"] for number in range(16)] == seen
    assert seen[4:] == [32 * (turn + 1) for turn in range(3) for _ in range(4)]


def test_a_routing_of_ones_own():
    class Last(HandsOffToLeastLoaded):
        def route(self, query, fleet):
            return Placement(replica_id=max(fleet.ids("prefill")), because="it is the last")

    report, log = run(make_trace([(0.0, 8, 4)] * 6), replicas=3, routing=Last)
    assert {line["replica"] for line in log if line["event"] == "routed"} == {2}
    assert report.configuration["routing"] == "Last"


def test_an_ordering_of_ones_own():
    class ShortestFirst(KeyOrdering):
        def key(self, state, now_s):
            return (state.request.num_prompt_tokens,)

    trace = make_trace([(0.0, 40, 2), (0.0, 30, 2), (0.0, 20, 2)])
    report, log = run(trace, ordering=ShortestFirst, max_num_seqs=1)
    admitted = [line["request"] for line in log if line["event"] == "admitted"]
    assert admitted == ["r0000002", "r0000001", "r0000000"]
    assert report.configuration["policy"]["ordering"] == "ShortestFirst"


def test_requests_of_ones_own(tmp_path):
    trace = make_trace([(0.0, 9, 5), (1.0, 4, 3)])
    requests: list[Request] = list(trace.requests())
    assert replace(run(trace)[0], trace=None) == run(iter(requests))[0]
    with pytest.raises(ConfigurationError, match="before the one ahead"):
        run(reversed(requests))
    path = write_jsonl(tmp_path / "own.jsonl", [{"arrival_s": 0, "input_tokens": 9, "output_tokens": 5}])
    assert run(path)[0].requests.finished == 1


def test_schedulers_are_empty_afterwards():
    simulation = build_simulation(SimulationConfig(num_blocks=12, block_size=4, replicas=2))
    simulation.run(make_trace([(0.0, 20, 25, [1, 2])] * 9))
    for scheduler in simulation.schedulers:
        scheduler.live.check()
        assert not scheduler.has_work
        assert scheduler.kv.num_used_blocks == 0


def test_a_request_id_that_comes_twice_is_noticed():
    trace = make_trace([(0.0, 4, 2)])
    requests = list(trace.requests())
    with pytest.raises(InvariantError, match="twice"):
        run([requests[0], requests[0]])


@pytest.mark.parametrize(
    "config",
    [
        *({name: 0} for name in ("replicas", "tensor_parallel", "num_blocks", "block_size", "max_num_seqs")),
        *({name: "x"} for name in ("preset", "model", "gpu", "routing", "ordering")),
    ],
)
def test_configurations_that_cannot_be(config):
    with pytest.raises(ConfigurationError):
        build_simulation(SimulationConfig(**config))


PROGRAM = """
import sys
from expediter.assembly.simulation import simulate
with open(sys.argv[2], "wb") as events:
    report = simulate(sys.argv[1], events=events, replicas=2, num_blocks=40, block_size=4, max_model_len=200, seed=5)
"""


def test_the_same_bytes_whatever_the_hash_seed(tmp_path):
    rows = [
        {"timestamp": 3000 * (i // 5), "input_length": 20 + i % 7, "output_length": i % 30, "hash_ids": [i % 3]}
        for i in range(60)
    ]
    path = write_jsonl(tmp_path / "m.jsonl", rows)
    logs = []
    for hash_seed in ("0", "1", "77"):
        target = tmp_path / f"events-{hash_seed}"
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        subprocess.run([sys.executable, "-c", PROGRAM, str(path), str(target)], env=environment, check=True)
        logs.append(target.read_bytes())
    assert logs[0] == logs[1] == logs[2]
    assert logs[0].count(b"\n") > 60


@pytest.mark.skipif(not DATA.exists(), reason=NO_DATA)
@pytest.mark.parametrize("name", ["azure2023_conv.parquet", "mooncake_fast25_conversation_trace.jsonl.gz"])
def test_a_slice_of_a_public_trace_with_jumps_and_without(name):
    config = {"model": "llama-3.1-8b", "gpu": "h100", "num_blocks": 9000, "replicas": 2, "limit": 150}
    with_jumps, without = (run(DATA / name, step_time=None, jumps=jumps, **config) for jumps in (True, False))
    assert with_jumps == without
    assert_conserved(*with_jumps, 150)
