"""What replicas were sent lately, and what that says about where a prompt goes that nobody holds."""

import pytest
from fleets import HandFleet, query, request_of, requests_sharing

from expediter.control.routing.build import RoutingConfig, make_router
from expediter.control.routing.parts import RecentWork
from expediter.control.routing.scored import View
from expediter.control.speed import Speed

SPEED = Speed(step_s=0.01, token_s=1e-4, is_known=True)


def view(hand, now_s):
    return View(query(request_of(64), now_s), hand.fleet, hand.fleet.lineup("prefill"), {})


def seconds(recent, hand, now_s):
    work_s, factor = recent.of(view(hand, now_s))
    return [each * factor for each in work_s]


def test_work_fades_and_is_added_at_its_time():
    recent, hand = RecentWork(window_s=10.0), HandFleet(0, 0)
    assert seconds(recent, hand, 0.0) == [0.0, 0.0]
    recent.add(view(hand, 0.0), 0, 8.0)
    assert seconds(recent, hand, 5.0) == pytest.approx([8 * 0.6065, 0.0], rel=1e-3)
    recent.add(view(hand, 5.0), 1, 1.0)
    for now_s in (25.0, 25.0, 500.0):  # counted anew in between
        left = 2.718281828 ** (-now_s / 10)
        assert seconds(recent, hand, now_s) == pytest.approx([8 * left, 1.6487 * left], rel=1e-3)


def test_who_pauses_keeps_its_work_and_who_comes_has_as_much_as_the_others():
    recent, hand = RecentWork(60.0), HandFleet(0, 0, 0)
    seconds(recent, hand, 0.0)
    for place, work_s in enumerate((1.0, 2.0, 6.0)):
        recent.add(view(hand, 0.0), place, work_s)
    hand.fleet.pause(1)
    assert seconds(recent, hand, 0.0) == [1.0, 6.0]
    hand.fleet.resume(1)
    assert seconds(recent, hand, 0.0) == [1.0, 2.0, 6.0]
    hand.fleet.leave(0)
    hand.join(7)
    assert seconds(recent, hand, 0.0) == [4.0, 2.0, 6.0]


def test_a_prompt_that_nobody_holds_goes_where_there_was_least_to_do():
    """Nothing is queued anywhere; whoever computed most in the last minutes gets it last."""
    hand, policy = HandFleet(0, 0, 0, speed=SPEED), make_router(RoutingConfig(name="predicted_ttft"))
    got = {}
    for number, num_tokens in enumerate((6400, 3200, 640)):
        decision = hand.send(policy, requests_sharing(1, num_tokens, 1, first_token=10_000 * number)[0])
        got[num_tokens] = decision.replica_id
        hand.set(decision.replica_id, num_requests=0, num_pending_tokens=0)
    assert len(set(got.values())) == 3
    for number in range(3):  # the first of these makes that of 640 tokens no busier than that of 3200
        decision = hand.send(policy, requests_sharing(1, 640, 1, first_token=50_000 + 1000 * number)[0])
        assert decision.replica_id == got[640]
        hand.set(decision.replica_id, num_requests=0, num_pending_tokens=0)


def test_a_hit_is_worth_a_queue_that_its_loss_would_make_longer():
    """The holder is behind by more than the prompt takes elsewhere, and gets it none the less; not at any price."""
    hand, policy = HandFleet(0, 0, speed=SPEED), make_router(RoutingConfig(name="predicted_ttft"))
    first, *others = requests_sharing(3, 6400, 64)
    holder = hand.send(policy, first).replica_id
    hand.set(holder, num_requests=0, num_pending_tokens=0)
    other = hand.send(policy, requests_sharing(1, 6400, 64, first_token=90_000)[0]).replica_id
    hand.set(other, num_requests=0, num_pending_tokens=0)
    assert other != holder
    hand.set(holder, num_requests=1, num_pending_tokens=12_800)  # 1.28 s; the prompt takes 0.65 s elsewhere
    assert hand.send(policy, others[0]).replica_id == holder
    hand.set(holder, num_requests=1, num_pending_tokens=64_000)
    assert hand.send(policy, others[1]).replica_id == other
