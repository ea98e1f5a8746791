"""Each ordering by example, beside its neighbours."""

from functools import partial

import pytest
from ordering_builders import STEM, build, made, order_of

from expediter.core.slo import NO_SLO, Slo
from expediter.kvcache.manager import KVCacheManager
from expediter.scheduling.build import ORDERINGS, PolicyConfig
from expediter.scheduling.config import SchedulerConfig
from expediter.scheduling.ordering.feedback import FeedbackQueue
from expediter.scheduling.ordering.prefix import LongestPrefix
from expediter.testing.scheduler_driver import SchedulerDriver


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
