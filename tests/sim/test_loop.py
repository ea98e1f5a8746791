"""Virtual time: one total order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expediter.core.errors import InvariantError
from expediter.sim.loop import EventKind, EventLoop

events = st.lists(
    st.tuples(st.sampled_from([0.0, 0.1, 0.1 + 0.2, 0.3, 5.0]), st.sampled_from(EventKind), st.integers(0, 3)),
    max_size=30,
)


@given(events)
def test_order_is_time_then_kind_then_sequence_then_scheduling(planned):
    loop, seen = EventLoop(), []
    for index, (time_s, kind, sequence) in enumerate(planned):
        loop.schedule(time_s, kind, sequence, lambda now_s, index=index: seen.append((now_s, index)))
    loop.run()
    expected = sorted(range(len(planned)), key=lambda index: (*planned[index], index))
    assert seen == [(planned[index][0], index) for index in expected]


def test_a_step_that_ends_is_over_before_an_arrival_and_both_before_the_plan():
    loop, seen = EventLoop(), []
    for kind in (EventKind.PLAN, EventKind.ARRIVAL, EventKind.STEP_END):
        loop.schedule(1.0, kind, 0, lambda now_s, kind=kind: seen.append(kind))
    loop.run()
    assert seen == [EventKind.STEP_END, EventKind.ARRIVAL, EventKind.PLAN]


def test_actions_schedule_and_cancel():
    loop, seen = EventLoop(), []

    def first(now_s):
        seen.append(("first", now_s))
        loop.cancel(late)
        loop.schedule(now_s, EventKind.PLAN, 0, lambda now_s: seen.append(("now", now_s)))

    loop.schedule(1.0, EventKind.STEP_END, 0, first)
    late = loop.schedule(2.0, EventKind.STEP_END, 0, lambda now_s: seen.append(("late", now_s)))
    loop.run()
    assert seen == [("first", 1.0), ("now", 1.0)]
    assert loop.now_s == 1.0


@pytest.mark.parametrize("time_s", [0.5, float("nan"), float("inf")])
def test_time_does_not_go_back(time_s):
    loop = EventLoop()
    loop.schedule(1.0, EventKind.PLAN, 0, lambda now_s: loop.schedule(time_s, EventKind.PLAN, 0, print))
    with pytest.raises(InvariantError, match="cannot be scheduled"):
        loop.run()
