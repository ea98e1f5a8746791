"""Running requests that move to replicas with more room."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_builders import ConstantTime, ContextTime
from test_failures import FAILURES
from test_handoffs import ROWS, run, small

from expediter.assembly.pools import PoolConfig
from expediter.control.migration import MemoryLoad, MigrationConfig, choose, pairs
from expediter.core.errors import ConfigurationError
from expediter.scheduling.passage import Movable

CONFIG = MigrationConfig(source_below_tokens=20, target_above_tokens=100)
TWO = (PoolConfig(replicas=2),)


def test_freeness_is_what_each_running_request_can_grow_by():
    assert MemoryLoad(0, 1000, 400, 3).freeness == 200
    assert MemoryLoad(0, 1000, 1600, 3).freeness == -200  # a queue that does not fit
    assert MemoryLoad(0, 1000, 0, 0).freeness == 1000


def test_the_least_free_gives_to_the_most_free():
    full, fuller, free, freer = MemoryLoad(0, 200, 190, 1), MemoryLoad(1, 200, 198, 1), MemoryLoad(2, 200, 20, 1), None
    freer = MemoryLoad(3, 200, 0, 0)
    assert pairs([full, fuller, free, freer], CONFIG) == [(1, 3), (0, 2)]
    assert pairs([full, fuller], CONFIG) == []
    assert pairs([free, freer], CONFIG) == []
    # One that is full because of its queue alone has nobody to give.
    assert pairs([MemoryLoad(4, 200, 300, 0), freer], CONFIG) == []
    assert pairs([], CONFIG) == []


def test_the_one_that_goes_is_of_low_priority_and_short():
    assert choose([Movable("a", 0, 5), Movable("b", 1, 50), Movable("c", 1, 9)]) == Movable("c", 1, 9)
    assert choose([]) is None


def test_a_replica_cannot_give_and_take_at_once():
    with pytest.raises(ConfigurationError, match="must not be above"):
        MigrationConfig(source_below_tokens=2000)
    with pytest.raises(ConfigurationError, match="cannot move every 0"):
        MigrationConfig(interval_s=0)


def test_a_request_goes_on_where_there_is_room_and_stops_for_the_last_bytes_only():
    """Two long ones meet on replica 0, round robin putting short ones on the other; one moves, its KV mostly ahead."""
    rows = [(0.0, 60, 60), (0.1, 8, 1), (0.2, 60, 60)]
    config = small(
        TWO,
        routing="round_robin",
        num_blocks=40,
        network_bandwidth=200.0,
        migration=MigrationConfig(interval_s=2.0, source_below_tokens=20, target_above_tokens=60),
    )
    report, _, lines = run(config, rows)
    assert report.num_migrations == 1
    assert report.requests.finished == 3
    moved = [line for line in lines if line["event"] == "transferred"]
    assert len(moved) == 1
    # The request stops for a step's worth of tokens and the boundary of steps, not for the 2.4 s of the whole copy.
    assert moved[0]["exposed_s"] <= 1.2
    assert moved[0]["bytes"] < 10 * 8
    assert {line["replica"] for line in lines if line["event"] == "finished" and line["request"] != "r0000001"} == {
        0,
        1,
    }
    alone, _, _ = run(small(TWO, routing="round_robin", num_blocks=40), rows)
    assert alone.num_preemptions > report.num_preemptions == 0


@settings(max_examples=60, deadline=None)
@given(
    rows=ROWS,
    failures=FAILURES,
    roles=st.sampled_from(["mmm", "pdd", "mmp"]),
    preset=st.sampled_from(["sarathi", "vllm", "expediter"]),
    num_blocks=st.sampled_from([20, 24]),
    interval_s=st.sampled_from([0.3, 1.0]),
    bandwidth=st.sampled_from([50.0, 1000.0]),
    seconds=st.sampled_from([ConstantTime(0.25), ContextTime(0.2)]),
    jumps=st.booleans(),
)
def test_every_request_ends_once_however_it_moves(
    rows, failures, roles, preset, num_blocks, interval_s, bandwidth, seconds, jumps
):
    names = {"m": "mixed", "p": "prefill", "d": "decode"}
    config = small(
        tuple(PoolConfig(role=names[role]) for role in roles),
        preset=preset,
        routing="round_robin",
        failures=failures,
        cold_start_s=2.5,
        num_blocks=num_blocks,
        network_bandwidth=bandwidth,
        transfer_lease_s=3.0,
        max_num_batched_tokens=None,
        migration=MigrationConfig(interval_s=interval_s, source_below_tokens=40, target_above_tokens=40),
        step_time=seconds,
        jumps=jumps,
    )
    told = [run(config, rows)[2] for _ in range(2)]
    assert told[0] == told[1]
    ended = [line for line in told[0] if line["event"] in ("finished", "rejected")]
    assert len(ended) == len({line["request"] for line in ended}) == len(rows)
    for line in ended:
        if line["event"] == "finished":
            assert line["output_tokens"] == rows[int(line["request"][1:])][2]
