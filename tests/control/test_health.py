"""Health: nobody is locked out, nobody stays away who is well, and at most one request tries who was not."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from expediter.control.health import Failure, FleetHealth, HealthConfig, HealthState
from expediter.core.errors import ConfigurationError

IDS = range(4)


def health(num=4, **config):
    made = FleetHealth(HealthConfig(**config), np.random.default_rng(0))
    for number in range(num):
        made.join(number, 0.0)
    return made


def probe(made, now_s, failure=None):
    """Answer all probes that are due; return who was asked."""
    asked = made.due_probes(now_s)
    for each in asked:
        made.probed(each, failure, now_s)
    return asked


@pytest.mark.parametrize("failure", [Failure.CONNECT, Failure.TIMEOUT])
def test_one_refused_connection_or_timeout_is_enough(failure):
    made = health()
    assert made.failed(1, failure, 1.0)
    assert list(made.usable(IDS)) == [0, 2, 3]


def test_others_need_some_in_a_row():
    made = health()
    for _ in range(20):
        assert not made.failed(1, Failure.STATUS_5XX, 1.0)
        assert not made.failed(1, Failure.BROKEN, 1.0)
        for _ in range(3):
            made.succeeded(1, 1.0)
    assert made.usable(IDS) == IDS
    assert [made.failed(1, Failure.STATUS_5XX, 1.0) for _ in range(3)] == [False, False, True]


def test_or_too_large_a_share():
    made = health()
    ejected = []
    for _ in range(20):
        made.succeeded(1, 1.0)
        ejected += [made.failed(1, Failure.STATUS_5XX, 1.0), made.failed(1, Failure.STATUS_5XX, 1.0)]
    assert any(ejected)


def test_failures_of_long_ago_do_not_count():
    made = health(max_failures_in_a_row=100)
    for _ in range(9):
        made.failed(1, Failure.STATUS_5XX, 0.0)
    for number in range(9):
        made.succeeded(1, 100.0 + number)
    assert not made.failed(1, Failure.STATUS_5XX, 110.0)
    assert made.state(1) is HealthState.UP


def test_an_ejection_doubles_up_to_its_most_and_starts_anew_after_a_good_time():
    made, lengths, now_s = health(idle_probe_s=1e6, jitter=0.0), [], 0.0
    made.failed(1, Failure.CONNECT, now_s)
    for _ in range(7):
        began_s = now_s
        while not probe(made, now_s, Failure.CONNECT):
            now_s += 0.01
        lengths.append(now_s - began_s)
    assert lengths == pytest.approx([0.25, 0.5, 1.0, 2.0, 4.0, 4.0, 4.0], abs=0.02)
    probe(made, now_s + 4.1)
    assert made.state(1) is HealthState.UP
    now_s += 100.0
    made.failed(1, Failure.CONNECT, now_s)
    assert probe(made, now_s + 0.3)


def test_when_one_that_is_out_may_be_back():
    made = health(jitter=0.0)
    assert made.back_in_s(1, 1.0) == 0.0
    made.failed(1, Failure.CONNECT, 1.0)
    assert made.back_in_s(1, 1.0) == pytest.approx(0.25)
    probe(made, 1.25, Failure.CONNECT)
    assert made.back_in_s(1, 1.25) == pytest.approx(0.5)
    assert made.back_in_s(1, 9.0) == made.back_in_s(7, 9.0) == 0.0


def on_trial(made, now_s, ids=IDS, *, can_retry=True):
    return made.on_trial(ids, now_s, can_retry=can_retry)


def test_one_that_listens_again_is_back_with_the_probe_and_gets_the_next_request():
    made = health()
    made.failed(1, Failure.CONNECT, 0.0)
    assert on_trial(made, 0.5) is None
    assert 1 in probe(made, 1.0)
    assert made.usable(IDS) == IDS
    assert on_trial(made, 1.1) == 1
    assert made.began(1)
    assert on_trial(made, 1.2) is None
    assert made.usable(IDS) == IDS


def test_one_that_failed_at_requests_gets_one_live_request_after_the_probe():
    made = health()
    made.failed(1, Failure.TIMEOUT, 0.0)
    assert 1 not in made.usable(IDS)
    probe(made, 1.0)
    assert made.state(1) is HealthState.PROBING
    assert 1 not in made.usable(IDS)
    assert on_trial(made, 1.0) == 1
    assert on_trial(made, 1.0, [0, 2]) is None  # of another model
    assert made.began(1)
    assert on_trial(made, 1.0) is None
    assert not made.began(1)
    made.abandoned(1)
    assert on_trial(made, 1.0) == 1
    assert made.began(1)
    made.failed(1, Failure.TIMEOUT, 2.0, is_trial=True)
    assert made.state(1) is HealthState.EJECTED
    assert on_trial(made, 2.0) is None
    probe(made, 10.0)
    assert made.began(1)
    made.answered(1, 11.0)
    assert made.usable(IDS) == IDS
    assert on_trial(made, 11.0) is None


def test_a_request_that_cannot_be_tried_again_is_spared_for_a_while():
    made = health(max_trial_wait_s=2.0)
    made.failed(1, Failure.TIMEOUT, 0.0)
    probe(made, 1.0)
    assert on_trial(made, 2.9, can_retry=False) is None
    assert on_trial(made, 3.0, can_retry=False) == 1


@pytest.mark.parametrize("num_hung", [1, 3, 30])
def test_who_hangs_again_and_again_takes_no_more_than_a_share_of_requests_that_come_one_at_a_time(num_hung):
    """The worst for a client that waits for each answer: probes go well, and all requests fail."""
    made, failed, now_s = health(num_hung + 10, max_trial_share=0.25), 0, 0.0
    for number in range(num_hung):
        made.failed(number, Failure.TIMEOUT, 0.0)
    for _ in range(200):
        now_s += 10.0
        probe(made, now_s)
        tried = on_trial(made, now_s, range(num_hung + 10))
        if made.began(num_hung if tried is None else tried):
            failed += 1
            made.failed(tried, Failure.TIMEOUT, now_s, is_trial=True)
    assert 30 <= failed <= 4 + 200 / 4
    for _ in range(num_hung + 4):  # and when they are well, each costs one request and no more
        now_s += 10.0
        probe(made, now_s)
        tried = on_trial(made, now_s, range(num_hung + 10))
        made.began(num_hung if tried is None else tried)
        made.succeeded(num_hung if tried is None else tried, now_s)
    assert made.num_out == 0


def test_what_was_sent_before_an_ejection_does_not_prolong_it():
    made = health(jitter=0.0)
    made.failed(1, Failure.CONNECT, 0.0)
    for _ in range(50):
        assert not made.failed(1, Failure.BROKEN, 0.01)
    assert 1 in made.due_probes(0.26)


def test_when_all_are_out_all_who_listen_are_used():
    made = health()
    for each in IDS:
        for _ in range(3):
            made.failed(each, Failure.STATUS_5XX, 1.0)
    assert list(made.usable(IDS)) == list(IDS)
    made.answered(2, 1.1)
    assert 2 in made.usable(IDS)


def test_when_too_many_are_out_those_who_listen_are_used():
    made = health(max_ejected_share=0.5)
    made.failed(0, Failure.CONNECT, 1.0)
    made.failed(1, Failure.TIMEOUT, 1.0)
    assert list(made.usable(IDS)) == [2, 3]
    made.failed(2, Failure.TIMEOUT, 1.0)
    assert list(made.usable(IDS)) == [3, 1, 2]


def test_nobody_up_means_everybody():
    made = health(2)
    for each in (0, 1):
        made.failed(each, Failure.CONNECT, 1.0)
    assert list(made.usable((0, 1))) == [0, 1]


def test_a_silent_one_is_asked_and_is_back_or_out():
    made = health()
    made.doubt(1, 1.0)
    assert 1 not in made.usable(IDS)
    assert probe(made, 1.0) == [1]
    assert made.usable(IDS) == IDS
    made.doubt(1, 2.0)
    assert made.due_probes(2.0) == [1]
    assert made.probed(1, Failure.TIMEOUT, 3.0)
    assert made.state(1) is HealthState.EJECTED


def test_idle_ones_are_probed_now_and_then():
    made = health(idle_probe_s=5.0)
    assert made.due_probes(4.0) == []
    made.succeeded(0, 4.0)
    assert made.due_probes(6.0) == [1, 2, 3]
    assert made.due_probes(6.0) == []  # they are asked
    made.answered(1, 6.1)
    assert not made.probed(1, Failure.TIMEOUT, 7.0)  # it has answered since
    assert made.probed(2, Failure.TIMEOUT, 7.0)


@pytest.mark.parametrize(
    "config",
    [
        *({"max_failures_in_a_row": 0}, {"jitter": 2.0}, {"window_s": 0.0}, {"max_ejection_s": 0.1}),
        *({"max_trial_share": 0.0}, {"max_trial_share": 1.1}, {"max_trial_wait_s": -1.0}),
    ],
)
def test_figures_out_of_range(config):
    with pytest.raises(ConfigurationError):
        HealthConfig(**config)


class Fleets(RuleBasedStateMachine):
    """Whatever happens: somebody can be tried, at most one request tries each, and whoever is well comes back."""

    @initialize()
    def begin(self):
        self.now_s, self.trials = 0.0, set()
        self.num_bad, self.num_others = 0, 0
        self.health = health()
        self.members = set(IDS)

    @rule(number=st.sampled_from(IDS), failure=st.sampled_from(Failure))
    def fail(self, number, failure):
        is_trial = number in self.trials
        self.trials.discard(number)
        self.num_bad += is_trial
        was_up = self.health.state(number) is HealthState.UP
        ejected = self.health.failed(number, failure, self.now_s, is_trial=is_trial)
        assert not ejected or self.health.state(number) is HealthState.EJECTED
        assert was_up or self.health.state(number) is not HealthState.UP

    @rule(number=st.sampled_from(IDS))
    def answer(self, number):
        self.trials.discard(number)
        self.health.succeeded(number, self.now_s)
        assert number not in self.members or self.health.state(number) is HealthState.UP

    @rule(number=st.sampled_from(IDS), can_retry=st.booleans(), ids=st.sets(st.sampled_from(IDS)))
    def send(self, number, can_retry, ids):
        """One who is told to go on trial does; others go anywhere, as in a panic."""
        tried = self.health.on_trial(ids, self.now_s, can_retry=can_retry)
        if tried is not None:
            assert self.health.awaits_trials
            assert tried in ids & self.members
            assert self.health.state(tried) is not HealthState.EJECTED
            assert self.num_bad <= 4 + self.num_others * 0.25
            number = tried
        if self.health.began(number):
            assert number not in self.trials
            self.trials.add(number)
        else:
            assert tried is None
            self.num_others += 1

    @rule(number=st.sampled_from(IDS))
    def abandon(self, number):
        if number in self.trials:
            self.trials.discard(number)
            self.health.abandoned(number)

    @rule(number=st.sampled_from(IDS))
    def doubt(self, number):
        self.health.doubt(number, self.now_s)

    @rule(number=st.sampled_from(IDS))
    def leave(self, number):
        self.health.leave(number)
        self.members.discard(number)
        self.trials.discard(number)

    @rule(number=st.sampled_from(IDS))
    def join(self, number):
        self.health.join(number, self.now_s)
        self.members.add(number)
        self.trials.discard(number)

    @rule(failure=st.none() | st.sampled_from(Failure), elapsed_s=st.floats(0.0, 10.0))
    def probe(self, failure, elapsed_s):
        self.now_s += elapsed_s
        for number in self.health.due_probes(self.now_s):
            self.health.probed(number, failure, self.now_s)
            if failure is not None:
                self.trials.discard(number)

    @invariant()
    def somebody_can_be_tried(self):
        members = sorted(self.members)
        usable = list(self.health.usable(members))
        assert bool(usable) == bool(members)
        assert set(usable) <= self.members
        up = [each for each in members if self.health.state(each) is HealthState.UP]
        assert set(up) <= set(usable)
        reachable = [each for each in usable if self.health.state(each) is not HealthState.UP]
        assert not reachable or not up or len(up) < len(members) / 4, "who is out gets trials only, unless most are"
        assert self.health.num_out == len(members) - len(up)

    def teardown(self):
        """Five seconds of good news bring everybody back, where requests come one at a time."""
        for number in self.trials:
            self.health.answered(number, self.now_s)
        for _ in range(25):
            self.now_s += 0.2
            for number in self.health.due_probes(self.now_s):
                self.health.probed(number, None, self.now_s)
            if self.members:
                tried = self.health.on_trial(self.members, self.now_s, can_retry=True)
                number = min(self.members) if tried is None else tried
                self.health.began(number)
                self.health.succeeded(number, self.now_s)
        assert self.health.num_out == 0
        assert not self.health.awaits_trials


TestFleets = Fleets.TestCase
TestFleets.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
