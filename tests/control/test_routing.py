"""Routers that look at no more than the load: in turn, and to the least."""

from collections import Counter

import pytest
from fleets import HandFleet, query, request_of

from expediter.control.routing.base import Refusal
from expediter.control.routing.build import ROUTINGS, RoutingConfig, make_router
from expediter.control.routing.simple import LeastLoad, RoundRobin
from expediter.core.errors import ConfigurationError
from expediter.core.events import RejectReason


def chosen(router, hand, num_requests=1, num_tokens=5):
    return [hand.send(router, request_of(num_tokens)).replica_id for _ in range(num_requests)]


@pytest.mark.parametrize("name", ROUTINGS)
def test_without_a_replica_there_is_no_capacity(name):
    decision = make_router(RoutingConfig(name=name)).route(query(request_of(5)), HandFleet().fleet)
    assert isinstance(decision, Refusal)
    assert decision.reason is RejectReason.NO_REPLICA
    assert make_router(RoutingConfig(name=name)).hand_off(query(request_of(5)), HandFleet().fleet) == decision


@pytest.mark.parametrize("name", ["round_robin", "least_load", "splitwise"])
def test_equal_replicas_get_equal_shares(name):
    assert Counter(chosen(make_router(RoutingConfig(name=name)), HandFleet(0, 0, 0), 30)) == {0: 10, 1: 10, 2: 10}


def test_round_robin_goes_by_id_and_passes_over_who_is_away():
    router, hand = RoundRobin(), HandFleet()
    for replica_id in (2, 0, 1):
        hand.join(replica_id)
    assert chosen(router, hand, 4) == [0, 1, 2, 0]
    hand.fleet.leave(1)
    assert chosen(router, hand, 3) == [2, 0, 2]
    hand.join(1)
    assert chosen(router, hand) == [0]


def test_least_load_looks_at_pending_tokens_then_at_requests():
    hand = HandFleet(90, 10, 20)
    assert chosen(LeastLoad(), hand) == [1]
    hand = HandFleet(10, 10, 20)
    hand.set(0, num_requests=4)
    hand.set(1, num_requests=3)
    assert chosen(LeastLoad(), hand) == [1]


def test_ties_of_least_load_take_turns_among_the_tied_only():
    hand = HandFleet(10, 99, 10)
    assert chosen(LeastLoad(), hand, 4, num_tokens=1) == [0, 2, 0, 2]


def test_a_burst_spreads_when_load_counts_at_dispatch():
    hand = HandFleet(0, 0, 0)
    chosen(LeastLoad(), hand, 12, num_tokens=8)
    assert [load["num_pending_tokens"] for load in hand.loads.values()] == [32] * 3


def test_a_router_that_does_not_exist_is_answered_with_those_that_do():
    with pytest.raises(ConfigurationError, match="no routing policy 'psychic'; there are: round_robin, random"):
        RoutingConfig(name="psychic")
