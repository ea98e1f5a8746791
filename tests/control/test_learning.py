"""What is thought of the speed of replicas that nobody can look into."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expediter.control.learning import Answer, LearnedTtft, Rivals
from expediter.control.speed import Speed

speeds = st.builds(
    Speed,
    step_s=st.floats(0, 0.1),
    token_s=st.floats(1e-9, 1e-2),
    decode_s=st.floats(0, 0.1),
    overhead_s=st.floats(0, 1),
    is_known=st.just(True),
)


def answers(overhead_s, token_s, decode_s, output_s=0.0, num=300, seed=0, noise=0.0):
    rng = np.random.default_rng(seed)
    for _ in range(num):
        ahead, new, beside = (int(each) for each in rng.integers((0, 10, 0), (20_000, 4000, 30)))
        output = int(rng.integers(200)) if output_s and rng.random() < 0.5 else 0
        taken_s = overhead_s + (ahead + new) * token_s + beside * decode_s + output * output_s
        yield Answer(ahead, new, beside, output, taken_s * rng.uniform(1 - noise, 1 + noise))


@pytest.mark.parametrize("output_s", [0.0, 0.02])
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_parts_are_told_apart(output_s, noise):
    learned = LearnedTtft()
    for answer in answers(0.03, 5e-5, 2e-3, output_s, noise=noise):
        learned.observe(answer)
    speed = learned.speed()
    assert speed.token_s == pytest.approx(5e-5, rel=0.15)
    assert speed.decode_s == pytest.approx(2e-3, rel=0.3)
    assert speed.overhead_s + speed.step_s == pytest.approx(0.03, rel=0.5)


def test_a_burst_of_somebody_else_is_noticed_and_forgotten():
    learned = LearnedTtft()
    for answer in answers(0.03, 5e-5, 0.0):
        learned.observe(answer)
    before = learned.speed().token_s
    for answer in answers(0.15, 25e-5, 0.0, num=40, seed=1):
        learned.observe(answer)
    assert learned.speed().token_s > 2.5 * before
    for answer in answers(0.03, 5e-5, 0.0, seed=2):
        learned.observe(answer)
    assert learned.speed().token_s == pytest.approx(before, rel=0.3)


@settings(max_examples=50)
@given(st.lists(st.builds(Answer, *[st.integers(0, 10**6)] * 4, st.floats() | st.floats(1e-3, 100)), max_size=40))
def test_whatever_is_observed_the_speed_is_usable(observed):
    learned = LearnedTtft()
    for answer in observed:
        learned.observe(answer)
    speed = learned.speed()
    for part in (speed.step_s, speed.token_s, speed.decode_s, speed.overhead_s):
        assert 0 <= part < float("inf")
    assert speed.token_s > 0


PARTS = ("step_s", "overhead_s", "token_s", "decode_s")


def by_definition(speed, others, unheard_s, num_tokens):
    """What to think of a speed beside others, one pair after the other."""

    def first_s(each):
        return each.overhead_s + each.prefill_s(num_tokens, 0)

    hoped = speed
    if unheard_s > 30 and others:
        kept = 0.5 ** ((unheard_s - 30) / 30)
        best = {part: min(getattr(each, part) for each in others) for part in PARTS}
        hoped = replace(
            speed, **{part: min(own, best[part] + (own - best[part]) * kept) for part, own in parts_of(speed).items()}
        )
    own_s = first_s(hoped)
    close = [hoped, *(each for each in others if own_s / 1.4 <= first_s(each) <= own_s * 1.4)]
    return {part: sum(getattr(each, part) for each in close) / len(close) for part in PARTS}


def parts_of(speed):
    return {part: getattr(speed, part) for part in PARTS}


@given(st.lists(speeds, min_size=1, max_size=6), st.floats(0, 1e4), st.floats(1, 1e5))
def test_what_to_think_of_each_is_what_pairs_of_them_say(known, unheard_s, num_tokens):
    rivals = Rivals(known, num_tokens)
    for place, speed in enumerate(known):
        others = [each for other, each in enumerate(known) if other != place]
        thought = parts_of(rivals.thought(speed, unheard_s))
        assert thought == pytest.approx(by_definition(speed, others, unheard_s, num_tokens), rel=1e-9, abs=1e-15)


@given(speeds, st.floats(0, 1e4))
def test_hope_makes_nobody_slower_and_nobody_faster_than_the_fastest(speed, unheard_s):
    fast = Speed(**{part: value / 100 for part, value in parts_of(speed).items()}, is_known=True)
    thought = Rivals([speed, fast], 512).thought(speed, unheard_s)
    for part, own in parts_of(speed).items():
        assert getattr(fast, part) * (1 - 1e-9) <= getattr(thought, part) <= own * (1 + 1e-9)


@given(speeds, st.lists(st.floats(0.85, 1.15), min_size=1, max_size=20), st.floats(1, 1e5))
def test_those_who_hardly_differ_are_equal_to_the_last_bit(speed, factors, num_tokens):
    known = [
        Speed(**{part: value * each for part, value in parts_of(speed).items()}, is_known=True) for each in factors
    ]
    rivals = Rivals(known, num_tokens)
    assert len({rivals.thought(each, 0.0) for each in known}) == 1


def test_those_who_differ_stay_apart():
    fast, slow = Speed(token_s=1e-5, step_s=0.0), Speed(token_s=1e-4, step_s=0.0)
    rivals = Rivals([slow, fast], 512)
    assert (rivals.fastest, rivals.thought(fast, 0.0), rivals.thought(slow, 0.0)) == (fast, fast, slow)
