"""The fleet: loads are exact although only what changed is looked at, and no policy leaves it."""

from dataclasses import replace

import numpy as np
import pytest
from fleets import HandFleet, query, request_of, requests_sharing
from hypothesis import given, settings
from hypothesis import strategies as st

from expediter.control.fleet import ReplicaProfile, pending_tokens, requests
from expediter.control.learning import LearnedSpeed
from expediter.control.routing.base import Placement, Refusal
from expediter.control.routing.build import ROUTINGS, RoutingConfig, make_router
from expediter.control.speed import Speed
from expediter.core.errors import ConfigurationError, InvariantError
from expediter.core.plan import StepFeatures

ROLES = ("prefill", "decode", "mixed")
SPEED = Speed(step_s=0.01, token_s=1e-4, attention_s=1e-9, decode_s=1e-5, context_s=1e-8, is_known=True)
happenings = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.integers(0, 5), st.sampled_from(ROLES)),
        st.tuples(st.sampled_from(("leave", "pause", "resume")), st.integers(0, 5)),
        st.tuples(st.just("set"), st.integers(0, 5), st.integers(0, 9), st.integers(0, 20_000)),
        st.tuples(st.just("send"), st.integers(0, 3), st.integers(1, 400)),
    ),
    max_size=40,
)


def happen(hand, step):
    if step[0] == "join" and step[1] not in hand.fleet:
        hand.join(step[1], ReplicaProfile(role=step[2], speed=SPEED, max_kv_tokens=2000))
    elif step[0] in ("leave", "pause", "resume"):
        getattr(hand.fleet, step[0])(step[1])
    elif step[0] == "set" and step[1] in hand.fleet:
        hand.set(step[1], num_requests=step[2], num_pending_tokens=step[3], num_context_tokens=step[3])


@settings(max_examples=60, deadline=None)
@given(happenings)
def test_least_totals_and_members_are_those_of_a_walk_over_all(steps):
    hand = HandFleet()
    for step in steps:
        happen(hand, step)
        loads = {replica_id: hand.loads[replica_id] for replica_id in hand.fleet.ids("prefill")}
        assert set(loads) == {each for each in hand.loads if hand.fleet.can(each, "prefill")}
        assert hand.fleet.num_requests("prefill") == sum(load["num_requests"] for load in loads.values())
        for load, names in ((pending_tokens, ("num_pending_tokens", "num_requests")), (requests, ("num_requests",))):
            least = hand.fleet.least(load, "prefill")
            keys = [tuple(each[name] for name in names) for each in loads.values()]
            assert (least is None) == (not keys)
            if least is not None:
                assert tuple(getattr(least, name) for name in names) == min(keys)
        lineup = hand.fleet.lineup("prefill")
        found = {each.replica_id: each.snapshot.num_pending_tokens for each in lineup.members}
        assert found == {replica_id: load["num_pending_tokens"] for replica_id, load in loads.items()}
        assert lineup.places == {member.slot: place for place, member in enumerate(lineup.members)}
        assert lineup.num_requests == [member.snapshot.num_requests for member in lineup.members]
        assert lineup.queue_s == [member.queue_s for member in lineup.members]
        assert lineup.speeds == [member.profile.speed for member in lineup.members]
        assert lineup.speed == (SPEED if lineup.members else None)


def test_one_who_learns_to_be_faster_has_no_speed_in_common_with_the_others():
    hand = HandFleet(0, 0, speed=SPEED)
    assert hand.fleet.lineup("prefill").speed == SPEED
    fast = replace(SPEED, token_s=5e-5)
    hand.fleet.learned(1, fast)
    assert hand.fleet.lineup("prefill").speeds == [SPEED, fast]
    assert hand.fleet.lineup("prefill").speed is None
    hand.fleet.learned(0, fast)
    assert hand.fleet.lineup("prefill").speed == fast


def test_a_pause_keeps_slot_and_knowledge():
    hand, policy = HandFleet(0, 0), make_router(RoutingConfig(name="cache_aware"))
    first, second, third = requests_sharing(3, 640, 10)
    holder = hand.send(policy, first).replica_id
    hand.set(holder, num_requests=0, num_pending_tokens=0, num_context_tokens=0)
    hand.fleet.pause(holder)
    assert hand.send(policy, second).replica_id != holder
    hand.set(1 - holder, num_requests=9)
    hand.fleet.resume(holder)
    decision = hand.send(policy, third)
    assert (decision.replica_id, decision.num_cached_tokens) == (holder, 640)


@pytest.mark.parametrize("name", ROUTINGS)
@settings(max_examples=25, deadline=None)
@given(happenings)
def test_no_policy_picks_who_is_not_there(name, steps):
    """Whoever comes, goes and is busy: the chosen are in the fleet and can do what they are chosen for."""
    hand, policy = HandFleet(), make_router(RoutingConfig(name=name, early_rejection="predictive"))
    for number, step in enumerate(steps):
        happen(hand, step)
        if step[0] != "send":
            continue
        (request,) = requests_sharing(1, 64 * step[1], step[2], name=f"r{number}", session=str(step[1]))
        for decision in (hand.send(policy, request, number / 10), policy.hand_off(query(request), hand.fleet)):
            if isinstance(decision, Refusal):
                assert not hand.fleet.ids("prefill") or not hand.fleet.ids("decode")
                continue
            assert decision.replica_id in hand.fleet
            assert decision.decode_id is None or decision.decode_id in hand.fleet
            assert decision.fetch_from_id is None or decision.fetch_from_id in hand.fleet
            assert 0 <= decision.num_cached_tokens < request.num_prompt_tokens
            assert decision.because
            assert all(each.replica_id in hand.fleet for each in decision.candidates)


@pytest.mark.parametrize("name", ROUTINGS)
def test_the_same_questions_have_the_same_answers(name):
    def answers():
        hand, policy = HandFleet(0, 0, 0, speed=SPEED), make_router(RoutingConfig(name=name, seed=3, temperature=0.5))
        return [hand.send(policy, request, number) for number, request in enumerate(requests_sharing(40, 640, 99))]

    assert answers() == answers()


def test_nobody_joins_twice_and_slots_are_taken_again():
    hand = HandFleet(0, 0, 0)
    with pytest.raises(InvariantError, match="in the fleet already"):
        hand.join(1)
    hand.fleet.leave(1)
    hand.fleet.leave(1)
    hand.join(7)
    assert hand.fleet.slot_of(7) == 1
    assert hand.fleet.num_slots == 3


def test_only_the_marked_are_looked_at():
    hand = HandFleet(*[5] * 50)
    hand.loads[3]["num_pending_tokens"] = 0  # behind the fleet's back
    assert hand.fleet.least(pending_tokens, "prefill").num_pending_tokens == 5
    hand.fleet.mark(3)
    assert hand.fleet.least(pending_tokens, "prefill").replica_id == 3


def test_speed_is_a_line_through_the_model():
    class Model:
        def step_time_s(self, f):
            prompts = 1e-4 * f.num_prefill_tokens + 2e-9 * f.prefill_attention
            return 0.01 + prompts + 1e-5 * f.num_decodes + 1e-8 * f.decode_context_tokens

    speed = Speed.of(Model(), 1000)
    assert speed.attention_s == pytest.approx(2e-9)
    assert speed.token_s == pytest.approx(1e-4 + 0.01 / 1000)  # each full step has its constant
    assert speed.decode_s == pytest.approx(1e-5, rel=0.01)
    assert speed.context_s == pytest.approx(1e-8)
    assert speed.prefill_s(10, 0) == pytest.approx(0.01, rel=0.01)
    assert speed.prefill_s(5000, 3000) == pytest.approx(5000 * 1.1e-4 + 2e-9 * 5000 * 5500)
    assert speed.queue_s(0, 0, 0, 0) == 0
    assert speed.queue_s(0, 0, 4, 0) < speed.queue_s(2000, 1, 4, 0) < speed.queue_s(2000, 1, 40, 10**6)


def test_speed_is_learned_from_steps():
    """A second per 1,000 prompt tokens: after some steps a replica is known to be that fast, and ranked so."""
    learned, hand = LearnedSpeed(), HandFleet(1000, 1000)
    speeds = []
    for step in range(300):
        num_tokens = 100 + step % 7 * 50
        features = StepFeatures(num_tokens, 1, 0, 0, num_tokens**2 / 2)
        speeds.append(learned.observe(step, features, 0.01 + num_tokens * 1e-3, 500))
    assert [step for step, speed in enumerate(speeds) if speed is not None] == [31, 255]
    speed = speeds[255]
    assert speed.prefill_s(400, 0) == pytest.approx(0.4, rel=0.1)
    hand.fleet.learned(1, speed)
    assert hand.fleet.members("prefill")[1].queue_s == pytest.approx(1.0, rel=0.1)


def test_a_threshold_out_of_range_is_refused():
    for wrong in (
        {"max_relative_load": 0.5},
        {"early_rejection": "late"},
        {"prefix_knowledge": "psychic"},
        {"temperature": -1.0},
        {"decode_time_s": float("nan")},
        {"index_max_bytes": 3},
    ):
        with pytest.raises(ConfigurationError):
            RoutingConfig(**wrong)


def test_softmax_draws_the_cheaper_more_often():
    hand = HandFleet(0, 20_000, 40_000, speed=SPEED)
    policy = make_router(RoutingConfig(name="dynamo", temperature=0.5))
    counts = np.zeros(3)
    for number in range(600):
        decision = policy.route(query(request_of(5, f"r{number}")), hand.fleet)
        assert isinstance(decision, Placement)
        counts[decision.replica_id] += 1
    expected = np.exp(-np.array([0, 0.5, 1]) / 0.5)
    assert counts / 600 == pytest.approx(expected / expected.sum(), abs=0.06)
