"""What went wrong for other routers, each as a whole kind."""

import numpy as np
import pytest
from fleets import ClosedLoop, HandFleet, request_of, requests_sharing
from hypothesis import given, settings
from hypothesis import strategies as st

from expediter.control.routing.build import RoutingConfig, make_router
from expediter.control.speed import Speed

CACHE_POLICIES = ["cache_aware", "predicted_ttft"]
SPEED = Speed(step_s=0.01, token_s=1e-4, attention_s=1e-9, decode_s=1e-5, context_s=1e-8, is_known=True)


def router(name, **config):
    return make_router(RoutingConfig(name=name, **config))


@pytest.mark.parametrize("name", CACHE_POLICIES)
@pytest.mark.parametrize(
    ("num_replicas", "per_replica", "num_blocks", "num_own"),
    [(4, 4, 16, 20), (4, 4, 16, 100), (4, 8, 64, 1), (8, 2, 32, 50), (5, 3, 16, 400)],
)
def test_one_shared_prefix_floods_nobody_and_stays_hit(name, num_replicas, per_replica, num_blocks, num_own):
    """Many requests begin alike, so many at a time: nobody has half of them, and nine in ten hits stay."""
    requests = requests_sharing(24 * num_replicas, 64 * num_blocks, num_own)
    loop = ClosedLoop(HandFleet(*[0] * num_replicas, speed=SPEED), router(name), per_replica * num_replicas)
    loop.run(requests)
    assert max(loop.sent.values()) <= len(requests) * (1.5 / num_replicas + 2 / (per_replica * num_replicas)) + 2
    assert max(loop.sent.values()) <= len(requests) / 2
    best = (len(requests) - 1) * 64 * num_blocks / loop.num_tokens
    assert loop.hit_rate >= 0.9 * best


@pytest.mark.parametrize("name", [*CACHE_POLICIES, "preble", "session"])
def test_many_prefixes_keep_their_hits_under_imbalance(name):
    """Sessions of very different lengths and rates: what one of them does to its replica costs others no hits."""
    rng = np.random.default_rng(1)
    num_turns = rng.geometric(0.1, 40)
    turns = [(session, turn) for session in range(40) for turn in range(num_turns[session])]
    rng.shuffle(turns)
    seen = {}
    requests = []
    for session, _ in turns:
        turn = seen[session] = seen.get(session, 0) + 1
        (request,) = requests_sharing(1, 640 * turn, 1, first_token=100_000 * session, session=str(session))
        requests.append(request)
    loop = ClosedLoop(HandFleet(0, 0, 0, 0, speed=SPEED), router(name), 24).run(requests)
    repeats = sum(request.num_prompt_tokens - 640 for request in requests)
    assert loop.num_hits >= 0.9 * repeats
    assert max(loop.sent.values()) <= 0.4 * len(requests)


@pytest.mark.parametrize("name", [*CACHE_POLICIES, "dynamo"])
def test_a_miss_goes_to_the_least_busy_whoever_holds_what(name):
    """The idle replica holds most, the busy one nothing: a prompt that nobody holds goes to the idle one."""
    hand = HandFleet(0, 0, speed=SPEED)
    policy = router(name)
    hand.set(1, num_requests=20, num_pending_tokens=20_000, num_context_tokens=90_000)
    for number in range(5):
        assert hand.send(policy, requests_sharing(1, 6400, 1, first_token=7000 * number)[0]).replica_id == 0
    hand.set(0, num_requests=1, num_pending_tokens=0, num_context_tokens=6000)
    assert hand.send(policy, requests_sharing(1, 640, 1, first_token=900_000)[0]).replica_id == 0


@pytest.mark.parametrize("name", CACHE_POLICIES)
def test_long_prompts_with_short_answers_make_nobody_hot(name):
    """A burst of 32k tokens in, one out, in one instant: load counts at dispatch."""
    hand = HandFleet(0, 0, 0, 0, speed=SPEED)
    policy = router(name)
    for number in range(16):
        hand.send(policy, requests_sharing(1, 32_000, 1, first_token=40_000 * number)[0])
    assert [load["num_requests"] for load in hand.loads.values()] == [4, 4, 4, 4]


@pytest.mark.parametrize("name", CACHE_POLICIES)
def test_the_holder_is_left_only_while_it_is_overloaded(name):
    """The request at hand goes elsewhere; the next one, when the load is even again, finds its prefix."""
    hand = HandFleet(0, 0, 0, speed=SPEED)
    policy = router(name)
    first, second, third = requests_sharing(3, 6400, 64)
    found = hand.send(policy, first)
    holder = found.replica_id
    assert not found.is_held_back
    hand.set(holder, num_requests=8, num_pending_tokens=0)
    other = hand.send(policy, second)
    assert other.replica_id != holder
    assert "has more than its share of the requests" in other.because
    assert other.is_held_back
    hand.set(holder, num_requests=0)
    for replica_id in hand.loads:
        hand.set(replica_id, num_requests=0, num_pending_tokens=0)
    assert hand.send(policy, third).num_cached_tokens == 6400


def test_a_tenant_with_a_popular_prefix_leaves_room_for_others():
    """One tenant's misses on one replica stay within the quantum of those on the others."""
    policy = router("predicted_ttft", tenant_quantum_tokens=10_000, max_relative_load=100.0)
    hand = HandFleet(0, 0, 0, 0, speed=SPEED)
    served = dict.fromkeys(hand.loads, 0)
    for request in requests_sharing(200, 640, 1280, tenant="a"):
        decision = hand.send(policy, request)
        hand.set(decision.replica_id, num_requests=0, num_pending_tokens=0)
        served[decision.replica_id] += request.num_prompt_tokens - decision.num_cached_tokens
    assert max(served.values()) - min(served.values()) <= 10_000 + 2 * 1921


@pytest.mark.parametrize("name", ["cache_aware", "predicted_ttft", "dynamo", "session", "consistent_hash"])
def test_a_replica_that_leaves_and_comes_back_holds_nothing(name):
    hand = HandFleet(0, 0, speed=SPEED)
    policy = router(name)
    first, second, third = requests_sharing(3, 6400, 64, session="s")
    gone = hand.send(policy, first).replica_id
    hand.set(gone, num_requests=0, num_pending_tokens=0, num_context_tokens=0)
    hand.fleet.leave(gone)
    other = hand.send(policy, second)
    assert other.replica_id != gone
    assert other.num_cached_tokens == 0
    hand.set(other.replica_id, num_requests=0, num_pending_tokens=0, num_context_tokens=0)
    hand.join(gone)
    again = hand.send(policy, third)
    if name != "consistent_hash":
        assert again.replica_id == other.replica_id
    if hasattr(policy, "caches"):
        assert again.num_cached_tokens == 6400


@pytest.mark.parametrize("name", [*CACHE_POLICIES, "preble", "dynamo"])
def test_replicas_that_keep_no_prompts_hold_none(name):
    hand, policy = HandFleet(0, 0, speed=SPEED, caches_prefixes=False), router(name)
    decisions = [hand.send(policy, request) for request in requests_sharing(6, 6400, 64)]
    assert [decision.num_cached_tokens for decision in decisions] == [0] * 6
    assert {load["num_requests"] for load in hand.loads.values()} == {3}


def test_sessions_stay_and_move_when_they_must():
    policy, hand = router("session"), HandFleet(0, 0, 0)
    home = hand.send(policy, request_of(64, "a", session="s")).replica_id
    for number in range(4):
        hand.set(home, num_requests=2, num_pending_tokens=500)
        assert hand.send(policy, request_of(64, f"b{number}", session="s")).replica_id == home
    hand.set(home, num_requests=50)
    moved = hand.send(policy, request_of(64, "c", session="s"))
    assert moved.replica_id != home
    assert "more than its share" in moved.because
    assert hand.send(policy, request_of(64, "d", session="s")).replica_id == moved.replica_id
    hand.set(home, num_requests=0, num_pending_tokens=0)
    assert hand.send(policy, request_of(64, "e", session="s", tenant="other")).replica_id != moved.replica_id


@settings(max_examples=40, deadline=None)
@given(st.sets(st.integers(0, 40), min_size=2, max_size=9), st.data())
def test_of_consistent_hashing_only_keys_of_who_comes_or_goes_move(ids, data):
    policy, hand = router("consistent_hash"), HandFleet()
    for replica_id in sorted(ids):
        hand.join(replica_id)

    def places():
        """Return where each key goes while nobody has anything to do."""
        found = {}
        for number in range(60):
            found[number] = hand.send(policy, request_of(5, f"r{number}", session=str(number))).replica_id
            hand.set(found[number], num_requests=0)
        return found

    before = places()
    leaving = data.draw(st.sampled_from(sorted(ids)))
    hand.fleet.leave(leaving)
    without = places()
    assert all(without[key] == before[key] for key in before if before[key] != leaving)
    assert leaving not in without.values()
    hand.join(leaving)
    assert places() == before


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 8), st.integers(1, 80), st.integers(1, 5))
def test_bounded_hashing_keeps_every_load_within_its_bound(num_replicas, num_requests, num_keys):
    policy, hand = router("consistent_hash"), HandFleet(*[0] * num_replicas)
    for number in range(num_requests):
        hand.send(policy, request_of(5, f"r{number}", session=str(number % num_keys)))
        most = -(-1.5 * (number + 1) // num_replicas)
        assert max(load["num_requests"] for load in hand.loads.values()) <= most
