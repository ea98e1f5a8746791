"""Placements on prefill and decode pools, worked out by hand."""

import pytest
from fleets import HandFleet, query, request_of, requests_sharing

from expediter.control.fleet import KvLink
from expediter.control.routing.base import Placement, Refusal
from expediter.control.routing.build import RoutingConfig, make_router
from expediter.control.speed import Speed
from expediter.core.events import RejectReason
from expediter.core.slo import Slo

SPEED = Speed(step_s=0.01, token_s=1e-3, attention_s=0.0, decode_s=1e-3, context_s=0.0, is_known=True)
TWO_AND_TWO = ("prefill", "prefill", "decode", "decode")


def router(name, **config):
    return make_router(RoutingConfig(name=name, **config))


def pools(*pending, roles=TWO_AND_TWO, **profile):
    return HandFleet(*(pending or [0] * len(roles)), roles=roles, speed=SPEED, **profile)


def test_distserve_is_the_shortest_prefill_queue_and_then_the_least_loaded_decode():
    hand = pools(500, 100, 0, 0)
    hand.set(2, num_requests=3)
    policy = router("least_load")
    first = hand.send(policy, request_of(50))
    assert (first.replica_id, first.decode_id) == (1, None)
    assert policy.hand_off(query(request_of(50)), hand.fleet).replica_id == 3


def test_splitwise_picks_both_together():
    hand = pools(500, 100, 0, 0, max_kv_tokens=10_000)
    hand.set(3, num_requests=3)
    decision = hand.send(router("splitwise"), request_of(50))
    assert (decision.replica_id, decision.decode_id) == (1, 2)


def test_splitwise_lends_past_its_threshold_and_takes_back():
    hand, policy = pools(0, 0, 0, 0), router("splitwise", lend_above_tokens=1000)
    for replica_id in (0, 1):
        hand.set(replica_id, num_pending_tokens=1001)
    hand.set(2, num_requests=5)
    decision = hand.send(policy, request_of(50))
    assert (decision.replica_id, policy.lent) == (3, [3])
    assert "decode pool lent it" in decision.because
    again = hand.send(policy, request_of(50))
    assert (again.replica_id, policy.lent) == (3, [3])
    assert "mixed pool" in again.because
    hand.set(3, num_pending_tokens=5000)  # the last one of a pool stays
    assert hand.send(policy, request_of(50)).replica_id in (0, 1)
    hand.set(0, num_pending_tokens=500)
    assert hand.send(policy, request_of(50)).replica_id == 0
    assert policy.lent == []


def test_splitwise_decodes_in_the_prefill_pool_while_caches_are_full():
    hand, policy = pools(max_kv_tokens=1000), router("splitwise")
    for replica_id in (2, 3):
        hand.set(replica_id, num_requests=9, num_context_tokens=890)
    decision = hand.send(policy, request_of(50))
    assert decision.decode_id in (0, 1)
    assert policy.lent == [decision.decode_id]
    hand.set(2, num_requests=2, num_context_tokens=100)
    assert hand.send(policy, request_of(50)).decode_id == 2
    assert policy.lent == []


def test_splitwise_on_mixed_replicas_splits_nothing():
    hand = HandFleet(30, 10, 20)
    decision = hand.send(router("splitwise"), request_of(50))
    assert (decision.replica_id, decision.decode_id) == (1, 1)


def test_conductor_computes_where_the_prefix_is_unless_the_queue_is_longer():
    hand, policy = pools(), router("mooncake")
    first, second, third = requests_sharing(3, 640, 60)
    holder = hand.send(policy, first).replica_id
    hand.set(holder, num_pending_tokens=0, num_requests=0)
    decision = hand.send(policy, second)
    assert (decision.replica_id, decision.num_cached_tokens) == (holder, 640)
    hand.set(holder, num_pending_tokens=1000)  # a second of queue, and no link to copy by
    decision = hand.send(policy, third)
    assert (decision.replica_id, decision.fetch_from_id) == (1 - holder, None)


@pytest.mark.parametrize(("token_s", "is_copied"), [(1e-6, True), (2e-3, False)])
def test_conductor_copies_a_hot_prefix_where_that_is_quicker(token_s, is_copied):
    hand = pools(link=KvLink(latency_s=0.001, token_s=token_s))
    policy = router("mooncake", fetch_ratio=4.0)
    first, second, third = requests_sharing(3, 640, 60)
    holder = hand.send(policy, first).replica_id
    hand.set(holder, num_pending_tokens=300, num_requests=1)
    decision = hand.send(policy, second)
    # With a copy: 0.001 + 640 tokens' time + 0.06 s. Without it: 0.3 s of queue and 0.06 s.
    if is_copied:
        assert (decision.replica_id, decision.fetch_from_id, decision.num_fetched_tokens) == (1 - holder, holder, 640)
        hand.set(1 - holder, num_pending_tokens=0, num_requests=0)
        assert hand.send(policy, third).num_cached_tokens == 640  # it is held there from now on
    else:
        assert (decision.replica_id, decision.fetch_from_id) == (holder, None)


def test_who_holds_nearly_as_much_gets_no_copy():
    hand = pools(link=KvLink(latency_s=0.0, token_s=1e-9))
    policy = router("mooncake", fetch_ratio=4.0)
    long, short = requests_sharing(1, 640, 60)[0], requests_sharing(1, 320, 60)[0]
    holder = hand.send(policy, long).replica_id
    hand.set(holder, num_pending_tokens=10_000)
    assert hand.send(policy, short).replica_id == 1 - holder
    hand.set(1 - holder, num_pending_tokens=0)
    decision = hand.send(policy, requests_sharing(2, 640, 60)[1])
    assert (decision.replica_id, decision.num_cached_tokens, decision.fetch_from_id) == (1 - holder, 320, None)


def asking(ttft_s=10.0, tpot_s=0.1, name="r"):
    return requests_sharing(1, 0, 100, name=name, slo=Slo(ttft_s=ttft_s, tpot_s=tpot_s))[0]


def test_a_first_token_that_would_be_late_is_refused_on_arrival():
    hand = pools(5000, 6000, 0, 0)
    decision = router("mooncake").route(query(asking(ttft_s=5.0)), hand.fleet)
    assert isinstance(decision, Refusal)
    assert decision.reason is RejectReason.OVERLOADED
    assert "5.100 s, the target is 5 s" in decision.message
    assert [each.replica_id for each in decision.candidates] == [0, 1]
    assert isinstance(router("mooncake").route(query(asking(ttft_s=5.2)), hand.fleet), Placement)


@pytest.mark.parametrize("early_rejection", ["none", "early", "predictive"])
def test_slow_decodes_are_refused_before_or_after_the_prompt(early_rejection):
    """A step is 10 ms and 1 ms per request: 100 of them on each of two replicas are too slow for 0.1 s.

    Nothing is known of when they started, so for what is to come they count for nothing.
    """
    hand, policy = pools(), router("mooncake", early_rejection=early_rejection)
    for replica_id in (2, 3):
        hand.set(replica_id, num_requests=100, num_running=100)
    on_arrival = policy.route(query(asking()), hand.fleet)
    assert isinstance(on_arrival, Refusal) is (early_rejection == "early")
    assert isinstance(policy.hand_off(query(asking()), hand.fleet), Refusal)
    assert isinstance(policy.route(query(request_of(5)), hand.fleet), Placement)  # it asked for nothing


def test_predictive_rejection_looks_at_the_moment_when_the_prompt_is_done():
    """Decodes take 10 s. 75 a replica start at 1 s: who would join them is refused, who comes after them is not."""
    policy = router("mooncake", early_rejection="predictive", decode_time_s=10.0)
    hand = pools()
    for number in range(150):
        assert isinstance(policy.route(query(asking(name=f"a{number}."), 0.9), hand.fleet), Placement)
    for number in range(20):
        policy.route(query(asking(name=f"b{number}."), 1.0), hand.fleet)
    refused = policy.route(query(asking(name="c"), 1.0), hand.fleet)
    assert isinstance(refused, Refusal)
    assert "when the prompt is done" in refused.message
    for prefill in (0, 1):
        hand.set(prefill, num_pending_tokens=9500)  # its prompt is done when they have gone
    assert isinstance(policy.route(query(asking(name="d"), 3.0), hand.fleet), Placement)


def test_the_time_of_decoding_is_told_from_how_many_decode():
    """One request starts each second and 60 decode, so each takes 60 s: in 30 s half of them will have gone."""
    policy = router("mooncake", early_rejection="predictive")
    hand = pools(roles=("prefill", "decode"))
    for number in range(100):
        assert isinstance(policy.route(query(asking(name=f"a{number}."), float(number)), hand.fleet), Placement)
    hand.set(1, num_requests=60, num_running=60)
    assert isinstance(policy.route(query(asking(tpot_s=0.06, name="b"), 100.0), hand.fleet), Refusal)
    hand.set(0, num_pending_tokens=30_000)
    assert isinstance(policy.route(query(asking(60.0, tpot_s=0.06, name="c"), 100.0), hand.fleet), Placement)
    assert isinstance(policy.route(query(asking(60.0, tpot_s=0.04, name="d"), 100.0), hand.fleet), Refusal)


def test_prompts_that_would_not_fit_the_decode_caches_are_refused():
    hand = pools(max_kv_tokens=1000)
    policy = router("mooncake", early_rejection="early")
    for replica_id in (2, 3):
        hand.set(replica_id, num_requests=9, num_running=9, num_context_tokens=880)
    refused = policy.route(query(asking()), hand.fleet)
    assert isinstance(refused, Refusal)
    assert "93% of the KV caches" in refused.message


def test_a_mixed_replica_goes_on_with_its_own_prompt():
    decision = router("mooncake").route(query(asking()), HandFleet(0, 0).fleet)
    assert decision.decode_id == decision.replica_id
