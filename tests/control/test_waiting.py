"""The central queue: nothing lost, bounds kept, its policy's order and ageing, and honest times to come back."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from expediter.control.draining import excess_s, is_hopeless
from expediter.control.waiting import Cause, CentralQueue, QueueConfig, QueueFull
from expediter.core.errors import ConfigurationError
from expediter.core.request import Request
from expediter.core.slo import Slo
from expediter.scheduling.build import ORDERINGS


def request(name, tokens=10, *, at_s=0.0, tenant="", priority=0, ttft_s=None, refuse_late=False):
    return Request(
        request_id=name,
        prompt=np.arange(tokens, dtype=np.int32),
        max_tokens=10,
        arrival_s=at_s,
        tenant=tenant,
        priority=priority,
        slo=Slo(ttft_s=ttft_s),
        refuse_late=refuse_late,
    )


def make(ordering="fcfs", max_requests=100, max_tokens=10_000, weights=None):
    return CentralQueue(QueueConfig(ordering=ordering, max_requests=max_requests, max_tokens=max_tokens), weights)


def turns(queue, now_s=0.0):
    """Ids in the order in which they get a replica."""
    order = []
    while (one := queue.first(now_s)) is not None:
        queue.start(one, now_s)
        order.append(one.request_id)
    return order


def is_empty(queue):
    parts = (queue._waiting, queue._started, queue._parts, queue._causes)
    return not any(parts) and not len(queue) and not queue.num_tokens and queue.next_expiry_s == math.inf


# -- order -----------------------------------------------------------------------------------------------------------


def test_priorities_go_first_and_age_wins_in_the_end():
    queue = make("priority")
    queue.offer(request("low", priority=5), 0.0)
    queue.offer(request("high", at_s=1.0, priority=-5), 1.0)
    assert turns(queue, 1.0) == ["high", "low"]
    queue.offer(request("old", at_s=2.0, priority=5), 2.0)
    queue.offer(request("new", at_s=700.0, priority=-5), 700.0)
    assert turns(queue, 700.0) == ["old", "new"]


def test_deadlines_in_order():
    queue = make("earliest_deadline")
    for name, ttft_s in (("late", 9.0), ("never", None), ("soon", 1.0)):
        queue.offer(request(name, ttft_s=ttft_s), 0.0)
    assert turns(queue) == ["soon", "late", "never"]


def test_shares_go_by_weight_and_count_outputs():
    """Two tenants that always wait get prompt and output tokens in proportion to their weights."""
    queue = make("fair_share", weights={"a": 3.0, "b": 1.0})
    served = {"a": 0, "b": 0}
    number = 0
    for step in range(400):
        now_s = float(step)
        for tenant in served:
            while sum(one.request.tenant == tenant for one in queue._waiting.values()) < 2:
                queue.offer(request(f"r{number}", tenant=tenant, at_s=now_s), now_s)
                number += 1
        turn = queue.first(now_s)
        queue.start(turn, now_s)
        output = 30 if turn.tenant == "a" else 5
        queue.end(turn.request_id, output)
        served[turn.tenant] += 10 + 2 * output
    assert served["a"] / served["b"] == pytest.approx(3.0, rel=0.1)


def test_every_ordering_of_a_replica_works_here():
    for name in ORDERINGS:
        queue = make(name)
        names = [f"r{number}" for number in range(5)]
        for number, one in enumerate(names):
            queue.offer(
                request(one, 5 + number, at_s=float(number), tenant="ab"[number % 2], ttft_s=50.0), float(number)
            )
        order = turns(queue, 5.0)
        assert sorted(order) == names, name
        for one in order:
            queue.prefilled(one)
            queue.end(one, 7)
            queue.end(one, 7)
        assert is_empty(queue), name


def test_the_order_is_that_of_the_replicas_behind_unless_it_is_named():
    assert QueueConfig().or_ordering("slo").ordering == "slo"
    assert QueueConfig(ordering="priority").or_ordering("slo").ordering == "priority"


def test_a_name_that_is_no_ordering():
    with pytest.raises(ConfigurationError, match="fair_share"):
        QueueConfig(ordering="mine")
    with pytest.raises(ConfigurationError, match="max_tokens"):
        QueueConfig(max_tokens=-1)


# -- who leaves ------------------------------------------------------------------------------------------------------


def test_whose_deadline_passes_is_never_served():
    queue = make()
    queue.offer(request("a"), 0.0, deadline_s=2.0)
    queue.offer(request("b"), 0.0, deadline_s=1.0)
    queue.offer(request("c"), 0.0)
    assert queue.next_expiry_s == 1.0
    assert queue.first(0.5).request_id == "a"
    assert queue.first(2.0).request_id == "c"
    assert [(one.request.request_id, one.cause) for one in queue.leavers(2.0)] == [
        ("b", Cause.EXPIRED),
        ("a", Cause.EXPIRED),
    ]
    assert queue.leavers(2.0) == []
    assert queue.next_expiry_s == math.inf


def test_who_would_rather_be_refused_leaves_when_it_is_late():
    queue = make()
    queue.offer(request("a", ttft_s=1.0, refuse_late=True), 0.0, deadline_s=5.0)
    queue.offer(request("b", ttft_s=1.0), 0.0)
    assert [(one.request.request_id, one.cause) for one in queue.leavers(1.0)] == [("a", Cause.LATE)]
    assert turns(queue, 9.0) == ["b"]


def test_a_wait_that_is_too_long_is_refused_at_once():
    queue = make()
    for number in range(20):
        queue.offer(request(f"r{number}"), 0.0)
    for second in range(1, 5):  # one per second gets away
        queue.start(queue.first(float(second)), float(second))
    queue.offer(request("patient", at_s=4.0, ttft_s=60.0, refuse_late=True), 4.0)
    queue.offer(request("served late", at_s=4.0, ttft_s=2.0), 4.0)
    assert queue.leavers(4.0) == []
    queue.offer(request("hasty", at_s=4.0, ttft_s=2.0, refuse_late=True), 4.0)
    (leaver,) = queue.leavers(4.0)
    assert (leaver.request.request_id, leaver.cause) == ("hasty", Cause.LATE)
    assert leaver.retry_after_s == pytest.approx(17.0, rel=0.2)  # 18 wait, and it would allow 2 s
    assert "hasty" not in queue


def test_hopeless_is_who_asked_for_it_and_is_far_off():
    hasty = request("a", ttft_s=1.0, refuse_late=True)
    assert is_hopeless(hasty, 1.5, 0.0)
    assert is_hopeless(hasty, 0.8, 0.6)
    assert not is_hopeless(hasty, 1.1, 0.0)
    assert not is_hopeless(hasty, math.inf, 0.0)
    assert not is_hopeless(request("b", ttft_s=1.0), 9.0, 0.0)
    assert not is_hopeless(request("c", refuse_late=True), 9.0, 0.0)
    assert excess_s(hasty, 1.5, 0.25) == 0.75


def test_who_has_gone_leaves_no_trace():
    queue = make("fair_share")
    queue.offer(request("a", tenant="a"), 0.0, deadline_s=9.0)
    assert queue.remove("a", 1.0)
    assert not queue.remove("a", 1.0)
    queue.end("a", 3)
    queue.prefilled("a")
    assert is_empty(queue)


def test_a_request_may_come_back_to_the_queue():
    queue = make("fair_share")
    one = request("a", tenant="a")
    queue.start(one, 0.0)
    queue.end("a", 0)
    assert queue.offer(one, 1.0) is None
    assert turns(queue, 1.0) == ["a"]


# -- bounds ----------------------------------------------------------------------------------------------------------


def test_bounds_in_requests_and_tokens():
    queue = make(max_requests=2, max_tokens=100)
    assert queue.offer(request("huge", 500), 0.0) is None  # one may wait whatever its size
    assert queue.offer(request("a", 1), 0.0) == QueueFull(1.0)
    turns(queue)
    for name in "ab":
        assert queue.offer(request(name, 50), 0.0) is None
    assert queue.offer(request("c", 1), 0.0) is not None
    assert len(queue) == 2


def test_a_queue_of_nothing():
    queue = make(max_requests=0)
    assert queue.offer(request("a"), 0.0) == QueueFull(1.0)


def test_a_flood_keeps_nobody_else_out():
    """Case 41, the queue's part: the newest of whoever has most make room, and the flood itself is turned away."""
    queue = make("fcfs", max_requests=10)
    for number in range(20):
        queue.offer(request(f"flood{number}", tenant="flood"), 0.0)
    assert len(queue) == 10
    for number in range(5):
        assert queue.offer(request(f"calm{number}", tenant="calm"), 0.0) is None
    leavers = queue.leavers(0.0)
    assert [(one.request.request_id, one.cause) for one in leavers] == [
        (f"flood{number}", Cause.PUSHED_OUT) for number in (9, 8, 7, 6, 5)
    ]
    assert queue.offer(request("calm5", tenant="calm"), 0.0) is not None  # five each
    assert queue.offer(request("flood20", tenant="flood"), 0.0) is not None
    assert len(queue) == 10


def test_halves_are_not_fought_over():
    queue = make(max_requests=9)
    for number in range(9):
        queue.offer(request(f"a{number}", tenant="a"), 0.0)
    accepted = [queue.offer(request(f"b{number}", tenant="b"), 0.0) is None for number in range(9)]
    assert sum(accepted) == 4, "with a fifth it would have as much as is left to the other, who would take it back"
    assert queue.offer(request("a9", tenant="a"), 0.0) is not None


def test_a_large_prompt_does_not_push_out_many_small_ones_of_a_smaller_share():
    queue = make(max_requests=100, max_tokens=1000)
    for number in range(10):
        queue.offer(request(f"s{number}", 50, tenant="small"), 0.0)
    assert queue.offer(request("l", 600, tenant="large"), 0.0) is not None
    assert len(queue) == 10
    assert queue.leavers(0.0) == []


def test_who_has_more_weight_may_hold_more_of_the_queue():
    queue = make(max_requests=9, weights={"big": 2.0})
    for number in range(9):
        queue.offer(request(f"s{number}", tenant="small"), 0.0)
    accepted = [queue.offer(request(f"b{number}", tenant="big"), 0.0) is None for number in range(9)]
    assert sum(accepted) == 6


# -- when to come back -----------------------------------------------------------------------------------------------


def drained(queue, seconds, per_second):
    """Serve at a steady pace while the queue never empties."""
    now_s = 0.0
    for tick in range(seconds * per_second):
        now_s = (tick + 1) / per_second
        queue.start(queue.first(now_s), now_s)
    return now_s


@pytest.mark.parametrize("tokens", [1, 10])
def test_each_that_is_turned_away_comes_back_after_the_one_before(tokens):
    queue = make(max_requests=60)
    for number in range(60):
        queue.offer(request(f"r{number}"), 0.0)
    now_s = drained(queue, 10, 2)
    for number in range(20):
        queue.offer(request(f"n{number}", at_s=now_s), now_s)
    times = [queue.offer(request(f"x{number}", tokens, at_s=now_s), now_s).retry_after_s for number in range(100)]
    assert times[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0], rel=0.01)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(30.0, rel=0.01)  # all 60 that wait are gone by then


def test_a_queue_that_has_stopped_says_so():
    queue = make(max_requests=40)
    for number in range(40):
        queue.offer(request(f"r{number}"), 0.0)
    now_s = drained(queue, 10, 2)
    for number in range(20):
        queue.offer(request(f"n{number}", at_s=now_s), now_s)
    assert queue.offer(request("x"), now_s).retry_after_s < 1
    later = queue.offer(request("y"), now_s + 30).retry_after_s
    assert later > 1.5
    assert queue.offer(request("z"), now_s + 10_000).retry_after_s == 60.0


@pytest.mark.parametrize("ordering", ["fcfs", "fair_share", "slo"])
def test_in_a_flood_those_that_are_served_are_in_time_and_nobody_idles(ordering):
    """Case 41: five times as many requests as four slots can serve, each of which would rather be refused than late."""
    queue = make(ordering, max_requests=1000, max_tokens=10**6)
    rng = np.random.default_rng(0)
    arrivals = np.cumsum(rng.exponential(1 / 40, 2400)).tolist()
    free_s, waits, refused = [0.0] * 4, [], 0
    while arrivals or len(queue):
        slot = min(range(4), key=free_s.__getitem__)
        if len(queue) and (not arrivals or free_s[slot] <= arrivals[0]):
            now_s = max(free_s[slot], 0.0)
            turn = queue.first(now_s)
            if turn is not None:
                queue.start(turn, now_s)
                waits.append(now_s - turn.arrival_s)
                free_s[slot] = now_s + 0.5
        else:
            now_s = arrivals.pop(0)
            one = request(f"r{len(arrivals)}", at_s=now_s, tenant="ab"[len(arrivals) % 2], ttft_s=2.0, refuse_late=True)
            assert queue.offer(one, now_s) is None
            free_s = [max(each, now_s) for each in free_s]
        for leaver in queue.leavers(now_s):
            assert leaver.cause is Cause.LATE
            refused += 1
    assert len(waits) + refused == 2400
    assert max(waits) < 2.0
    assert len(waits) > 0.9 * 60 * 8, "as many as four slots can serve in a minute"


@pytest.mark.parametrize("anew", [False, True])
def test_new_weights_reorder_who_waits(anew):
    queue = make("fair_share", weights={"a": 1.0, "b": 100.0})
    queue.start(request("s", tenant="c"), 0.0)
    for number in range(8):
        queue.offer(request(f"{'ab'[number % 2]}{number}", tenant="ab"[number % 2]), 0.0)
    if anew:
        queue.rearrange(QueueConfig(ordering="fair_share"), {"a": 100.0, "b": 1.0}, 1.0)
    assert len(queue) == 8
    order = turns(queue, 1.0)
    assert "".join(name[0] for name in order) == ("abaaabbb" if anew else "abbbbaaa")
    for name in ("s", *order):
        queue.end(name, 5)
    assert is_empty(queue)


def test_another_order_and_other_bounds_are_for_who_waits_and_who_comes():
    queue = make("fcfs")
    for number in range(4):
        queue.offer(request(f"r{number}", at_s=number / 8), 1.0)
    queue.rearrange(QueueConfig(ordering="lifo", max_requests=2), {}, 1.0)
    assert len(queue) == 4
    assert queue.offer(request("late"), 1.0) is not None
    assert turns(queue, 1.0) == ["r3", "r2", "r1", "r0"]


# -- a life of its own -----------------------------------------------------------------------------------------------

AGEING_S = {"fcfs": math.inf, "priority": 600.0, "lifo": 60.0, "earliest_deadline": 600.0}
KEYS = {
    "fcfs": lambda one: (one.arrival_s,),
    "lifo": lambda one: (-one.arrival_s,),
    "priority": lambda one: (one.priority, one.arrival_s),
    "earliest_deadline": lambda one: (
        math.inf if one.slo.ttft_s is None else one.arrival_s + one.slo.ttft_s,
        one.arrival_s,
    ),
}


class Waiting(RuleBasedStateMachine):
    """Compares the queue with a list, whoever comes, goes, expires or is turned away."""

    @initialize(
        ordering=st.sampled_from(sorted(ORDERINGS)), max_requests=st.integers(1, 8), max_tokens=st.integers(10, 200)
    )
    def begin(self, ordering, max_requests, max_tokens):
        self.ordering, self.max_requests, self.max_tokens = ordering, max_requests, max_tokens
        self.most = max_requests, max_tokens
        self.queue = make(ordering, max_requests, max_tokens, {"a": 2.0})
        self.waiting: dict[str, tuple[Request, float]] = {}
        self.running: dict[str, Request] = {}
        self.ends: dict[str, str] = {}
        self.now_s = 0.0
        self.number = 0

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 7.0, 70.0, 700.0]))
    def wait(self, seconds):
        self.now_s += seconds

    @rule(
        tokens=st.integers(1, 60),
        tenant=st.sampled_from("abc"),
        priority=st.integers(-1, 1),
        ttft_s=st.sampled_from([None, 0.5, 20.0]),
        refuse_late=st.booleans(),
        deadline_s=st.sampled_from([math.inf, 0.5, 30.0]),
    )
    def offer(self, tokens, tenant, priority, ttft_s, refuse_late, deadline_s):
        self.collect()
        name = f"r{self.number}"
        self.number += 1
        one = request(
            name, tokens, at_s=self.now_s, tenant=tenant, priority=priority, ttft_s=ttft_s, refuse_late=refuse_late
        )
        full = self.queue.offer(one, self.now_s, self.now_s + deadline_s)
        if full is None:
            self.waiting[name] = (one, self.now_s + deadline_s)
        else:
            self.ends[name] = "full"
            assert 0 <= full.retry_after_s <= 60
            assert len(self.waiting) >= self.max_requests or self.tokens() + tokens > self.max_tokens
        self.collect(newcomer=one)

    @rule()
    def serve(self):
        one = self.queue.first(self.now_s)
        self.collect()
        if one is None:
            assert not self.waiting
            return
        assert one.request_id in self.waiting
        if self.ordering in KEYS:
            old = [w for w, _ in self.waiting.values() if self.now_s - w.arrival_s > AGEING_S[self.ordering]]
            key = KEYS["fcfs"] if old else KEYS[self.ordering]
            assert key(one) == min(key(w) for w in old or [w for w, _ in self.waiting.values()])
        self.queue.start(one, self.now_s)
        self.running[one.request_id] = self.waiting.pop(one.request_id)[0]

    @rule()
    def start_without_waiting(self):
        name = f"r{self.number}"
        self.number += 1
        self.running[name] = request(name, at_s=self.now_s, tenant="c")
        self.queue.start(self.running[name], self.now_s)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), output=st.integers(0, 100))
    def end(self, data, output):
        name = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[name]
        self.queue.prefilled(name)
        self.queue.end(name, output)
        self.ends[name] = "served"

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def go(self, data):
        name = data.draw(st.sampled_from(sorted(self.waiting)))
        assert self.queue.remove(name, self.now_s)
        del self.waiting[name]
        self.ends[name] = "gone"

    @rule(weight=st.sampled_from([0.5, 2.0, 7.0]), max_requests=st.integers(1, 8), max_tokens=st.integers(10, 200))
    def rearrange(self, weight, max_requests, max_tokens):
        """Bounds are for newcomers: who waits already goes on waiting."""
        self.most = max(max_requests, len(self.waiting)), max(max_tokens, self.tokens())
        self.max_requests, self.max_tokens = max_requests, max_tokens
        config = QueueConfig(ordering=self.ordering, max_requests=max_requests, max_tokens=max_tokens)
        self.queue.rearrange(config, {"a": weight}, self.now_s)

    def tokens(self):
        return sum(one.num_prompt_tokens for one, _ in self.waiting.values())

    def collect(self, newcomer=None):
        """Each that left had a reason to."""
        before = dict(self.waiting)
        for one, cause, retry_after_s in self.queue.leavers(self.now_s):
            _, deadline_s = self.waiting.pop(one.request_id)
            assert one.request_id not in self.ends
            self.ends[one.request_id] = cause.value
            assert retry_after_s >= 0
            if cause is Cause.EXPIRED:
                assert deadline_s <= self.now_s
            elif cause is Cause.LATE:
                assert one.refuse_late
                assert one.slo.ttft_s is not None
            else:
                assert newcomer is not None
                assert one.tenant != newcomer.tenant
                assert (
                    len(before) > self.max_requests
                    or sum(w.num_prompt_tokens for w, _ in before.values()) > self.max_tokens
                )
        for one, deadline_s in self.waiting.values():
            assert deadline_s > self.now_s
            assert not (one.refuse_late and one.slo.ttft_s and one.arrival_s + one.slo.ttft_s <= self.now_s)

    @invariant()
    def nothing_is_lost(self):
        if not hasattr(self, "queue"):
            return
        assert len(self.queue) == len(self.waiting)
        assert all(name in self.queue for name in self.waiting)
        assert self.queue.num_tokens == self.tokens()
        assert len(self.waiting) + len(self.running) + len(self.ends) == self.number

    @invariant()
    def bounds_hold(self):
        if hasattr(self, "queue"):
            assert len(self.queue) <= self.most[0]
            assert self.queue.num_tokens <= self.most[1] or len(self.queue) == 1

    def teardown(self):
        if not hasattr(self, "queue"):
            return
        while (one := self.queue.first(self.now_s)) is not None:
            self.queue.start(one, self.now_s)
            self.running[one.request_id] = one
        for name in self.running:
            self.queue.end(name, 1)
        assert is_empty(self.queue)


TestWaiting = Waiting.TestCase
TestWaiting.settings = settings(max_examples=100, stateful_step_count=40)
