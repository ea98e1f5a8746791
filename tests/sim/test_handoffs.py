"""Requests that are computed on one replica and decoded on another."""

import io
import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_builders import ConstantTime, ContextTime, make_trace

from expediter.assembly.pools import PoolConfig, parse_pool
from expediter.assembly.simulation import SimulationConfig, build_simulation, simulate
from expediter.control.routing.base import Placement
from expediter.control.routing.simple import RoundRobin
from expediter.core.errors import ConfigurationError
from expediter.perfmodel.shapes import shape_named

PREFILL, DECODE = PoolConfig(role="prefill"), PoolConfig(role="decode")
STYLES = ("pull", "push", "layerwise")


def small(pools=(PREFILL, DECODE), **changes):
    """Return a configuration of small replicas with round times: 8 bytes a token, 100 byte/s, no latency."""
    fields = {
        "pools": pools,
        "step_time": ConstantTime(1.0),
        "num_blocks": 50,
        "block_size": 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 120,
        "kv_bytes_per_token": 8.0,
        "network_bandwidth": 100.0,
        "network_latency_s": 0.0,
    }
    return SimulationConfig(**(fields | changes))


def run(config, rows, **trace):
    """Return report, records in order of arrival, and the lines of the event log."""
    simulation, log = build_simulation(config), io.BytesIO()
    records = []
    simulation.metrics.on_end.append(records.append)
    report = simulation.run(make_trace(rows, **trace), events=log)
    for scheduler in simulation.schedulers:
        scheduler.live.check()
        assert not scheduler.has_work
        assert scheduler.kv.num_used_blocks == 0
        assert not len(scheduler.kv.landings)
        assert not scheduler.passage.departures  # what a handoff needed is forgotten with it
    assert simulation._journeys is None or simulation._journeys.num_live == 0
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    return report, sorted(records, key=lambda r: (r.arrival_s, r.request_id)), lines


@pytest.mark.parametrize(
    ("style", "num_layers", "exposed_s"),
    # 40 tokens of 8 bytes at 100 byte/s take 3.2 s; the prompt takes one step of 1 s.
    [("pull", 32, 3.2), ("push", 32, 3.2), ("layerwise", 32, 3.2 - 1 + 3.2 / 32)],
)
def test_transfers_take_what_the_formulas_say(style, num_layers, exposed_s):
    report, records, lines = run(small(transfer=style), [(0.0, 40, 3)])
    assert shape_named("llama-3.1-8b").num_layers == num_layers
    assert records[0].ttft_s == 1.0
    assert report.transfers.exposed_s == pytest.approx(exposed_s)
    assert report.transfers.num_bytes == 320
    # Then the two other tokens, a step each.
    assert records[0].e2e_s == pytest.approx(1.0 + exposed_s + 2.0)
    assert [line["event"] for line in lines] == [
        *("queued", "routed", "admitted", "first_token", "handed_off", "transferred", "admitted", "finished")
    ]


def test_an_explanation_tells_of_every_leg():
    simulation = build_simulation(small())
    simulation.run(make_trace([(0.0, 40, 3)]), explain=["r0000000"])
    words = [span.in_words() for span in simulation.explanations["r0000000"]]
    assert words[0].startswith("sent to replica 0")
    assert words[-5].startswith("sent to replica 1: it goes on there, with the KV of 40 tokens")
    assert words[-2:] == ["runs, yielding a token per step", "ended: length after 3 tokens"]
    assert "goes on with the KV of 40 tokens that came along" in words
    spans = simulation.explanations["r0000000"]
    assert all(a.to_s == b.from_s for a, b in pairwise(spans))
    assert spans[-5].to_s - spans[-5].from_s == pytest.approx(3.2)


def test_a_layerwise_transfer_that_the_prompt_covers_exposes_one_layer():
    report, _, _ = run(small(transfer="layerwise", network_bandwidth=1000.0), [(0.0, 40, 3)])
    assert report.transfers.exposed_s == pytest.approx(0.32 / 32)


def test_a_handed_over_request_decodes_at_once():
    """No step on the decode replica computes a prompt, and its first step yields a token."""
    features = []

    class Watched(ConstantTime):
        def step_time_s(self, step):
            features.append(step)
            return self.seconds

    pools = (PREFILL, PoolConfig(role="decode", step_time=Watched(1.0)))
    report, _, _ = run(small(pools, knows_step_time=False, jumps=False), [(0.0, 40, 5), (0.5, 13, 3)])
    assert [pool.num_steps for pool in report.pools] == [2, len(features)]
    assert features
    assert all(step.num_prefill_tokens == 0 and step.prefill_attention == 0 for step in features)
    assert features[0].decode_context_tokens in (41, 14)


def test_what_the_target_has_cached_is_not_sent():
    rows = [(0.0, 40, 5, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]), (60.0, 42, 5, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])]
    report, records, _ = run(small(), rows)
    assert report.transfers.num_bytes == 8 * (40 + 2)
    assert records[1].num_cached_tokens == 40


def test_transfers_queue_on_the_ways_out_and_in():
    """Two prompts of one step come out together; the second's KV waits for the first's."""
    report, records, _ = run(small(), [(0.0, 20, 2), (0.0, 20, 2)])
    assert [r.ttft_s for r in records] == [1.0, 1.0]
    assert report.transfers.exposed_s == pytest.approx(1.6 + 3.2)
    two_targets = (PREFILL, PoolConfig(role="decode", replicas=2))
    report, _, _ = run(small(two_targets), [(0.0, 20, 2), (0.0, 20, 2)])
    assert report.transfers.exposed_s == pytest.approx(1.6 + 3.2)  # they share the way out
    two_sources = (PoolConfig(role="prefill", replicas=2), PoolConfig(role="decode", replicas=2))
    report, _, _ = run(small(two_sources), [(0.0, 20, 2), (0.0, 20, 2)])
    assert report.transfers.exposed_s == pytest.approx(1.6 + 1.6)


def test_a_full_target_holds_prompts_back_and_everything_ends():
    """The decode replica holds one request at a time, and what waits keeps its KV on the prefill replica."""
    pools = (PREFILL, PoolConfig(role="decode", num_blocks=14))
    rows = [(float(i), 40, 8) for i in range(12)]
    for style in STYLES:
        report, records, _ = run(small(pools, transfer=style), rows)
        assert report.requests.finished == 12
        assert report.transfers.num_transfers >= 12
        assert all(r.num_output_tokens == 8 for r in records)


def test_who_runs_alone_between_landings_and_loses_its_blocks_starts_again():
    config = small(
        (PREFILL, PREFILL, DECODE),
        preset="vllm",
        transfer="pull",
        transfer_lease_s=0.75,
        num_blocks=30,
        network_bandwidth=200.0,
        step_time=ContextTime(0.2),
        max_num_batched_tokens=None,
    )
    _, _, lines = run(config, [(0.0, 56, 10), (1.0, 24, 2)], num_sequences=[2, 2])
    (lost,) = (index for index, line in enumerate(lines) if line["event"] == "preempted")
    again = next(line for line in lines[lost:] if line["event"] == "admitted")
    assert again["request"] == lines[lost]["request"], "nobody younger takes what it gave up"
    assert sum(line["event"] == "finished" for line in lines) == 4


def test_what_no_decode_replica_could_finish_is_refused_before_anything_is_computed():
    pools = (PREFILL, PoolConfig(role="decode", num_blocks=10))
    report, _, lines = run(small(pools), [(0.0, 60, 3), (1.0, 20, 3), (2.0, 60, 1)])
    # The last one needs nobody to decode.
    assert (report.requests.unservable, report.requests.finished) == (1, 2)
    assert [line["event"] for line in lines if line["request"] == "r0000000"] == ["queued", "routed", "rejected"]


def test_sequences_of_a_group_are_handed_off_one_by_one():
    report, records, _ = run(small(), [(0.0, 17, 4)], num_sequences=[3])
    assert report.requests.finished == 3
    assert {r.num_output_tokens for r in records} == {4}
    assert report.transfers.num_transfers == 3


ROWS = st.lists(
    st.tuples(
        st.integers(0, 40).map(lambda t: t / 4),
        st.integers(1, 60),
        st.integers(1, 12),
        st.sampled_from([[], [1], [1, 2]]),
    ),
    min_size=1,
    max_size=14,
).map(lambda rows: sorted(rows, key=lambda row: row[0]))


@settings(max_examples=40, deadline=None)
@given(
    rows=ROWS,
    style=st.sampled_from(STYLES),
    num_blocks=st.sampled_from([20, 24, 50]),
    replicas=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    preset=st.sampled_from(["sarathi", "vllm", "orca", "expediter", "static", "sglang"]),
    bandwidth=st.sampled_from([20.0, 400.0]),
    lease_s=st.sampled_from([0.5, 30.0]),
    seconds=st.sampled_from([ConstantTime(0.25), ContextTime(0.2)]),
)
def test_every_request_ends_once_and_jumps_change_nothing(
    rows, style, num_blocks, replicas, preset, bandwidth, lease_s, seconds
):
    pools = (PoolConfig(role="prefill", replicas=replicas[0]), PoolConfig(role="decode", replicas=replicas[1]))
    told = []
    for jumps in (True, False):
        config = small(
            pools,
            preset=preset,
            transfer=style,
            num_blocks=num_blocks,
            network_bandwidth=bandwidth,
            transfer_lease_s=lease_s,
            step_time=seconds,
            max_num_batched_tokens=None,
            jumps=jumps,
        )
        report, records, lines = run(config, rows)
        assert report.requests.arrived == len(rows) == len(records)
        for row, record in zip(rows, records, strict=True):
            if record.ttft_s is not None:
                assert record.num_output_tokens == row[2]
        assert [line["t"] for line in lines if line["event"] != "rejected"] == sorted(
            line["t"] for line in lines if line["event"] != "rejected"
        )
        told.append(lines)
    assert told[0] == told[1]


def test_opt_66b_sends_as_many_bytes_as_published():
    """DistServe (2401.09670): KV of 512 tokens of OPT-66B is about 1.13 GB (of 2**30 bytes)."""
    report, _, _ = run(
        small(kv_bytes_per_token=None, model="opt-66b", num_blocks=200, max_model_len=600), [(0.0, 512, 2)]
    )
    assert report.transfers.num_bytes == pytest.approx(1.13 * 2**30, rel=0.01)


def test_prompts_of_one_length_wait_as_in_a_queue_with_constant_service():
    """DistServe's check of a prefill replica: TTFT of M/D/1 is D + R * D^2 / (2 * (1 - R * D))."""
    duration_s, rate = 0.5, 0.8
    rng = np.random.default_rng(5)
    arrivals = np.cumsum(rng.exponential(1 / rate, 1200)).tolist()
    config = small(
        (PREFILL, PoolConfig(role="decode", replicas=4)),
        step_time=ConstantTime(duration_s),
        max_num_batched_tokens=16,
        network_bandwidth=1e9,
    )
    report, records, _ = run(config, [(t, 16, 2) for t in arrivals])
    free_s = 0.0
    for arrival_s, record in zip(arrivals, records, strict=True):  # request by request, as in any such queue
        free_s = max(free_s, arrival_s) + duration_s
        assert record.first_token_s == pytest.approx(free_s)
    expected_s = duration_s + rate * duration_s**2 / (2 * (1 - rate * duration_s))
    assert report.ttft_s.mean == pytest.approx(expected_s, rel=0.05)


class Lending(RoundRobin):
    """Prompts go to the decode replica, and stay where they are or move to the prefill replica, in turn."""

    def __init__(self):
        super().__init__()
        self.decode_id = 0

    def route(self, query, fleet):
        self.decode_id = 1 - self.decode_id
        return Placement(replica_id=1, because="a test", decode_id=self.decode_id)


@pytest.mark.parametrize("style", STYLES)
def test_pools_lend_replicas_to_each_other_where_the_router_says_so(style, monkeypatch):
    """What a placement says goes before what the roles say."""
    monkeypatch.setattr("expediter.assembly.simulation.make_router", lambda config: Lending())
    report, records, lines = run(small(transfer=style), [(0.0, 8, 3), (10.0, 8, 3)])
    assert report.requests.finished == 2
    ended = {line["request"]: line["replica"] for line in lines if line["event"] == "finished"}
    assert ended == {"r0000000": 1, "r0000001": 0}
    assert report.transfers.num_transfers == 1
    assert records[0].e2e_s == 3.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prefil:replicas=2", "no role 'prefil' of a pool; there are: prefill, decode, mixed"),
        ("prefill:replica=2", "'replica=2' is not NAME=VALUE with one of the names replicas, tp, pp, ep, gpu, blocks"),
        ("prefill:tp=x", "tp must be a whole number, not 'x'"),
        ("decode:tp=0", "pool decode: tensor_parallel must be at least 1, not 0"),
    ],
)
def test_a_wrong_pool_is_answered_with_what_is_wrong(text, message):
    with pytest.raises(ConfigurationError, match=message):
        parse_pool(text)


def test_a_pool_is_read():
    assert parse_pool("prefill:replicas=2,tp=4,gpu=h100") == PoolConfig(
        role="prefill", replicas=2, tensor_parallel=4, gpu="h100"
    )
    assert parse_pool("decode") == DECODE


@pytest.mark.parametrize(
    ("pools", "message"), [((PREFILL,), "no pool decodes"), ((DECODE, DECODE), "no pool computes prompts")]
)
def test_pools_must_take_a_request_to_its_end(pools, message):
    with pytest.raises(ConfigurationError, match=message):
        SimulationConfig(pools=pools)


def test_unlike_pools_have_gpus_of_their_own():
    pools = (PoolConfig(role="prefill", gpu="h100", tensor_parallel=2), PoolConfig(role="decode", replicas=3))
    report = simulate("demo", limit=4, pools=pools, gpu="a100-80g")
    assert report.num_gpus == 5
    assert [pool["role"] for pool in report.configuration["pools"]] == ["prefill", "decode"]
    with pytest.raises(ConfigurationError, match="no transfer style 'drag'; there are: pull, push, layerwise"):
        simulate("demo", limit=1, transfer="drag")
