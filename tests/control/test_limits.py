"""Limits of tenants: never exceeded, never leaked, and room exactly when it was said there would be."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from expediter.control.limits import (
    NOTHING,
    Exceeded,
    Limit,
    Limits,
    Reservation,
    TenantLimits,
    Usage,
)
from expediter.core.errors import ConfigurationError


def book(**limits: int) -> TenantLimits:
    return TenantLimits({"a": Limits(**limits)})


def taken(found: Reservation | Exceeded) -> Reservation:
    assert isinstance(found, Reservation), found
    return found


def refused(found: Reservation | Exceeded) -> Exceeded:
    assert isinstance(found, Exceeded)
    return found


def test_requests_per_minute_and_when_there_is_room():
    limits = book(max_requests_per_minute=3)
    for _ in range(3):
        taken(limits.reserve("a", 10, 0.0)).settle(10, 0.0)
    assert refused(limits.reserve("a", 10, 0.0)) == Exceeded(Limit.REQUESTS, 20.0)
    assert refused(limits.reserve("a", 10, 15.0)).retry_after_s == pytest.approx(5.0)
    taken(limits.reserve("a", 10, 20.0))
    assert refused(limits.reserve("a", 10, 20.0)).retry_after_s == pytest.approx(20.0)


def test_five_that_come_together_cannot_exceed_what_one_alone_would_not():
    """Case 40 (litellm #18730): tokens are reserved up front and settled at the end."""
    limits = book(max_tokens_per_minute=1000)
    found = [limits.reserve("a", 300, 0.0) for _ in range(5)]
    held = [taken(one) for one in found[:3]]
    for one in found[3:]:
        assert refused(one) == Exceeded(Limit.TOKENS, pytest.approx(12.0))
    for one in held:
        one.settle(10, 0.0)
    assert limits.usage("a") == Usage(3, 30, 0)
    taken(limits.reserve("a", 970, 0.0))


def test_what_exceeds_the_reservation_is_charged_at_the_end():
    limits = book(max_tokens_per_minute=600)
    taken(limits.reserve("a", 100, 0.0)).settle(900, 0.0)
    assert refused(limits.reserve("a", 1, 0.0)).retry_after_s == pytest.approx(30.1)
    taken(limits.reserve("a", 1, 30.1))


def test_a_request_that_can_never_fit():
    limits = book(max_tokens_per_minute=100, max_requests_per_minute=1)
    assert refused(limits.reserve("a", 101, 0.0)) == Exceeded(Limit.TOKENS, math.inf)
    taken(limits.reserve("a", 100, 0.0))


def test_concurrency_and_its_expected_room():
    """Case 39 (litellm #27955): the place is free again however the request ended."""
    limits = book(max_concurrent_requests=2)
    first, second = taken(limits.reserve("a", 1, 0.0)), taken(limits.reserve("a", 1, 0.0))
    assert refused(limits.reserve("a", 1, 0.0)) == Exceeded(Limit.CONCURRENCY, 0.5)
    first.settle(1, 8.0)
    third = taken(limits.reserve("a", 1, 8.0))
    assert refused(limits.reserve("a", 1, 8.0)) == Exceeded(Limit.CONCURRENCY, 4.0)
    assert refused(limits.reserve("a", 1, 20.0)) == Exceeded(Limit.CONCURRENCY, 10.0)  # the oldest takes longer
    second.cancel(20.0)
    third.settle(1, 20.0)
    assert limits.usage("a").num_running == 0


def test_the_limit_that_takes_longest_is_named():
    limits = book(max_requests_per_minute=60, max_tokens_per_minute=60)
    taken(limits.reserve("a", 60, 0.0))
    assert refused(limits.reserve("a", 30, 0.0)) == Exceeded(Limit.TOKENS, 30.0)
    for _ in range(2):
        assert refused(limits.reserve("a", 30, 0.0)).limit is Limit.TOKENS  # a refusal counts nothing


def test_ending_twice_does_nothing_the_second_time():
    limits = book(max_requests_per_minute=10, max_tokens_per_minute=100, max_concurrent_requests=1)
    one = taken(limits.reserve("a", 50, 0.0))
    one.settle(20, 0.0)
    one.settle(90, 0.0)
    one.cancel(0.0)
    assert limits.usage("a") == Usage(1, 20, 0)
    other = taken(limits.reserve("a", 50, 0.0))
    other.cancel(0.0)
    other.settle(50, 0.0)
    assert limits.usage("a") == Usage(1, 20, 0)


def test_a_look_counts_nothing():
    limits = book(max_requests_per_minute=1, max_tokens_per_minute=10)
    for _ in range(3):
        assert limits.refusal("a", 0.0) is None
    taken(limits.reserve("a", 10, 0.0))
    assert limits.refusal("a", 0.0) == Exceeded(Limit.REQUESTS, 60.0)
    assert limits.refusal("b", 0.0) is None
    assert limits.usage("a") == Usage(1, 10, 1)


def test_tenants_are_apart_and_who_is_not_named_has_no_limits():
    limits = TenantLimits({"a": Limits(max_requests_per_minute=1), "b": Limits(max_requests_per_minute=1)})
    taken(limits.reserve("a", 1, 0.0))
    taken(limits.reserve("b", 1, 0.0))
    refused(limits.reserve("a", 1, 0.0))
    for _ in range(100):
        taken(limits.reserve("c", 10**9, 0.0))
    assert limits.usage("c").num_running == 100
    assert limits.usage("d") == NOTHING


def test_new_limits_keep_what_is_used():
    limits = book(max_requests_per_minute=2)
    held = [taken(limits.reserve("a", 1, 0.0)) for _ in range(2)]
    limits.replace({"a": Limits(max_requests_per_minute=3, max_concurrent_requests=2)}, 0.0)
    assert refused(limits.reserve("a", 1, 0.0)).limit is Limit.CONCURRENCY
    held[0].settle(1, 0.0)
    taken(limits.reserve("a", 1, 0.0))
    limits.replace({}, 1.0)
    taken(limits.reserve("a", 1, 1.0))
    limits.replace({"a": Limits(max_requests_per_minute=1)}, 1.0)
    taken(limits.reserve("a", 1, 1.0))
    refused(limits.reserve("a", 1, 1.0))


@pytest.mark.parametrize("name", ["max_requests_per_minute", "max_tokens_per_minute", "max_concurrent_requests"])
def test_a_limit_below_one_is_a_mistake(name):
    with pytest.raises(ConfigurationError, match=name):
        Limits(**{name: 0})


@given(
    used=st.lists(st.integers(1, 500), max_size=20),
    needed=st.integers(1, 1000),
    limit=st.integers(1000, 5000),
    start_s=st.floats(0, 1e6),
)
def test_room_comes_when_it_was_said_and_not_before(used, needed, limit, start_s):
    limits = book(max_tokens_per_minute=limit)
    for size in used:
        found = limits.reserve("a", size, start_s)
        if isinstance(found, Reservation):
            found.settle(size, start_s)
    found = limits.reserve("a", needed, start_s)
    if isinstance(found, Exceeded):
        refused(limits.reserve("a", needed, start_s + found.retry_after_s - 0.01))
        taken(limits.reserve("a", needed, start_s + found.retry_after_s))


class Sharing(RuleBasedStateMachine):
    """Two processes share a tenant's limits, and hear of each other at every reservation.

    What was let in is compared with the definition: over any time since the start, the limit's share of that time and
    one minute's worth.
    """

    @initialize(
        requests=st.none() | st.integers(1, 20),
        tokens=st.none() | st.integers(50, 500),
        running=st.none() | st.integers(1, 4),
    )
    def begin(self, requests, tokens, running):
        self.limits = Limits(
            max_requests_per_minute=requests, max_tokens_per_minute=tokens, max_concurrent_requests=running
        )
        self.processes = [TenantLimits({"a": self.limits}) for _ in range(2)]
        self.held: list[list[tuple[Reservation, int]]] = [[], []]
        self.now_s = 0.0
        self.num_requests = self.num_tokens = self.most_running = 0

    @rule(seconds=st.floats(0, 40))
    def wait(self, seconds):
        self.now_s += seconds

    @rule(which=st.integers(0, 1), size=st.integers(1, 600))
    def reserve(self, which, size):
        others = self.processes[1 - which].usage("a")
        found = self.processes[which].reserve("a", size, self.now_s, others)
        running = sum(map(len, self.held))
        if isinstance(found, Reservation):
            self.held[which].append((found, size))
            self.num_requests += 1
            self.num_tokens += size
            self.most_running = max(self.most_running, running + 1)
        elif found.limit is Limit.CONCURRENCY:
            assert running >= self.limits.max_concurrent_requests
        elif found.limit is Limit.TOKENS and math.isinf(found.retry_after_s):
            assert size > self.limits.max_tokens_per_minute
        else:
            later_s = self.now_s + found.retry_after_s
            again = self.processes[which].reserve("a", size, later_s, others)
            self.now_s = later_s
            assert isinstance(again, Reservation) or again.limit is not found.limit
            if isinstance(again, Reservation):
                again.cancel(later_s)

    @precondition(lambda self: any(self.held))
    @rule(data=st.data(), share=st.floats(0, 1))
    def settle(self, data, share):
        which = data.draw(st.sampled_from([i for i in range(2) if self.held[i]]))
        reservation, size = self.held[which].pop(data.draw(st.integers(0, len(self.held[which]) - 1)))
        used = int(size * share)
        reservation.settle(used, self.now_s)
        reservation.settle(size * 10, self.now_s)
        self.num_tokens += used - size

    @precondition(lambda self: any(self.held))
    @rule(data=st.data())
    def cancel(self, data):
        which = data.draw(st.sampled_from([i for i in range(2) if self.held[i]]))
        reservation, size = self.held[which].pop()
        reservation.cancel(self.now_s)
        self.num_requests -= 1
        self.num_tokens -= size

    @invariant()
    def bounds_hold(self):
        if not hasattr(self, "limits"):
            return
        minutes = self.now_s / 60
        if (requests := self.limits.max_requests_per_minute) is not None:
            assert self.num_requests <= requests * (1 + minutes) + 1e-3
        if (tokens := self.limits.max_tokens_per_minute) is not None:
            assert self.num_tokens <= tokens * (1 + minutes) + 1e-3
        if (running := self.limits.max_concurrent_requests) is not None:
            assert self.most_running <= running

    @invariant()
    def nothing_is_lost(self):
        if not hasattr(self, "limits"):
            return
        usages = [process.usage("a") for process in self.processes]
        assert sum(one.num_running for one in usages) == sum(map(len, self.held))
        assert sum(one.num_requests for one in usages) == self.num_requests
        assert sum(one.num_tokens for one in usages) == self.num_tokens

    def teardown(self):
        if not hasattr(self, "limits"):
            return
        for held in self.held:
            for reservation, _ in held:
                reservation.settle(0, self.now_s)
        assert [process.usage("a").num_running for process in self.processes] == [0, 0]


TestSharing = Sharing.TestCase
TestSharing.settings = settings(max_examples=60, stateful_step_count=40)
