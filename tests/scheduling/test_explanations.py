"""Every reason for waiting is told, with what it was about; memory is bounded; a quiet step notes nothing."""

from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest
from explained import LIMITS, build, last, make_scheduler, reasons, request, spans_of
from hypothesis import given
from hypothesis import strategies as st

from expediter.core.events import Admitted, PreemptCause, Preempted
from expediter.core.explanation import Reason, Span, timeline
from expediter.scheduling.build import PolicyConfig
from expediter.scheduling.explanations import Explanations
from expediter.scheduling.ordering.simple import Lifo
from expediter.testing.fake_executor import FakeExecutor


def test_a_life_without_waiting():
    driver = build()
    driver.submit("a", [1, 2, 3], 3)
    assert reasons(driver, "a") == [Reason.QUEUED]
    driver.step()
    assert reasons(driver, "a") == [Reason.QUEUED, Reason.PREFILLING, Reason.DECODING]
    assert spans_of(driver, "a")[1].details == {"new_tokens": 3, "cached_tokens": 0}
    driver.run_to_end()
    spans = spans_of(driver, "a")
    assert [span.reason for span in spans][-1] is Reason.ENDED
    assert spans[-1].details == {"cause": "length", "output_tokens": 3}
    assert spans_of(driver, "nobody") is None


def test_behind_whom_and_why_the_queue_stands():
    driver = build(num_seqs=1)
    driver.submit("a", [1, 2, 3], 5)
    driver.submit("b", [4] * 6, 2)
    driver.submit("c", [5] * 7, 2)
    assert last(driver, "c").details == {"requests": 2, "tokens": 9, "ahead_requests": 2, "ahead_tokens": 9}
    driver.step()
    driver.step()
    assert last(driver, "b").details["no_slot_s"] == 1.0
    assert "no slot being free" in last(driver, "b").in_words()
    waiting = last(driver, "c")
    assert waiting.reason is Reason.QUEUED
    assert {
        "ahead_requests": 1,
        "ahead_tokens": 6,
        "started": 1,
        "held_by": "no_slot",
    }.items() <= waiting.details.items()
    assert "1 request with 6 tokens" in waiting.in_words()
    assert driver.scheduler.num_waiting_by_reason == {"no_slot": 2}
    driver.run_to_end()
    assert spans_of(driver, "c")[0].details["started"] == 2


def test_tried_in_vain_for_want_of_a_slot():
    """Where a waiting request may displace others, it is tried even while no slot is free."""
    driver = build(num_seqs=1, ordering="priority")
    driver.submit("a", [1, 2, 3], 5)
    driver.step()
    driver.submit("b", [4] * 6, 2)
    driver.step()
    assert last(driver, "b").reason is Reason.NO_SLOT
    assert "its turn" in last(driver, "b").in_words()
    driver.abort("b")
    assert driver.scheduler.num_waiting_by_reason == {}


def test_the_order_counts_and_not_the_arrival():
    driver = build(num_seqs=1, ordering="lifo")
    for arrival_s, name in enumerate("abc"):
        driver.submit(name, [1, 2], 2, arrival_s=float(arrival_s))
    assert last(driver, "a").details["ahead_requests"] == 2
    assert last(driver, "c").details["ahead_requests"] == 0
    assert "first in line" in last(driver, "c").in_words()


def test_the_token_budget():
    driver = build(num_seqs=2, budget=4)
    driver.submit("long", list(range(12)), 2)
    driver.submit("next", [1, 2], 2)
    driver.step()
    assert driver.scheduler.num_waiting_by_reason == {"budget": 1}
    assert last(driver, "next").details["held_by"] == "budget"
    driver.run_to_end()
    queued = spans_of(driver, "next")[0]
    assert queued.details["budget_s"] == 3.0
    assert "token budget" in queued.in_words()
    admitted = next(e for e in driver.events if isinstance(e, Admitted) and e.request_id == "next")
    assert admitted.held_s == {"budget": 3.0, "step": 1.0}, "and one turn of the driver before the first plan"


def test_too_few_blocks():
    driver = build(num_blocks=4)
    driver.submit("small", [1] * 8, 4)
    driver.submit("large", [2] * 12, 2)
    driver.step()
    held = last(driver, "large")
    assert held.reason is Reason.NO_BLOCKS
    assert (held.details["needs_blocks"], held.details["available_blocks"]) == (3, 2)
    assert driver.scheduler.num_waiting_by_reason == {"no_blocks": 1}
    assert "KV blocks" in held.in_words()
    driver.run_to_end()


def test_preempted_for_a_block_and_computed_again():
    driver = build(num_seqs=2, num_blocks=4)
    driver.submit("a", [1] * 6, 8)
    driver.submit("b", [2] * 6, 8)
    while not any(isinstance(event, Preempted) for event in driver.events):
        driver.step()
    event = next(e for e in driver.events if isinstance(e, Preempted))
    assert event.cause is PreemptCause.GROWTH
    span = next(s for s in spans_of(driver, event.request_id) if s.reason is Reason.PREEMPTED)
    assert span.details["for_request"] == event.for_request_id
    assert span.details["lost_tokens"] == event.num_lost_tokens
    assert "preempted" in span.in_words()
    driver.run_to_end()
    again = [s for s in spans_of(driver, event.request_id) if s.reason is Reason.PREFILLING][-1]
    assert again.details["resumed"] is True
    assert "recomputing" in again.in_words()


def test_preempted_by_whom():
    driver = build(num_seqs=1, ordering="priority")
    driver.submit("low", [1, 2, 3], 9, priority=1)
    driver.step()
    driver.submit("high", [4, 5, 6], 2)
    driver.step()
    span = last(driver, "low")
    assert (span.reason, span.details["cause"], span.details["for_request"]) == (Reason.PREEMPTED, "priority", "high")
    assert "for high" in span.in_words()
    driver.run_to_end()


def test_over_age_goes_first():
    class ShortPatience(Lifo):
        max_wait_s = 2.0

    driver = build(num_seqs=1, ordering=ShortPatience())
    driver.submit("running", [1], 6)
    driver.step()
    driver.submit("old", [1, 2], 1)
    for _ in range(3):
        driver.step()
    driver.submit("young", [1, 2], 1)
    assert last(driver, "old").details["over_age"] is True
    assert last(driver, "old").details["ahead_requests"] == 0
    assert "ageing bound" in last(driver, "old").in_words()
    driver.run_to_end()
    started = next(s for s in spans_of(driver, "old") if s.reason is Reason.PREFILLING)
    assert started.details["over_age"] is True
    assert "by age" in started.in_words()


def test_behind_in_fairness():
    driver = build(num_seqs=1, budget=64, ordering="fair_share")
    driver.submit("greedy0", [1] * 40, 4, tenant="greedy")
    driver.submit("other", [2] * 4, 2, tenant="other")
    driver.step()
    driver.submit("greedy1", [3] * 4, 2, tenant="greedy")
    span = last(driver, "greedy1")
    assert span.reason is Reason.FAIRNESS
    assert span.details["service"] >= 40 > span.details["least_service"]
    assert "other tenants" in span.in_words()
    assert last(driver, "other").reason is Reason.QUEUED
    assert last(driver, "greedy1").details["ahead_requests"] == 1


def test_behind_in_fairness_by_now():
    """It was first when it came; then another of its tenant was served, and whoever asks is told."""
    driver = build(num_seqs=1, budget=64, ordering="fair_share")
    driver.submit("first", [1] * 40, 4, tenant="greedy")
    driver.submit("second", [3] * 4, 2, tenant="greedy")
    driver.submit("other", [2] * 4, 2, tenant="other")
    assert last(driver, "second").reason is Reason.QUEUED
    driver.step()
    assert last(driver, "second").reason is Reason.FAIRNESS


def test_behind_in_fairness_by_quantum():
    driver = build(num_seqs=1, budget=64, ordering=None, policy=PolicyConfig(ordering="deficit_prefix"))
    ordering = driver.scheduler.policy.rules.ordering
    ordering._quantum = 30.0
    for name in ("greedy0", "greedy1"):
        driver.submit(name, [1] * 40, 4, tenant="greedy")
    driver.submit("other", [2] * 4, 2, tenant="other")
    driver.step()
    assert ordering.place(driver.scheduler.find("greedy1"))[0] is Reason.FAIRNESS
    assert ordering.place(driver.scheduler.find("other"))[0] is Reason.QUEUED


def test_a_batch_in_progress_has_to_end():
    parts = make_scheduler(batching="static")
    parts.add(request("a"), 0.0)
    result = FakeExecutor(LIMITS).execute(plan := parts.plan(0.0))
    parts.apply(result, 1.0)
    parts.add(request("b"), 1.0)
    assert not plan.is_empty
    assert not parts.plan(1.0).admitted
    assert parts.num_waiting_by_reason == {"batch": 1}
    span = parts.explain("b", 3.0)[-1]
    assert (span.reason, span.details["batch_s"]) == (Reason.QUEUED, 2.0)
    assert "batch in progress" in span.in_words()


def test_refused_at_once():
    driver = build()
    assert not driver.submit("long", [1] * 60, 60)
    (span,) = spans_of(driver, "long")
    assert span.reason is Reason.REJECTED
    assert "max_model_len" in span.in_words()


# -- bounds and costs -------------------------------------------------------------------------------------------------


def test_the_last_ones_are_kept():
    driver = build(max_explanations=2)
    for name in "abc":
        driver.submit(name, [1], 1)
        driver.run_to_end()
    assert spans_of(driver, "a") is None
    assert reasons(driver, "b")[-1] is reasons(driver, "c")[-1] is Reason.ENDED
    none = build(max_explanations=0)
    none.submit("a", [1], 1)
    none.run_to_end()
    assert spans_of(none, "a") is None


def test_a_restless_request_has_a_bounded_list():
    explanations = Explanations(4)
    explanations.queued("a", 0.0, (Reason.QUEUED, {}), (0, 0))
    for turn in range(1, 500):
        explanations.held("a", float(turn), (Reason.NO_SLOT, Reason.NO_BLOCKS)[turn % 2], {})
    spans = explanations.of("a", 500.0, Reason.QUEUED, {})
    assert len(spans) <= 33
    assert (spans[0].from_s, spans[-1].to_s) == (0.0, None)
    assert all(before.to_s == after.from_s for before, after in pairwise(spans))
    held_s = explanations.admitted("a", 500.0, {"new_tokens": 1, "cached_tokens": 0})
    assert sum(held_s.values()) == pytest.approx(500.0)


def test_a_decode_step_notes_nothing():
    driver = build(num_seqs=8, budget=64)
    for number in range(8):
        driver.submit(f"r{number}", [number] * 3, 20)
    driver.step()
    names = ("held", "admitted", "queued", "preempted", "decoding", "ended")
    with patch.multiple(Explanations, **{name: lambda *_: pytest.fail("a quiet step took a note") for name in names}):
        for _ in range(5):
            driver.step()


@given(st.lists(st.tuples(st.sampled_from([None, *Reason][:6]), st.floats(0.01, 5)), max_size=12), st.floats(0.01, 5))
def test_a_wait_is_accounted_for_in_full(turns, rest_s):
    explanations = Explanations(1)
    explanations.queued("a", 1.0, (Reason.QUEUED, {}), (3, 40))
    now_s = 1.0
    for reason, lasts_s in turns:
        explanations.turn(reason, now_s)
        now_s += lasts_s
    now_s += rest_s
    held_s = explanations.admitted("a", now_s, {"new_tokens": 1, "cached_tokens": 0})
    assert sum(held_s.values()) == pytest.approx(now_s - 1.0)
    assert all(seconds > 0 for seconds in held_s.values())


def test_every_reason_has_words_and_lines_line_up():
    details = {
        **{
            "needs_blocks": 3,
            "available_blocks": 1,
            "service": 5.0,
            "least_service": 1.0,
            "due_s": 1.0,
            "needs_s": 2.0,
        },
        **{"cause": "priority", "for_request": "{r}", "lost_tokens": 1, "new_tokens": 2, "cached_tokens": 1},
        **{"output_tokens": 1, "requests": 1, "tokens": 2, "started": 1, "held_by": "budget", "no_slot_s": 0.5},
        **{"replica": 1, "because": "it is its turn", "backend": "b0", "first_byte_s": 0.5},
    }
    spans = [Span(float(i), float(i) + 1 if i < 13 else None, reason, details) for i, reason in enumerate(Reason)]
    lines = timeline(spans)
    assert len(lines) == len(set(lines)) == len(spans)
    assert len({line.index("s  ") for line in lines}) == 1
    assert "{r}" in "".join(lines)
    assert timeline([]) == []


def test_no_explanation_tells_what_a_client_wrote():
    driver = build(num_blocks=4)
    prompt = [41, 42, 43, 44, 45, 46]
    driver.submit("a", prompt, 8, tenant="t")
    driver.submit("b", prompt[::-1], 8, tenant="t")
    driver.run_to_end()
    for name in "ab":
        for span in spans_of(driver, name):
            values = list(span.details.values())
            assert all(isinstance(value, str | int | float | bool) for value in values)
            assert not any(isinstance(value, list | tuple | np.ndarray) for value in values)
