"""Routers: in turn, and to the least load."""

from collections import Counter

import pytest

from expediter.control.routing import ROUTING_NAMES, LeastLoad, ReplicaSnapshot, RoundRobin, make_router
from expediter.core.errors import CapacityError, ConfigurationError


def replicas(*loads):
    return [
        ReplicaSnapshot(replica_id=number, num_requests=requests, num_pending_tokens=tokens)
        for number, (requests, tokens) in enumerate(loads)
    ]


IDLE = replicas((0, 0), (0, 0), (0, 0))


@pytest.mark.parametrize("name", ROUTING_NAMES)
def test_without_a_replica_there_is_no_capacity(name):
    with pytest.raises(CapacityError, match="no replica is up"):
        make_router(name).route(5, [])


@pytest.mark.parametrize("name", ROUTING_NAMES)
def test_equal_replicas_get_equal_shares(name):
    router = make_router(name)
    assert Counter(router.route(5, IDLE) for _ in range(30)) == {0: 10, 1: 10, 2: 10}


def test_round_robin_goes_by_id_and_passes_over_who_is_away():
    router = RoundRobin()
    assert [router.route(5, IDLE[::-1]) for _ in range(4)] == [0, 1, 2, 0]
    assert [router.route(5, [IDLE[0], IDLE[2]]) for _ in range(3)] == [2, 0, 2]
    assert router.route(5, IDLE) == 0


def test_least_load_looks_at_pending_tokens_then_at_requests():
    assert LeastLoad().route(5, replicas((1, 90), (9, 10), (5, 20))) == 1
    assert LeastLoad().route(5, replicas((4, 10), (3, 10), (0, 20))) == 1


def test_ties_of_least_load_take_turns_among_the_tied_only():
    router = LeastLoad()
    loads = replicas((1, 10), (1, 99), (1, 10))
    assert [router.route(5, loads) for _ in range(4)] == [0, 2, 0, 2]


def test_a_burst_spreads_when_load_counts_at_dispatch():
    router = LeastLoad()
    loads = [[0, 0], [0, 0], [0, 0]]
    for _ in range(12):
        chosen = router.route(8, replicas(*loads))
        loads[chosen][0] += 1
        loads[chosen][1] += 8
    assert loads == [[4, 32]] * 3


def test_a_router_that_does_not_exist_is_answered_with_those_that_do():
    with pytest.raises(ConfigurationError, match="no routing policy 'random'; there are: least_load, round_robin"):
        make_router("random")
