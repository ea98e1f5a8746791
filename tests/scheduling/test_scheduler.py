"""The scheduler's surface by example: misuse, shutdown, limits, late results, an ordering of one's own."""

import numpy as np
import pytest

from expediter.core.errors import InvariantError
from expediter.core.events import RejectReason
from expediter.core.plan import StepResult
from expediter.scheduling.config import SchedulerConfig
from expediter.scheduling.ordering.base import KeyOrdering
from expediter.testing.scheduler_driver import SchedulerDriver


def build(ordering="fcfs", **changes):
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 6, "max_model_len": 64, **changes}
    return SchedulerDriver.build(SchedulerConfig(**limits), num_blocks=16, block_size=2, ordering=ordering)


def test_plan_and_apply_take_turns():
    driver = build()
    driver.submit("a", [1, 2], 3)
    plan = driver.plan()
    with pytest.raises(InvariantError, match="step 0 has not been applied"):
        driver.scheduler.plan(9.0)
    with pytest.raises(InvariantError, match="step 1 was never planned"):
        driver.scheduler.apply(StepResult(1, np.zeros((1, 1), np.int32), 0.0), 9.0)
    driver.finish(plan)
    driver.run_to_end()


def test_an_idle_scheduler_plans_nothing():
    driver = build()
    plan = driver.plan()
    assert plan.is_empty
    assert plan.num_seqs == 0
    assert driver.plan().is_empty  # it is not in flight


def test_shutdown_refuses_the_new_and_finishes_the_old():
    driver = build()
    for number in range(4):
        driver.submit(f"r{number}", [number, 1], 4)
    driver.step()
    driver.scheduler.drain()
    assert not driver.submit("late", [1], 1)
    assert driver.rejected["late"].reason is RejectReason.SHUTDOWN
    driver.run_to_end()
    assert all(len(request.output) == 4 for request in driver.requests.values())


def test_min_tokens_hold_a_stop_token_off():
    driver = build()
    driver.submit("probe", [1, 2, 3], 6)
    driver.run_to_end()
    tokens = driver.output("probe")
    for min_tokens in range(7):
        driver.submit(f"m{min_tokens}", [1, 2, 3], 6, min_tokens=min_tokens, stop_token_ids=tuple(tokens))
        driver.run_to_end()
        assert len(driver.output(f"m{min_tokens}")) == max(1, min_tokens)


def test_many_stop_tokens_beside_none():
    driver = build(max_num_seqs=3)
    driver.submit("one", [1, 2, 3], 6, stop_token_ids=(7,))
    driver.submit("many", [1, 2, 4], 6, stop_token_ids=tuple(range(0, 50, 3)))
    driver.submit("none", [1, 2, 5], 6)
    driver.run_to_end()
    assert len(driver.output("none")) == 6


def test_a_watermark_is_left_for_the_growth_of_what_runs():
    driver = build(watermark_blocks=3)
    driver.submit("a", [1] * 6, 4)
    driver.step()
    driver.submit("b", [2] * 20, 2)  # 10 of the 12 blocks that are left
    driver.step()
    assert not driver.requests["b"].is_running
    driver.run_to_end()
    driver.submit("c", [3] * 31, 1)  # alone, the whole pool is its own
    driver.step()
    driver.run_to_end()


@pytest.mark.parametrize("max_scan", [1, 2, 3])
def test_only_so_many_are_looked_at_behind_a_blocked_one(max_scan):
    driver = build(max_num_seqs=8, max_num_batched_tokens=64, max_scan=max_scan)
    driver.submit("holder", [1] * 6, 9)
    driver.step()
    for number in range(3):
        driver.submit(f"large{number}", [2] * 30, 1)
    driver.submit("small", [3], 1)
    driver.step()
    assert driver.steps[-1].admitted == (("small",) if max_scan >= 3 else ())
    driver.run_to_end()


def test_a_request_that_may_not_be_preempted_owns_blocks_for_its_whole_life():
    driver = build(max_preemptions=0)
    driver.submit("a", [1], 20)
    driver.step()
    assert driver.scheduler.kv.num_used_blocks == 10
    driver.submit("b", [2], 20)
    driver.step()
    assert not driver.requests["b"].is_running  # 10 of 6 blocks
    driver.run_to_end()


class ShortestFirst(KeyOrdering):
    """An ordering as a user would write it."""

    def key(self, state, now_s):
        return (float(state.num_known_tokens),)


def test_an_ordering_of_ones_own_needs_one_method():
    driver = build(ShortestFirst(), max_num_seqs=1, max_num_batched_tokens=64)
    for number, length in enumerate([5, 1, 9, 3]):
        driver.submit(f"r{number}", [number] * length, 2)
    driver.run_to_end()
    order = [name for step in driver.steps for name in step.admitted]
    assert order == ["r1", "r3", "r0", "r2"]


def test_counters_add_up_prompts_and_hits_once_per_request():
    driver = build(ordering="priority", max_num_seqs=1)
    driver.submit("a", [1] * 9, 6, priority=1)
    for _ in range(3):
        driver.step()
    driver.submit("b", [1] * 9, 2)
    driver.run_to_end()
    assert driver.requests["a"].num_preemptions == 1
    firsts = [request.admissions[0] for request in driver.requests.values()]
    assert firsts == [0, 8]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: s.live.running._free_slots.pop(), "slots are lost"),
        (lambda s: s.live.by_id.pop("a"), "live requests"),
        (lambda s: s.kv.release(s.find("a").slot, 0.0), "does not run"),
    ],
)
def test_check_notices_damage(damage, message):
    driver = build()
    driver.submit("a", [1, 2, 3], 5)
    driver.step()
    driver.scheduler.live.check()
    damage(driver.scheduler)
    with pytest.raises(InvariantError, match=message):
        driver.scheduler.live.check()
