"""The bound of each ordering, under a stream that is made to starve somebody."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ordering_builders import STEM, build, order_of

from expediter.core.slo import Slo
from expediter.scheduling.config import SchedulerConfig
from expediter.testing.scheduler_driver import SchedulerDriver

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


# -- the SLO order's bound --------------------------------------------------------------------------------------------


def _one_at_a_time(ordering: str) -> SchedulerDriver:
    return SchedulerDriver.build(
        SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=64),
        num_blocks=40,
        block_size=4,
        ordering=ordering,
        checks_blocks=False,
    )


def test_who_is_late_gets_its_share_of_the_starts():
    """The bound of `slo`: after `max_late_wait_s`, one of `late_share` starts; until then, whoever can be in time."""
    driver = _one_at_a_time("slo")
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
    driver = _one_at_a_time("slo")
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
