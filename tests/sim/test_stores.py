"""Beginnings of prompts that come from storage or from another replica's cache."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_builders import ConstantTime
from test_failures import FAILURES
from test_handoffs import ROWS, run, small

from expediter.assembly.pools import PoolConfig
from expediter.cli.cluster_flags import cluster_fields
from expediter.cli.main import build_parser
from expediter.control.fetching import Source, best_source
from expediter.control.routing.base import Placement, RouteQuery
from expediter.control.routing.simple import RoundRobin
from expediter.control.speed import Speed
from expediter.core.errors import ConfigurationError
from expediter.sim.stores import PrefixStore, StoreConfig

SPEED = Speed(step_s=1.0, token_s=0.1, attention_s=0.0)
PREFIX = list(range(10))


def test_a_fetch_must_beat_computing():
    """100 tokens at 0.1 s each: 60 of them are worth up to 6 s."""
    assert best_source([Source(60, 5.9)], 100, 0, SPEED) == 0
    assert best_source([Source(60, 6.1)], 100, 0, SPEED) is None
    assert best_source([Source(60, 5.9), Source(90, 8.8)], 100, 0, SPEED) == 1
    assert best_source([Source(60, 0.0)], 100, 60, SPEED) is None
    assert best_source([], 100, 0, SPEED) is None
    # A token is always left to be computed.
    assert best_source([Source(4, 0.1)], 4, 2, Speed(step_s=0.0, token_s=1.0)) == 0


def test_a_store_keeps_what_was_used_last():
    store = PrefixStore(4, 2)
    one, two = (bytes(bytearray([n, 0, 0, 0] * 6)) for n in (1, 2))
    store.put(one, "", 0.0)
    assert (store.num_tokens(one, ""), store.num_tokens(one, "salt"), store.num_tokens(two, "")) == (6, 0, 0)
    store.put(two, "", 1.0)
    assert (store.num_tokens(one, ""), store.num_tokens(two, "")) == (2, 6)
    store.put(bytes(80), "", 2.0)  # longer than the store: its beginning
    assert store.num_tokens(bytes(80), "") == 8


ONE = (PoolConfig(),)


def slow_prompts(pools=ONE, **changes):
    """Replicas whose prompts take a second per 8 tokens, so that fetching 8 bytes a token at 100 byte/s is worth it."""
    return small(pools, max_num_batched_tokens=8, num_blocks=14, prefix_caching=True, **changes)


def test_a_prompt_that_fell_out_of_the_cache_comes_back_from_host_memory():
    """The second prompt pushes the first one out of 14 blocks; when it comes again, 36 tokens are read in 2.88 s."""
    stores = (StoreConfig(tier="host", num_bytes=8 * 200, bandwidth=100.0),)
    rows = [(0.0, 40, 2, PREFIX), (20.0, 44, 2), (40.0, 40, 2, PREFIX)]
    report, records, lines = run(slow_prompts(stores=stores), rows)
    fetched = [line for line in lines if line["event"] == "fetched"]
    assert [(line["from"], line["request"]) for line in fetched] == [("host", "r0000002")]
    num_tokens = fetched[0]["tokens"]
    assert records[2].num_cached_tokens >= num_tokens > 0
    assert records[2].ttft_s == pytest.approx(num_tokens * 8 / 100 + 1.0)
    assert report.stores["host"].num_tokens == num_tokens
    _, records, _ = run(slow_prompts(), rows)
    assert records[2].ttft_s > num_tokens * 8 / 100 + 1.0


def test_a_shared_store_serves_who_never_saw_the_prompt():
    stores = (StoreConfig(tier="remote", num_bytes=8 * 400, bandwidth=1000.0),)
    rows = [(0.0, 40, 2, PREFIX), (20.0, 40, 2, PREFIX)]
    config = slow_prompts(pools=(PoolConfig(replicas=2),), stores=stores, routing="round_robin")
    report, records, lines = run(config, rows)
    assert [line["replica"] for line in lines if line["event"] == "routed"] == [0, 1]
    assert records[1].num_cached_tokens == 36
    assert records[1].ttft_s == pytest.approx(36 * 8 / 100 + 1.0)  # its own way in has 100 byte/s
    assert report.stores["remote"].num_fetches == 1


def test_a_store_that_is_too_slow_is_left_alone():
    stores = (StoreConfig(tier="disk", num_bytes=8 * 200, bandwidth=10.0),)
    rows = [(0.0, 40, 2, PREFIX), (20.0, 44, 2), (40.0, 40, 2, PREFIX)]
    report, _, _ = run(slow_prompts(stores=stores), rows)
    assert report.stores["disk"].num_fetches == 0


class Copying(RoundRobin):
    """In turn; the prompt's beginning is copied from replica 0."""

    def route(self, query: RouteQuery, fleet):
        placement = super().route(query, fleet)
        if not isinstance(placement, Placement) or placement.replica_id == 0:
            return placement
        num_tokens = query.num_prompt_tokens - 1
        return Placement(
            replica_id=placement.replica_id, because="a test", fetch_from_id=0, num_fetched_tokens=num_tokens
        )


def test_a_prefix_is_copied_from_another_replica_where_the_router_says_so(monkeypatch):
    monkeypatch.setattr("expediter.assembly.simulation.make_router", lambda config: Copying())
    monkeypatch.setattr("expediter.assembly.simulation.COPYING_ROUTINGS", {"least_load"})
    rows = [(0.0, 40, 2, PREFIX), (20.0, 40, 2, PREFIX)]
    config = slow_prompts(pools=(PoolConfig(replicas=2),), routing="least_load")
    _, records, lines = run(config, rows)
    fetched = [line for line in lines if line["event"] == "fetched"]
    assert [(line["replica"], line["from"], line["tokens"]) for line in fetched] == [(1, "0", 36)]
    assert records[1].ttft_s == pytest.approx(36 * 8 / 100 + 1.0)


@settings(max_examples=60, deadline=None)
@given(
    rows=ROWS,
    failures=FAILURES,
    tiers=st.lists(st.sampled_from(["host", "disk", "remote"]), max_size=3, unique=True),
    roles=st.sampled_from(["mmm", "pdd", "ppd"]),
    copies=st.booleans(),
    num_blocks=st.sampled_from([20, 30]),
    style=st.sampled_from(["pull", "push"]),
    jumps=st.booleans(),
)
def test_every_request_ends_once_whatever_is_fetched_and_fails(
    rows, failures, tiers, roles, copies, num_blocks, style, jumps
):
    names = {"m": "mixed", "p": "prefill", "d": "decode"}
    config = small(
        tuple(PoolConfig(role=names[role]) for role in roles),
        stores=tuple(StoreConfig(tier=tier, num_bytes=8 * 100, bandwidth=500.0) for tier in tiers),
        failures=failures,
        cold_start_s=2.5,
        transfer=style,
        num_blocks=num_blocks,
        max_num_batched_tokens=8,
        network_bandwidth=200.0,
        transfer_lease_s=3.0,
        step_time=ConstantTime(0.25),
        jumps=jumps,
    )
    with pytest.MonkeyPatch.context() as patch:
        if copies:
            patch.setattr("expediter.assembly.simulation.make_router", lambda config: Copying())
            patch.setattr("expediter.assembly.simulation.COPYING_ROUTINGS", {"least_load"})
        told = [run(config, rows)[2] for _ in range(2)]
    assert told[0] == told[1]
    ended = [line["request"] for line in told[0] if line["event"] in ("finished", "rejected")]
    assert len(ended) == len(set(ended)) == len(rows)


def test_stores_come_from_flags():
    args = build_parser().parse_args(
        ["simulate", "--trace", "demo", "--store", "host:gib=64", "--store", "remote:gib=0.5,gbs=12"]
    )
    assert cluster_fields(args)["stores"] == (
        StoreConfig(tier="host", num_bytes=64 << 30),
        StoreConfig(tier="remote", num_bytes=1 << 29, bandwidth=12e9),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tape:gib=1", "no store 'tape'; there are: host, disk, remote"),
        ("host", "'' is not NAME=NUMBER of the names gib, gbs"),
        ("disk:gbs=1", "gib is missing"),
        ("disk:gib=1,gbs=0", "bandwidth must be above 0"),
    ],
)
def test_a_wrong_store_is_answered_with_what_is_wrong(text, message):
    args = build_parser().parse_args(["simulate", "--trace", "demo", "--store", text])
    with pytest.raises(ConfigurationError, match=message):
        cluster_fields(args)
