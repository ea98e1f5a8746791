"""Who is late is told so, or refused if it asked for that."""

import numpy as np
import pytest
from explained import LIMITS, build, last, reasons, request
from hypothesis import given, settings
from hypothesis import strategies as st

from expediter.core.events import RejectReason
from expediter.core.explanation import Reason
from expediter.core.slo import Slo
from expediter.scheduling.build import CacheConfig, PolicyConfig, build_scheduler
from expediter.scheduling.config import SchedulerConfig
from expediter.scheduling.ordering.simple import Fcfs
from expediter.testing.fake_executor import FakeExecutor


class HastyFcfs(Fcfs):
    """First come, first served; late is whose TTFT target has passed."""

    def __init__(self):
        super().__init__()
        self._states = {}

    def push(self, state, now_s):
        super().push(state, now_s)
        self._states[state.sequence] = state

    def remove(self, state):
        super().remove(state)
        self._states.pop(state.sequence, None)

    @property
    def may_refuse(self):
        return any(s.request.refuse_late and s.first_scheduled_s is None for s in self._states.values())

    def newly_late(self, now_s):
        return [(s, now_s) for s in list(self._states.values()) if s.has_missed(now_s)]

    def place(self, state):
        return Reason.LATE, {"due_s": 1.0, "needs_s": 1.0}


def test_who_asked_is_refused_when_late_and_others_are_deferred():
    driver = build(num_seqs=1, ordering=HastyFcfs())
    driver.submit("running", [1], 6)
    driver.step()
    driver.submit("hasty", [2], 2, slo=Slo(ttft_s=2.5), refuse_late=True)
    driver.submit("patient", [3], 2, slo=Slo(ttft_s=2.5))
    for _ in range(2):
        driver.step()
    assert "hasty" not in driver.rejected
    driver.step()
    assert driver.rejected["hasty"].reason is RejectReason.LATE
    assert driver.scheduler.find("hasty") is None
    assert reasons(driver, "hasty")[-1] is Reason.REJECTED
    assert last(driver, "patient").reason in (Reason.LATE, Reason.NO_SLOT)
    assert Reason.LATE in reasons(driver, "patient")
    driver.run_to_end()
    assert driver.requests["patient"].finished is not driver.rejected["hasty"]


def test_a_group_is_refused_as_one():
    driver = build(num_seqs=2, ordering=HastyFcfs())
    driver.submit("running", [1], 8)
    driver.step()
    driver.submit("hasty", [2], 2, slo=Slo(ttft_s=2.5), refuse_late=True, n=2)
    driver.step()
    assert last(driver, "hasty.1").reason is Reason.NO_SLOT, "one slot is free, and they start together"
    for _ in range(3):
        driver.step()
    assert set(driver.rejected) == {"hasty", "hasty.1"}
    assert reasons(driver, "hasty") == reasons(driver, "hasty.1")
    assert reasons(driver, "hasty")[-1] is Reason.REJECTED
    driver.run_to_end()


@settings(deadline=None, max_examples=80)
@given(
    rows=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6), st.integers(1, 5), st.booleans()), max_size=10),
    num_seqs=st.integers(1, 3),
    num_blocks=st.integers(5, 12),
    data=st.data(),
)
def test_everybody_ends_once_however_late(rows, num_seqs, num_blocks, data):
    """The driver checks: one terminal event each, refusals only before the first start, explanations without gaps."""
    driver = build(num_seqs=num_seqs, budget=8, num_blocks=num_blocks, ordering=HastyFcfs(), max_explanations=3)
    for number, (length, max_tokens, patience, refuses) in enumerate(rows):
        name = f"r{number}"
        driver.submit(name, [number] * length, max_tokens, slo=Slo(ttft_s=float(patience)), refuse_late=refuses)
        for _ in range(data.draw(st.integers(0, 2))):
            driver.step(data.draw(st.integers(1, 3)))
        if data.draw(st.integers(0, 4)) == 0:
            driver.abort(f"r{data.draw(st.integers(0, number))}")
    driver.run_to_end()
    for driven in driver.requests.values():
        was_refused = driven.finished is driver.rejected.get(driven.request_id)
        assert not was_refused or (driven.request.refuse_late and not driven.output)
    assert len(driver.scheduler.live.explanations._ended) <= 3
    assert not driver.scheduler.live.explanations._live


class SteadyTime:
    """`StepTimeModel`: ten milliseconds per token."""

    def step_time_s(self, features):
        return 0.01 * features.num_tokens

    def decode_run_s(self, features, num_steps):
        return np.full(num_steps, 0.01 * features.num_tokens)


def slo_scheduler():
    config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=64)
    cache = CacheConfig(num_blocks=64, block_size=4, prefix_caching=False)
    return build_scheduler(config=config, cache=cache, policy=PolicyConfig(ordering="slo"), prior=SteadyTime())


def test_the_slo_order_says_who_is_late_before_its_time_is_over():
    """A prompt of 50 tokens takes half a second here, so with a target of 0.6 s it is lost after 0.1 s."""
    scheduler = slo_scheduler()
    executor = FakeExecutor(LIMITS)
    scheduler.add(request("running", arrival_s=0.0), 0.0)
    plan = scheduler.plan(0.0)
    scheduler.apply(executor.execute(plan), 0.05)
    target = Slo(ttft_s=0.6)
    scheduler.add(request("hasty", 50, slo=target, refuse_late=True, arrival_s=0.05), 0.05)
    scheduler.add(request("patient", 50, slo=target, arrival_s=0.05), 0.05)
    plan = scheduler.plan(0.06)
    assert not plan.events
    scheduler.apply(executor.execute(plan), 0.1)
    plan = scheduler.plan(0.7)
    assert [(e.request_id, e.reason) for e in plan.events] == [("hasty", RejectReason.LATE)]
    assert scheduler.explain("hasty", 0.7)[-1].reason is Reason.REJECTED
    late = scheduler.explain("patient", 0.7)
    assert Reason.LATE in [span.reason for span in late]
    details = next(span for span in late if span.reason is Reason.LATE).details
    assert details["due_s"] == pytest.approx(0.6)
    assert scheduler.runs.repeatable_steps(plan) >= 1
    scheduler.live.check()


@pytest.mark.parametrize("refuse_late", [False, True])
def test_while_somebody_may_be_refused_steps_are_planned_one_by_one(refuse_late):
    driver = build(num_seqs=1, ordering=HastyFcfs())
    driver.submit("running", [1], 9)
    driver.step()
    driver.submit("other", [2], 1, slo=Slo(ttft_s=100.0), refuse_late=refuse_late)
    plan = driver.plan()
    assert (driver.scheduler.runs.repeatable_steps(plan) == 1) == refuse_late


def test_the_slo_order_keeps_what_is_worth_more():
    """Two prompts of half a second, both due in 0.6 s: one can be in time, and value decides which."""
    for cheap, dear in (("a", "b"), ("b", "a")):
        scheduler = slo_scheduler()
        for name in "ab":
            value = 5.0 if name == dear else 1.0
            scheduler.add(request(name, 50, slo=Slo(ttft_s=0.6), value=value), 0.0)
        assert [admission.state.request_id for admission in scheduler.plan(0.0).admitted] == [dear]
        assert scheduler.find(cheap) is not None
