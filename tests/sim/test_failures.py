"""Replicas that crash, come back or run slowly, and transfers that are lost: every request still ends exactly once."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_builders import ConstantTime, ContextTime
from test_handoffs import DECODE, PREFILL, ROWS, run, small

from expediter.assembly.file_config import load_file_config
from expediter.assembly.pools import PoolConfig
from expediter.assembly.simulation import SimulationConfig, build_simulation
from expediter.cli.cluster_flags import failures_of
from expediter.cli.main import build_parser
from expediter.core.errors import ConfigurationError
from expediter.sim.failures import Crash, FailureConfig, Slowdown

MIXED = PoolConfig(replicas=2)


def events_of(lines, request):
    return [line["event"] for line in lines if line.get("request") == request]


def failing(*crashes, pools=(MIXED,), **changes):
    return small(pools, failures=FailureConfig(crashes=crashes), cold_start_s=10.0, **changes)


def test_a_request_goes_on_elsewhere_with_the_tokens_that_its_client_has():
    """20 tokens: a step for the prompt and one per token after the first; lost after 5, 15 are left to be made."""
    report, records, lines = run(failing(Crash(replica=0, at_s=5.5)), [(0.0, 8, 20)])
    assert events_of(lines, "r0000000") == [
        *("queued", "routed", "admitted", "first_token", "interrupted", "routed", "admitted", "finished")
    ]
    interrupted = next(line for line in lines if line["event"] == "interrupted")
    assert interrupted["output_tokens"] == 5
    # The step in progress is lost; the first step elsewhere computes prompt and output anew and yields the 6th token.
    assert records[0].ended_s == pytest.approx(5.5 + 15)
    assert (records[0].num_output_tokens, records[0].ttft_s) == (20, 1.0)
    assert (report.failures.num_crashes, report.failures.num_interrupted) == (1, 1)
    assert report.failures.down_s == pytest.approx(10.0)


def test_a_step_that_ends_with_the_crash_has_ended():
    _, records, lines = run(failing(Crash(replica=0, at_s=5.0)), [(0.0, 8, 20)])
    assert next(line for line in lines if line["event"] == "interrupted")["output_tokens"] == 5
    assert records[0].ended_s == pytest.approx(5.0 + 15)


def test_nothing_is_sent_to_who_is_down_and_who_comes_back_has_no_cache():
    rows = [(t, 16, 2, [1, 2, 3, 4]) for t in (0.0, 6.0, 8.0, 30.0)]
    _, records, lines = run(failing(Crash(replica=0, at_s=5.0)), rows)
    routed = [line["replica"] for line in lines if line["event"] == "routed"]
    assert routed == [0, 1, 1, 0]
    assert [r.num_cached_tokens for r in records] == [0, 0, 12, 0]


def test_arrivals_wait_while_nobody_is_up():
    pools = (PoolConfig(),)
    _, records, lines = run(failing(Crash(replica=0, at_s=1.0, down_s=9.0), pools=pools), [(0.5, 8, 4), (3.0, 8, 1)])
    assert events_of(lines, "r0000001") == ["queued", "routed", "admitted", "first_token", "finished"]
    assert records[1].first_scheduled_s == 10.0
    assert records[0].ttft_s == pytest.approx(10.5)
    assert {line["event"]: line["t"] for line in lines if "request" not in line} == {
        "replica_down": 1.0,
        "replica_up": 10.0,
    }


def test_who_waits_for_replicas_that_never_come_back_is_refused_in_the_end():
    pools = (PoolConfig(),)
    never = Crash(replica=0, at_s=2.5, down_s=math.inf)
    report, records, _ = run(failing(never, pools=pools), [(0.0, 8, 2), (1.0, 8, 9), (5.0, 8, 1)])
    assert (report.requests.finished, report.requests.rejected) == (1, 2)
    assert records[1].num_output_tokens == 0


def test_a_slow_replica_is_slow_for_a_while():
    slow = FailureConfig(slowdowns=(Slowdown(replica=0, at_s=2.5, for_s=6.0, factor=3.0),))
    report, records, _ = run(small((PoolConfig(),), failures=slow), [(0.0, 8, 8)])
    # Steps end at 1, 2, 3 (begun before), 6, 9 (begun before its end), 10, 11, 12.
    assert records[0].ended_s == pytest.approx(12.0)
    assert report.failures.num_slowdowns == 1


def test_a_lost_transfer_is_noticed_at_the_end_of_its_lease_and_tried_again():
    config = small(failures=FailureConfig(lose_transfers=1.0), transfer_lease_s=7.0, transfer_retries=1)
    report, records, lines = run(config, [(0.0, 40, 3)])
    lost = [line["t"] for line in lines if line["event"] == "transfer_lost"]
    assert lost == [8.0, 15.0]
    # Then the target computes 41 tokens, and yields the two that are left.
    assert records[0].ended_s == pytest.approx(17.0)
    assert (report.transfers.num_lost, report.transfers.num_recomputed, report.transfers.num_transfers) == (2, 1, 0)


def test_kv_is_lost_with_the_replica_that_holds_it():
    """The prefill replica crashes while its KV is under way; the prompt is computed again, by the other one."""
    pools = (PoolConfig(role="prefill", replicas=2), DECODE)
    report, records, lines = run(failing(Crash(replica=0, at_s=2.0), pools=pools), [(0.0, 40, 3)])
    assert events_of(lines, "r0000000") == [
        *("queued", "routed", "admitted", "first_token", "handed_off", "interrupted"),
        *("routed", "admitted", "handed_off", "transferred", "admitted", "finished"),
    ]
    # Prompt and first token anew at 2 to 3, which yields the second token; 3.28 s of transfer; a step for the third.
    assert records[0].ended_s == pytest.approx(3.0 + 41 * 8 / 100 + 1.0)
    assert report.transfers.num_transfers == 1


def test_blocks_that_bytes_may_still_come_to_are_nobodys_until_the_lease_ends():
    """The decode replica holds one such request: the next can only land when the lost sender's lease is over."""
    pools = (PoolConfig(role="prefill", replicas=2), PoolConfig(role="decode", num_blocks=12))
    crash = Crash(replica=0, at_s=2.0, down_s=100.0)
    _, _, lines = run(failing(crash, pools=pools, transfer_lease_s=20.0), [(0.0, 40, 3)])
    handed_off = [line["t"] for line in lines if line["event"] == "handed_off"]
    assert handed_off == [1.0, 22.0]


def test_who_was_to_decode_is_replaced_and_the_kv_is_sent_to_another():
    pools = (PREFILL, PoolConfig(role="decode", replicas=2))
    _, records, lines = run(failing(Crash(replica=1, at_s=2.0), pools=pools), [(0.0, 40, 3)])
    assert [line["to"] for line in lines if line["event"] == "handed_off"] == [1, 2]
    assert "interrupted" not in events_of(lines, "r0000000")
    assert records[0].ended_s == pytest.approx(2.0 + 3.2 + 2.0)


def test_prompts_wait_with_their_kv_while_nobody_decodes():
    crash = Crash(replica=1, at_s=0.5, down_s=20.0)
    _, records, _ = run(failing(crash, pools=(PREFILL, DECODE)), [(0.0, 40, 3)])
    assert records[0].ttft_s == 1.0
    assert records[0].ended_s == pytest.approx(20.5 + 3.2 + 2.0)


def test_a_cold_start_takes_reading_the_weights_and_a_start():
    config = SimulationConfig(
        model="llama-3.1-8b", gpu="h100", failures=FailureConfig(crashes=(Crash(replica=0, at_s=1.0),))
    )
    simulation = build_simulation(config)
    assert 40.0 < simulation._failures._cold_start_s[0] < 50.0


FAILURES = st.builds(
    FailureConfig,
    crashes=st.lists(
        st.builds(
            Crash,
            replica=st.integers(0, 2),
            at_s=st.integers(0, 60).map(lambda t: t / 4),
            down_s=st.sampled_from([None, 0.5, 4.0, math.inf]),
        ),
        max_size=4,
    ).map(tuple),
    slowdowns=st.lists(
        st.builds(
            Slowdown,
            replica=st.integers(0, 2),
            at_s=st.integers(0, 40).map(lambda t: t / 4),
            for_s=st.sampled_from([1.0, 5.5]),
            factor=st.sampled_from([1.0, 2.0, 7.0]),
        ),
        max_size=2,
    ).map(tuple),
    crash_every_s=st.sampled_from([None, None, 3.0]),
    slow_every_s=st.sampled_from([None, 5.0]),
    down_s=st.sampled_from([None, 1.0]),
    lose_transfers=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 3),
)


@settings(max_examples=60, deadline=None)
@given(
    rows=ROWS,
    failures=FAILURES,
    roles=st.sampled_from(["mmm", "pdd", "ppd", "pdm", "pmm"]),
    style=st.sampled_from(["pull", "push", "layerwise"]),
    num_blocks=st.sampled_from([20, 30]),
    preset=st.sampled_from(["sarathi", "vllm", "orca", "expediter", "static", "sglang"]),
    lease_s=st.sampled_from([0.75, 6.0]),
    seconds=st.sampled_from([ConstantTime(0.25), ContextTime(0.2)]),
    sequences=st.sampled_from([1, 2]),
)
def test_every_request_ends_once_whatever_fails(
    rows, failures, roles, style, num_blocks, preset, lease_s, seconds, sequences
):
    """And the same run gives the same story, with jumps or without."""
    names = {"m": "mixed", "p": "prefill", "d": "decode"}
    told = []
    for jumps in (True, False):
        config = small(
            tuple(PoolConfig(role=names[role]) for role in roles),
            preset=preset,
            failures=failures,
            cold_start_s=2.5,
            transfer=style,
            transfer_lease_s=lease_s,
            num_blocks=num_blocks,
            network_bandwidth=200.0,
            step_time=seconds,
            max_num_batched_tokens=None,
            jumps=jumps,
        )
        report, records, lines = run(config, rows, num_sequences=[sequences] * len(rows))
        assert report.requests.arrived == len(rows) * sequences == len(records)
        finished = [line for line in lines if line["event"] in ("finished", "rejected")]
        assert len(finished) == len({line["request"] for line in finished}) == len(records)
        first_tokens = [line["request"] for line in lines if line["event"] == "first_token"]
        assert len(first_tokens) == len(set(first_tokens))
        for line in finished:
            if line["event"] == "finished":
                assert line["output_tokens"] == rows[int(line["request"][1:8])][2]
        told.append(lines)
    assert told[0] == told[1]


def flags(*words):
    return build_parser().parse_args(["simulate", "--trace", "demo", *words])


def test_failures_come_from_flags_over_a_file(tmp_path):
    path = tmp_path / "failures.toml"
    path.write_text(
        "[failures]\ncrash_every_s = 600\nseed = 3\n"
        "crashes = [{replica = 1, at_s = 5.0, down_s = inf}]\nslowdowns = [{replica = 0, at_s = 1.0, for_s = 2.0}]\n"
    )
    base = load_file_config(path).failures
    assert base == FailureConfig(
        crash_every_s=600.0,
        seed=3,
        crashes=(Crash(replica=1, at_s=5.0, down_s=math.inf),),
        slowdowns=(Slowdown(replica=0, at_s=1.0, for_s=2.0),),
    )
    words = ("--crash", "replica=0,at=2", "--crash", "replica=0,at=9,down=3", "--lose-transfers", "0.5")
    assert failures_of(flags(*words), base) == replace(
        base, crashes=(Crash(replica=0, at_s=2.0), Crash(replica=0, at_s=9.0, down_s=3.0)), lose_transfers=0.5
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--crash", "replica=0"), "--crash 'replica=0': at is missing"),
        (("--crash", "replica=0,when=3"), "'when=3' is not NAME=NUMBER of the names replica, at, down"),
        (("--slow", "replica=x,at=1,for=2"), "'replica=x' is not NAME=NUMBER"),
    ],
)
def test_wrong_flags_are_answered_with_what_is_wrong(words, message):
    with pytest.raises(ConfigurationError, match=message):
        failures_of(flags(*words), FailureConfig())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: failing(Crash(replica=2, at_s=1.0)), "there is no replica 2 to fail; they are numbered 0 to 1"),
        (lambda: Crash(replica=0, at_s=-1.0), "a crash's time must be a number from 0"),
        (lambda: Crash(replica=0, at_s=1.0, down_s=0.0), "must be down for more than 0 s"),
        (lambda: Slowdown(replica=0, at_s=0.0, for_s=1.0, factor=0.5), "a slowdown's factor must be a number from 1"),
        (lambda: FailureConfig(lose_transfers=1.5), "lose_transfers must lie between 0 and 1"),
        (lambda: FailureConfig(crash_every_s=0.0), "crash_every_s must be above 0"),
    ],
)
def test_what_cannot_fail_so_is_said(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()
