"""How long a backend may be silent."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expediter.control.patience import Patience, PatienceConfig, Silence, Suspicion, size_of
from expediter.core.errors import ConfigurationError

CONFIG = PatienceConfig(min_progress_s=1.0, max_progress_s=60.0, factor=4.0)


@pytest.mark.parametrize("silence", [Silence.START, Silence.WHOLE])
def test_a_first_byte_of_which_nothing_is_known_may_take_as_long_as_anything(silence):
    assert Patience(CONFIG).limit_s(0, "m", silence, 1.0) == 60.0


def test_who_has_begun_to_stream_goes_on_within_tens_of_seconds_known_or_not():
    assert 20 <= Patience(PatienceConfig()).limit_s(0, "m", Silence.GAP, 1.0) <= 60
    patience = Patience(PatienceConfig(usual_gap_s=20.0))
    assert patience.limit_s(0, "m", Silence.GAP, 1.0) == pytest.approx(80.0)
    # It has been longer in this very stream already.
    assert patience.limit_s(0, "m", Silence.GAP, 1.0, own_gap_s=50.0) == pytest.approx(200.0)


def test_the_same_model_elsewhere_says_more_than_another_model():
    patience = Patience(CONFIG)
    patience.borne(0, "slow", Silence.GAP, 5.0, 1.0, now_s=0.0)
    assert patience.limit_s(1, "fast", Silence.GAP, 1.0) == pytest.approx(20.0)
    patience.borne(0, "fast", Silence.GAP, 0.5, 1.0, now_s=0.0)
    assert patience.limit_s(1, "fast", Silence.GAP, 1.0) == pytest.approx(2.0)
    assert patience.limit_s(0, "slow", Silence.GAP, 1.0) == pytest.approx(20.0)
    patience.forget(0)
    assert patience.limit_s(0, "slow", Silence.GAP, 1.0) == pytest.approx(40.0)


def test_several_times_what_is_usual_for_the_size():
    patience = Patience(CONFIG)
    patience.borne(0, "m", Silence.WHOLE, 2.0, size_of(Silence.WHOLE, 100, 64), now_s=0.0)
    assert patience.limit_s(0, "m", Silence.WHOLE, size_of(Silence.WHOLE, 100, 64)) == pytest.approx(8.0)
    # Twice the size, twice the time; a stream's first byte is another matter, and not known yet.
    assert patience.limit_s(0, "m", Silence.WHOLE, size_of(Silence.WHOLE, 100, 192)) == pytest.approx(16.0)
    assert patience.limit_s(0, "m", Silence.START, size_of(Silence.START, 100, 64)) == 60.0


def test_prompts_that_wait_there_may_all_be_computed_first():
    patience = Patience(CONFIG)
    patience.borne(0, "m", Silence.GAP, 0.5, 1.0, now_s=0.0)
    assert patience.limit_s(0, "m", Silence.GAP, 1.0, num_pending_tokens=10_000) == pytest.approx(2.0), "nothing known"
    patience.borne(0, "m", Silence.START, 1.0, size_of(Silence.START, 1488, 0), now_s=0.0)
    assert patience.limit_s(0, "m", Silence.START, size_of(Silence.START, 1488, 0)) == pytest.approx(4.0)
    for silence in (Silence.START, Silence.GAP):
        limit_s = patience.limit_s(0, "m", silence, 1.0, num_pending_tokens=10_000)
        assert limit_s == pytest.approx(20.0), "five times the work"
    assert patience.limit_s(0, "m", Silence.GAP, 1.0, num_pending_tokens=10**9) == 60.0


def test_a_new_backend_is_borne_what_is_usual_elsewhere():
    patience = Patience(CONFIG)
    patience.borne(0, "m", Silence.GAP, 0.5, 1.0, now_s=0.0)
    patience.borne(1, "m", Silence.GAP, 2.0, 1.0, now_s=0.0)
    assert patience.limit_s(2, "m", Silence.GAP, 1.0) == pytest.approx(8.0)
    patience.forget(1)
    assert patience.limit_s(2, "m", Silence.GAP, 1.0) == pytest.approx(2.0)


def test_who_says_something_to_others_is_busy_and_not_hung():
    patience = Patience(CONFIG)
    assert patience.is_over(8.0, 8.0, limit_s=8.0)
    assert not patience.is_over(30.0, 0.2, limit_s=8.0), "it answers others"
    assert not patience.is_over(0.1, 30.0, limit_s=8.0), "this one has just been sent there"
    assert patience.is_over(60.0, 0.2, limit_s=8.0), "as long as anything may take"


def test_a_long_silence_fades():
    patience = Patience(CONFIG)
    patience.borne(0, "m", Silence.GAP, 10.0, 1.0, now_s=0.0)
    patience.borne(0, "m", Silence.GAP, 0.5, 1.0, now_s=1.0)
    assert patience.limit_s(0, "m", Silence.GAP, 1.0) == pytest.approx(40.0)
    patience.borne(0, "m", Silence.GAP, 0.5, 1.0, now_s=3000.0)
    assert patience.limit_s(0, "m", Silence.GAP, 1.0) == pytest.approx(2.0)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2), st.sampled_from("mn"), st.sampled_from(Silence), st.floats(0, 1e4), st.floats(0.1, 1e6)
        ),
        max_size=20,
    ),
    st.integers(0, 3),
    st.sampled_from("mno"),
    st.sampled_from(Silence),
    st.one_of(st.floats(0.1, 1e6), st.just(math.inf)),
    st.floats(0, 1e3),
)
def test_limits_stay_within_their_bounds(heard, backend_id, model, silence, size, own_gap_s):
    patience = Patience(CONFIG)
    for number, (each, its_model, kind, length_s, its_size) in enumerate(heard):
        patience.borne(each, its_model, kind, length_s, its_size, now_s=float(number))
    limit_s = patience.limit_s(backend_id, model, silence, size, own_gap_s=own_gap_s)
    assert max(1.0, min(60.0, 4 * own_gap_s)) <= limit_s <= 60.0


@pytest.mark.parametrize(
    "fields", [{"min_progress_s": 0.0}, {"max_progress_s": 1.0}, {"factor": 0.5}, {"usual_gap_s": 0.0}]
)
def test_bounds_out_of_order_are_refused(fields):
    with pytest.raises(ConfigurationError):
        PatienceConfig(**fields)


def test_who_is_silent_is_asked_later_and_later_until_it_says_something():
    suspicion = Suspicion(1.0)
    asked = [now / 4 for now in range(160) if suspicion.arises(0.0, now / 4)]
    assert asked == [1.25, 3.5, 7.75, 16.0, 24.25, 32.5]
    assert not suspicion.arises(40.0, 41.0)  # it has said something
    assert suspicion.arises(40.0, 41.25)
    assert not suspicion.arises(40.0, 42.5)


@given(st.lists(st.tuples(st.floats(0.0, 20.0), st.booleans()), max_size=40))
def test_nobody_is_asked_twice_in_a_moment_and_nobody_is_left_alone_for_long(steps):
    suspicion, heard_s, asked_s, now_s = Suspicion(1.0), 0.0, 0.0, 0.0
    for elapsed_s, speaks in steps:
        now_s += elapsed_s
        heard_s = now_s if speaks else heard_s
        is_asked, since_s = suspicion.arises(heard_s, now_s), now_s - max(heard_s, asked_s)
        assert not is_asked or since_s > 1.0
        assert is_asked or since_s <= 8.0
        asked_s = now_s if is_asked else asked_s
