"""Each ordering by example, beside its neighbours, and its bound under a stream that is made to starve somebody."""

import itertools
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expediter.core.events import Admitted, Preempted
from expediter.core.request import Request, RequestState
from expediter.core.slo import NO_SLO, Slo
from expediter.kvcache.manager import KVCacheManager
from expediter.scheduling.build import ORDERINGS, PolicyConfig
from expediter.scheduling.config import SchedulerConfig
from expediter.scheduling.ordering.fair import DeficitPrefix, FairShare
from expediter.scheduling.ordering.feedback import FeedbackQueue
from expediter.scheduling.ordering.prefix import LongestPrefix
from expediter.scheduling.ordering.queue import WaitingQueue
from expediter.testing.scheduler_driver import SchedulerDriver

STEM = list(range(20))


def build(ordering, *, num_blocks=400, block_size=4, checks_blocks=False, **limits):
    limits = {"max_num_seqs": 1, "max_num_batched_tokens": 64, "max_model_len": 1000, **limits}
    return SchedulerDriver.build(
        SchedulerConfig(**limits),
        num_blocks=num_blocks,
        block_size=block_size,
        ordering=ordering,
        checks_blocks=checks_blocks,
    )


def order_of(driver):
    return "".join(e.request_id for e in driver.events if isinstance(e, Admitted) and not e.resumed)


# -- each by example --------------------------------------------------------------------------------------------------


def serve_the_same_five(ordering):
    """One slot; while `x` runs, five arrive that differ in everything an ordering may look at."""
    driver = build(ordering)
    driver.submit("w", [*STEM, 48], 1, tenant="big")
    driver.step()
    driver.submit("x", [49], 6, tenant="big")
    driver.step()
    arrivals = [
        ("a", [40] * 9, 5, 2, "big", Slo(ttft_s=90.0)),
        ("b", [*STEM, 41], 9, 1, "big", Slo(ttft_s=70.0)),
        ("c", [42] * 2, 5, 3, "small", NO_SLO),
        ("d", [43] * 30, 1, 0, "big", Slo(ttft_s=80.0)),
        ("e", [44] * 300, 1, 1, "small", Slo(ttft_s=60.0)),
    ]
    for name, prompt, max_tokens, priority, tenant, slo in arrivals:
        driver.now_s += 0.125
        driver.submit(name, prompt, max_tokens, priority=priority, tenant=tenant, slo=slo)
    driver.run_to_end()
    return order_of(driver).removeprefix("w").removeprefix("x")


FIVE = {
    "fcfs": "abcde",
    "lifo": "edcba",
    "priority": "dbeac",
    "earliest_deadline": "ebdac",
    "shortest_predicted": "cabde",  # 7, 14, 30, 31 and 301 tokens of work
    "longest_prefix": "bacde",  # 20 tokens of b are cached
    "fair_share": "caebd",  # tenants take turns; the big one has got more while x ran
    "deficit_prefix": "bacde",  # both tenants have service left in the round
    "feedback": "abcde",  # only e is so long that it joins a lower level
}


@pytest.mark.parametrize("name", sorted(FIVE))
def test_each_ordering_serves_the_same_five_in_its_own_order(name):
    assert serve_the_same_five(name) == FIVE[name]


def test_no_ordering_is_forgotten():
    assert set(ORDERINGS) == {*FIVE, "slo"}


def test_feedback_differs_from_fcfs_once_a_quantum_is_used_up():
    driver = build("feedback", num_blocks=800)
    driver.submit("long", [1] * 300, 1)
    driver.submit("short", [2] * 9, 1)
    driver.run_to_end()
    assert order_of(driver) == "shortlong"


def test_deficit_prefix_differs_from_longest_prefix_once_a_quantum_is_used_up():
    def serve(ordering):
        driver = build(ordering)
        driver.submit("w", STEM, 1)
        driver.run_to_end()
        for number in range(4):
            driver.submit(f"h{number}", [*STEM, number], 9, tenant="heavy")
        driver.submit("other", [30] * 9, 2, tenant="light")
        driver.run_to_end()
        return order_of(driver).removeprefix("w")

    assert serve("longest_prefix") == "h0h1h2h3other"
    # Each costs 1 new token and 9 outputs, 19 in all; the quantum is gone after the second.
    driver = build("deficit_prefix")
    ordering = driver.scheduler.policy.rules.ordering
    ordering._quantum = 30.0
    driver.submit("w", STEM, 1)
    driver.run_to_end()
    for number in range(4):
        driver.submit(f"h{number}", [*STEM, number], 9, tenant="heavy")
    driver.submit("other", [30] * 9, 2, tenant="light")
    driver.run_to_end()
    assert order_of(driver).removeprefix("w") == "h0h1otherh2h3"


# -- bounds -----------------------------------------------------------------------------------------------------------

FAVOURITES = {
    "lifo": lambda t: {},
    "priority": lambda t: {"priority": -1},
    "earliest_deadline": lambda t: {"slo": Slo(ttft_s=0.5)},
    "shortest_predicted": lambda t: {},
    "longest_prefix": lambda t: {},
    "feedback": lambda t: {},
}


@pytest.mark.parametrize("name", sorted(FAVOURITES))
@settings(deadline=None, max_examples=5)
@given(
    num_victims=st.integers(1, 3),
    lengths=st.lists(st.integers(1, 3), min_size=3, max_size=3),
    max_num_seqs=st.integers(1, 2),
)
def test_nobody_waits_longer_than_the_stated_bound(name, num_victims, lengths, max_num_seqs):
    """A new favourite of the ordering comes in every step; the victims are what it likes least."""
    driver = build(name, max_num_seqs=max_num_seqs, max_num_batched_tokens=1000, num_blocks=1000)
    ordering = driver.scheduler.policy.rules.ordering
    assert ordering.max_wait_s <= 600
    max_wait_s = ordering.max_wait_s = min(60.0, ordering.max_wait_s)  # 600 steps would only take longer
    driver.submit("stem", STEM, 1)
    driver.run_to_end()
    victims = [f"victim{number}" for number in range(num_victims)]
    for slot in range(max_num_seqs):
        driver.submit(f"first{slot}", [*STEM, 41], 2, **FAVOURITES[name](0))
    driver.step()
    for number, victim in enumerate(victims):
        driver.submit(victim, [45 + number] * (300 if name == "feedback" else 25), 1)
    arrived_s = driver.now_s
    started_s = {}
    count = 0
    while len(started_s) < num_victims:
        for _ in range(max_num_seqs):
            driver.submit(f"f{count}", [*STEM, 40], lengths[count % 3], **FAVOURITES[name](driver.now_s))
            count += 1
        driver.step()
        for event in driver.steps[-1].admitted:
            started_s.setdefault(event, driver.now_s) if event in victims else None
        assert driver.now_s - arrived_s < max_wait_s + 40
    waits = [started_s[victim] - arrived_s for victim in victims]
    assert waits == sorted(waits)
    # The bound, then the step under way and what runs; those that were over the bound before take one step each.
    assert max(waits) <= max_wait_s + 2 + max(lengths) + num_victims
    assert min(waits) >= max_wait_s  # without it, they would wait for ever


@pytest.mark.parametrize("name", ["priority", "shortest_predicted", "earliest_deadline", "feedback"])
def test_a_prompt_under_way_does_not_lose_its_budget_for_ever(name):
    """Favourites take the budget before a prompt that has begun; the bound holds for it, too."""
    driver = build(name, max_num_seqs=8, max_num_batched_tokens=8)
    driver.submit("slow", [1] * 300, 1, priority=5)
    driver.step()
    ordering = driver.scheduler.policy.rules.ordering
    max_wait_s = ordering.max_wait_s = min(60.0, ordering.max_wait_s)
    count = 0
    while driver.requests["slow"].finished is None:
        driver.submit(f"f{count}", [2, count % 40, *range(6)], 1, priority=0, slo=Slo(ttft_s=0.5))
        count += 1
        driver.step()
        assert driver.now_s <= max_wait_s + 50
    driver.run_to_end()


def test_first_come_first_served_waits_for_nobody_that_came_later():
    driver = build("fcfs")
    for number in range(20):
        driver.submit(f"{number:02}", [number] * (1 + number * 7 % 9), 1 + number % 4)
        driver.step()
    driver.run_to_end()
    assert order_of(driver) == "".join(f"{number:02}" for number in range(20))


def rounds_of(ordering, *, num_steps, weights, costs, seed):
    """Serve tenants that always wait, one request at a time; return the largest gap of weighted service."""
    rng = np.random.default_rng(seed)
    queue, service = WaitingQueue(ordering), dict.fromkeys(costs, 0.0)
    sequence = 0

    def arrive(tenant):
        nonlocal sequence
        length = int(rng.integers(1, costs[tenant] + 1))
        queue.push(made(sequence, [sequence % 40] * length, tenant=tenant, arrival_s=float(sequence)), 0.0)
        sequence += 1

    for tenant in costs:
        arrive(tenant)
        arrive(tenant)
    largest = 0.0
    for _ in range(num_steps):
        head = queue.first(0.0)
        queue.remove(head)
        tenant, length = head.request.tenant, head.num_known_tokens
        ordering.admitted(head, length, 0)
        service[tenant] += (length + 2) / weights.get(tenant, 1.0)
        ordering.left(head, 0)
        arrive(tenant)
        largest = max(largest, max(service.values()) - min(service.values()))
    return largest


@settings(deadline=None, max_examples=40)
@given(
    costs=st.dictionaries(st.sampled_from("abcd"), st.integers(1, 300), min_size=2),
    weights=st.dictionaries(st.sampled_from("abcd"), st.sampled_from([0.5, 1.0, 3.0])),
    seed=st.integers(0, 99),
    is_deficit=st.booleans(),
)
def test_tenants_that_always_wait_get_equal_service_within_the_bound(costs, weights, seed, is_deficit):
    quantum = 500.0
    kv = KVCacheManager(num_blocks=8, block_size=4, max_num_seqs=1, max_model_len=32)
    ordering = DeficitPrefix(kv, weights, quantum) if is_deficit else FairShare(weights)
    gap = rounds_of(ordering, num_steps=300, weights=weights, costs=costs, seed=seed)
    longest = max((cost + 2) / weights.get(tenant, 1.0) for tenant, cost in costs.items())
    assert gap <= 2 * longest + (quantum if is_deficit else 0.0)


# -- prompts under way ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "favourite"),
    [
        ("priority", {"priority": -1}),
        ("earliest_deadline", {"slo": Slo(ttft_s=1.0)}),
        ("shortest_predicted", {}),
        ("feedback", {}),
    ],
)
def test_a_favourite_takes_the_budget_before_a_prompt_under_way(name, favourite):
    driver = build(name, max_num_seqs=4, max_num_batched_tokens=4)
    driver.submit("slow", [1] * 300, 1)
    driver.step()
    driver.submit("urgent", [2] * 6, 1, **favourite)
    driver.step()
    assert driver.steps[-1].entries == {"urgent": (0, 4)}
    driver.step()
    assert driver.steps[-1].entries == {"slow": (4, 2), "urgent": (4, 2)}
    driver.run_to_end()


@pytest.mark.parametrize("name", ["fcfs", "lifo", "longest_prefix", "fair_share", "deficit_prefix"])
def test_the_others_let_a_prompt_under_way_finish(name):
    driver = build(name, max_num_seqs=4, max_num_batched_tokens=4)
    driver.submit("slow", [1] * 10, 1)
    driver.step()
    driver.submit("new", [2] * 6, 1)
    driver.step()
    assert driver.steps[-1].entries == {"slow": (4, 4)}
    driver.run_to_end()


def test_who_is_displaced_with_its_prompt_under_way_gets_no_budget():
    driver = build("priority", max_num_seqs=2, max_num_batched_tokens=4, checks_blocks=True)
    driver.submit("low", [1] * 30, 1, priority=2)
    driver.step()
    driver.submit("middle", [2] * 30, 1, priority=1)
    driver.step()
    driver.submit("high", [3] * 2, 1, priority=0)
    driver.step()
    assert driver.steps[-1].preempted == ("low",)
    assert driver.steps[-1].entries == {"middle": (4, 2), "high": (0, 2)}
    driver.run_to_end()


# -- fair shares ------------------------------------------------------------------------------------------------------


def made(sequence, prompt=(1, 2, 3), *, tenant="", arrival_s=0.0, salt=""):
    request = Request(
        request_id=f"r{sequence}",
        prompt=np.array(prompt, np.int32),
        max_tokens=100,
        tenant=tenant,
        cache_salt=salt,
        arrival_s=arrival_s,
    )
    return RequestState(request, sequence, request.prompt.tobytes())


def serve_one(ordering, sequence, tenant, num_tokens, decodes=0, clock=0):
    state = made(sequence, [0] * num_tokens, tenant=tenant)
    ordering.push(state, 0.0)
    ordering.remove(state)
    ordering.admitted(state, num_tokens, clock)
    if decodes:
        ordering.joined(state, clock)
        ordering.left(state, clock + decodes)
    return state


def test_a_tenant_that_returns_is_lifted_to_the_least_that_waits():
    ordering = FairShare()
    serve_one(ordering, 0, "a", 500)
    ordering.push(made(1, tenant="a"), 0.0)
    serve_one(ordering, 2, "b", 900)  # lifted to a's 502, too
    ordering.push(made(3, tenant="b"), 0.0)
    assert (ordering.service("a"), ordering.service("b")) == (502, 502 + 902)
    ordering.push(made(4, tenant="new"), 0.0)
    assert ordering.service("new") == 502


def test_a_tenant_that_returns_when_nobody_waits_is_lifted_to_who_waited_last():
    ordering = FairShare()
    serve_one(ordering, 0, "a", 500)
    ordering.push(made(1, tenant="new"), 0.0)
    assert ordering.service("new") == 502


def test_who_was_tried_in_vain_is_not_lifted():
    ordering = FairShare()
    rich, poor = made(0, [0] * 50, tenant="rich"), made(1, tenant="poor")
    ordering.push(rich, 0.0)
    ordering.push(poor, 0.0)
    ordering.remove(rich)
    ordering.admitted(rich, 50, 0)
    ordering.push(made(2, tenant="rich"), 0.0)
    assert ordering.first(0.0) is poor
    ordering.remove(poor)
    ordering.put_back(poor, 0.0)
    assert ordering.service("poor") == 0
    assert ordering.first(0.0) is poor


def test_cached_tokens_are_free_and_weights_divide():
    driver = build("fair_share", tenant_weights={"a": 4.0})
    ordering = driver.scheduler.policy.rules.ordering
    driver.submit("cold", [*STEM, 1], 5, tenant="b")
    driver.run_to_end()
    assert ordering.service("b") == 21 + 2 * 5
    driver.submit("warm", [*STEM, 1], 5, tenant="a")
    driver.run_to_end()
    assert ordering.service("a") == 31 + (1 + 2 * 5) / 4  # lifted to b's, then one new token


def test_recomputation_is_nobodys_service():
    driver = build("fair_share", max_num_seqs=2, num_blocks=8, block_size=4)
    driver.submit("a", [1] * 8, 14, tenant="a")
    driver.submit("b", [2] * 8, 14, tenant="b")
    driver.run_to_end()
    assert [e for e in driver.events if isinstance(e, Preempted)]
    services = [driver.scheduler.policy.rules.ordering.service(tenant) for tenant in "ab"]
    assert services == [8 + 2 * 14] * 2


def test_a_deficit_is_not_forgiven_to_who_always_comes_back():
    """A tenant whose queue is empty after each start must not get a new quantum each time."""
    kv = KVCacheManager(num_blocks=8, block_size=4, max_num_seqs=1, max_model_len=32)
    ordering = DeficitPrefix(kv, quantum=100.0)
    patient = [made(number, [7] * 98, tenant="patient", arrival_s=1.0) for number in range(1000, 1050)]
    for state in patient:
        ordering.push(state, 1.0)
    service = {"patient": 0.0, "eager": 0.0}
    for number in range(60):
        ordering.push(made(number, [3] * 98, tenant="eager", arrival_s=0.0), 1.0)
        head = ordering.first(1.0)
        ordering.remove(head)
        ordering.admitted(head, 98, 0)
        service[head.request.tenant] += 100.0
    assert abs(service["patient"] - service["eager"]) <= 2 * 100 + 100


def test_the_first_of_many_tenants_is_found_without_looking_at_them_all(monkeypatch):
    kv = KVCacheManager(num_blocks=8, block_size=4, max_num_seqs=1, max_model_len=64)
    ordering = DeficitPrefix(kv, quantum=50.0)
    calls = 0
    first = WaitingQueue.first

    def counted(queue, now_s):
        nonlocal calls
        calls += 1
        return first(queue, now_s)

    for number in range(2000):
        ordering.push(made(number, [number % 40] * 40, tenant=f"t{number}"), 0.0)
    monkeypatch.setattr(WaitingQueue, "first", counted)
    for number in range(2000):
        head = ordering.first(0.0)
        ordering.remove(head)
        ordering.admitted(head, 40, 0)
        ordering.push(made(5000 + number, [number % 40] * 40, tenant=head.request.tenant), 0.0)
    assert calls <= 20 * 2000


def test_idle_tenants_are_forgotten():
    ordering = FairShare()
    for number in range(10_000):
        serve_one(ordering, number, f"t{number}", 3)
    assert len(ordering._ledger._accounts) <= 2100


# -- prefixes ---------------------------------------------------------------------------------------------------------


def prefixes(num_blocks=64):
    kv = KVCacheManager(num_blocks=num_blocks, block_size=4, max_num_seqs=4, max_model_len=256)
    return LongestPrefix(kv)


@pytest.mark.parametrize(("num_shared", "goes_first"), [(16, True), (15, False)])
def test_a_group_shares_its_first_sixteen_tokens(num_shared, goes_first):
    ordering = prefixes()
    shared = list(range(num_shared))
    running = made(0, [*shared, *[90] * 20])
    ordering.push(running, 0.0)
    ordering.remove(running)
    ordering.admitted(running, 36, 0)
    stranger, member = made(1, [80] * 40, arrival_s=1.0), made(2, [*shared, *[91] * 20], arrival_s=2.0)
    ordering.push(stranger, 2.0)
    ordering.push(member, 2.0)
    assert (ordering.first(2.0) is member) == goes_first
    ordering.left(running, 0)
    assert ordering.first(2.0) is stranger


def test_short_prompts_and_other_salts_are_no_group():
    ordering = prefixes()
    for running in (made(0, [1] * 8), made(1, [2] * 40, salt="other")):
        ordering.push(running, 0.0)
        ordering.remove(running)
        ordering.admitted(running, 8, 0)
    states = [made(2, [3] * 40), made(3, [1] * 8, arrival_s=1.0), made(4, [2] * 40, arrival_s=2.0)]
    for state in states:
        ordering.push(state, 3.0)
    order = []
    for _ in states:
        order.append(ordering.first(3.0))
        ordering.remove(order[-1])
    assert order == states


@pytest.mark.parametrize("ending", ["abort mid-prompt", "one token", "many tokens", "preempted"])
def test_nothing_of_a_group_is_left_behind(ending):
    driver = build("longest_prefix", max_num_seqs=2, max_num_batched_tokens=8, num_blocks=16)
    driver.submit("it", [1] * 24, {"one token": 1, "many tokens": 9}.get(ending, 12))
    driver.submit("short", [1] * 5, 20 if ending == "preempted" else 3)
    driver.step()
    if ending == "abort mid-prompt":
        driver.abort("it")
    driver.run_to_end()
    assert not driver.scheduler.policy.rules.ordering._groups


# -- feedback ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "level"), [(1, 0), (256, 0), (257, 1), (512, 1), (513, 2), (1024, 2), (1025, 3)]
)
def test_a_request_joins_the_level_whose_quantum_covers_its_prompt(num_tokens, level):
    assert FeedbackQueue().level(made(0, [1] * num_tokens)) == level


def test_a_running_request_sinks_while_it_decodes_and_gives_way():
    driver = build("feedback", num_blocks=400)
    driver.submit("long", [1] * 200, 300)
    while len(driver.output("long")) < 50:
        driver.step()
    driver.submit("early", [2] * 9, 3)
    driver.step()
    assert driver.steps[-1].preempted == ()  # both are on the first level
    while len(driver.output("long")) < 57:
        driver.step()
    driver.step()
    assert driver.steps[-1].preempted == ("long",)
    driver.run_to_end()
    assert driver.requests["long"].num_preemptions == 1


# -- the queue --------------------------------------------------------------------------------------------------------


def test_a_queue_that_cannot_move_is_not_asked_again(monkeypatch):
    driver = build("priority", max_num_seqs=4, num_blocks=20, max_bypasses=0)
    driver.submit("runs", [1] * 40, 30)
    driver.step()
    driver.submit("large", [2] * 60, 1)
    driver.step()
    calls = 0
    match = driver.scheduler.kv.match

    def counted(*args):
        nonlocal calls
        calls += 1
        return match(*args)

    monkeypatch.setattr(driver.scheduler.kv, "match", counted)
    for _ in range(10):
        driver.step()
    assert calls == 0
    driver.abort("runs")
    driver.step()
    assert driver.steps[-1].admitted == ("large",)
    driver.run_to_end()


def test_orderings_of_one_policy_do_not_share_state():
    policy = PolicyConfig(ordering="fair_share")
    make = partial(SchedulerDriver.build, SchedulerConfig(), num_blocks=8, block_size=4, policy=policy)
    assert make().scheduler.policy.rules.ordering is not make().scheduler.policy.rules.ordering


# -- the SLO order's bound --------------------------------------------------------------------------------------------


def test_who_is_late_gets_its_share_of_the_starts():
    """The bound of `slo`: after `max_late_wait_s`, one of `late_share` starts; until then, whoever can be in time."""
    driver = SchedulerDriver.build(
        SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=64),
        num_blocks=40,
        block_size=4,
        ordering="slo",
        checks_blocks=False,
    )
    ordering = driver.scheduler.policy.rules.ordering
    ordering._max_late_wait_s, ordering._late_share = 10.0, 5
    driver.submit("running", [1] * 5, 2, slo=Slo(ttft_s=50.0))
    driver.step()
    for number in range(3):
        driver.submit(f"late{number}", [2] * 5, 1, slo=Slo(ttft_s=0.5))
    started = []
    for number in range(60):
        driver.submit(f"f{number}", [3] * 5, 1, slo=Slo(ttft_s=50.0))
        driver.step()
        started += driver.steps[-1].admitted
    positions = [started.index(f"late{number}") for number in range(3)]
    assert positions == sorted(positions)
    assert 8 <= positions[0] <= 10 + 5
    assert all(second - first <= 6 for first, second in itertools.pairwise(positions))
    driver.run_to_end()


def test_who_has_no_targets_is_not_passed_over_for_ever():
    """A request without targets counts as due after `patience_s`: those with nearer deadlines go first until then."""
    driver = SchedulerDriver.build(
        SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=64),
        num_blocks=40,
        block_size=4,
        ordering="slo",
        checks_blocks=False,
    )
    ordering = driver.scheduler.policy.rules.ordering
    ordering._max_late_wait_s, ordering._late_share, ordering._patience_s = 10.0, 5, 30.0
    driver.submit("running", [1] * 5, 2, slo=Slo(ttft_s=50.0))
    driver.step()
    driver.submit("whenever", [2] * 5, 1)
    started = []
    for number in range(60):
        driver.submit(f"f{number}", [3] * 5, 1, slo=Slo(ttft_s=15.0))
        driver.step()
        started += driver.steps[-1].admitted
    assert 10 <= started.index("whenever") <= 30 + 5 + 1
    driver.run_to_end()
