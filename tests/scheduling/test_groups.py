"""Sequences of one prompt: they start together, share its blocks, and are on their own from the fork on."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expediter.core.errors import InvariantError
from expediter.core.events import Admitted, Preempted, RejectReason
from expediter.core.explanation import Reason
from expediter.core.request import FinishReason, Request, SamplingParams
from expediter.core.slo import Slo
from expediter.scheduling.build import ORDERINGS, PolicyConfig
from expediter.scheduling.config import SchedulerConfig
from expediter.testing.driven_request import sequences_of
from expediter.testing.scheduler_driver import SchedulerDriver

PROMPT = [5, 3, 1, 4, 1, 5, 9, 2, 6, 5]


def build(num_blocks=32, block_size=4, policy=None, ordering="fcfs", prefix_caching=True, **changes):
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "max_model_len": 64, **changes}
    return SchedulerDriver.build(
        SchedulerConfig(**limits),
        num_blocks=num_blocks,
        block_size=block_size,
        policy=policy,
        ordering=ordering,
        prefix_caching=prefix_caching,
    )


def running(driver):
    return sorted(request.request_id for request in driver.live if request.is_running)


def table(driver, request_id):
    kv, state = driver.scheduler.kv, driver.scheduler.find(request_id)
    return kv.tables.owned(state.slot).tolist()


def test_the_prompt_is_computed_once_and_its_full_blocks_are_shared():
    driver = build()
    assert driver.submit("a", PROMPT, 5, n=3)
    plan = driver.step()
    assert plan.features.num_tokens == len(PROMPT)
    assert plan.sampled.tolist() == [0, 0, 0]
    assert [len(driver.output(name)) for name in ("a", "a.1", "a.2")] == [1, 1, 1]
    tables = [table(driver, name) for name in ("a", "a.1", "a.2")]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({blocks[2] for blocks in tables}) == 3
    assert driver.scheduler.kv.num_used_blocks == 2 + 3
    plan = driver.step()
    assert plan.copies.tolist() == [[tables[0][2]] * 2, [tables[1][2], tables[2][2]]]
    assert plan.features.num_decodes == 3
    assert not driver.step().copies.size
    driver.run_to_end()
    assert len({tuple(driver.output(name)) for name in ("a", "a.1", "a.2")}) == 3


def test_at_a_block_edge_there_is_nothing_to_copy():
    driver = build()
    driver.submit("a", PROMPT[:8], 5, n=3)
    driver.step()
    assert not driver.step().copies.size
    driver.run_to_end()


def test_a_follower_counts_every_token_as_reused():
    driver = build()
    driver.submit("before", PROMPT, 1)
    driver.run_to_end()
    driver.submit("a", PROMPT, 2, n=2)
    driver.run_to_end()
    cached = {e.request_id: e.num_cached_tokens for e in driver.events if isinstance(e, Admitted)}
    assert cached == {"before": 0, "a": 8, "a.1": 10}


def test_eight_sequences_with_seven_slots_are_refused_at_once():
    """Case 19 (vllm PR#53936, #51629, #5578): they could never start together."""
    driver = build(max_num_seqs=7)
    assert not driver.submit("a", PROMPT, 3, n=8)
    assert {rejected.reason for rejected in driver.rejected.values()} == {RejectReason.TOO_MANY_SEQUENCES}
    assert len(driver.rejected) == 8
    assert driver.submit("b", PROMPT, 3, n=7)
    driver.run_to_end()


def test_eight_sequences_wait_for_the_eighth_slot():
    """Case 19: seven slots are free, and none of the eight starts; nobody is passed for ever."""
    driver = build(max_bypasses=2)
    driver.submit("other", [1], 9)
    driver.step()
    driver.submit("a", PROMPT, 3, n=8)
    driver.submit("small", [2], 3)
    while driver.requests["other"].finished is None:
        assert not any(name.startswith("a") for name in running(driver))
        driver.step()
    driver.run_to_end()
    assert driver.requests["small"].finished.now_s < driver.requests["a"].finished.now_s


def test_too_few_blocks_for_all_of_them_start_none():
    """Case 19: blocks are there for three of four."""
    driver = build(num_blocks=8)
    driver.submit("other", [1] * 11, 2)  # three of the eight
    driver.step()
    driver.submit("a", PROMPT, 2, n=4)  # 3 + 3
    driver.step()
    assert not any(name.startswith("a") for name in running(driver))
    driver.run_to_end()


@pytest.mark.parametrize(("num_blocks", "fits"), [(5, False), (6, True)])
def test_what_can_never_start_together_is_refused(num_blocks, fits):
    driver = build(num_blocks=num_blocks)
    assert driver.submit("a", PROMPT, 2, n=4) is fits
    assert fits or driver.rejected["a"].reason is RejectReason.UNSERVABLE
    driver.run_to_end()


def test_full_reservation_counts_every_life():
    policy = PolicyConfig(memory="full")
    assert not build(num_blocks=8, policy=policy).submit("a", PROMPT, 10, n=3)  # 5 + 2 * 3
    driver = build(num_blocks=11, policy=policy)
    driver.submit("a", PROMPT, 10, n=3)
    driver.step()
    assert driver.scheduler.kv.num_available_blocks == 0
    driver.run_to_end()
    assert not any(isinstance(event, Preempted) for event in driver.events)


def waiting(driver):
    driver.submit("other", [7] * 20, 3, priority=-1)
    driver.submit("a", PROMPT, 4, n=3)
    driver.step()
    assert not driver.requests["a"].is_running


def mid_chunk(driver):
    driver.submit("a", PROMPT, 4, n=3)
    driver.step()
    assert 0 < driver.requests["a"].num_computed_tokens < len(PROMPT)


def forked(driver):
    mid_chunk(driver)
    driver.step()
    assert driver.output("a.2")


def preempted(driver):
    mid_chunk(driver)
    driver.submit("urgent", [9] * 48, 2, priority=-1)
    driver.step()
    assert [driver.requests[name].num_preemptions for name in ("a", "a.1", "a.2")] == [1, 1, 1]


@pytest.mark.parametrize("executes_first", [None, False, True])
@pytest.mark.parametrize("victims", [["a"], ["a.1"], ["a", "a.1"], ["a", "a.1", "a.2"], ["a.2", "a.1", "a"]])
@pytest.mark.parametrize("reach", [waiting, mid_chunk, forked, preempted])
def test_an_abort_takes_one_and_leaves_the_others(reach, victims, executes_first):
    """Cases 14 and 19: whoever goes, in each state: no leak, no stall, and the others say what they would have said."""
    driver = build(num_blocks=16, max_num_batched_tokens=8, ordering="priority")
    reach(driver)
    plan = None if executes_first is None else driver.plan()
    result = driver.executor.execute(plan) if executes_first else None
    for name in victims:
        driver.abort(name)
    if plan is not None:
        driver.apply(result or driver.executor.execute(plan))
    driver.run_to_end()
    for name in ("a", "a.1", "a.2"):
        reason = FinishReason.ABORT if name in victims else FinishReason.LENGTH
        assert driver.requests[name].finished.reason is reason


def test_who_takes_over_computes_nothing_twice():
    driver = build(max_num_batched_tokens=8)
    mid_chunk(driver)
    driver.abort("a")
    plan = driver.step()
    assert (plan.starts.tolist(), plan.lengths.tolist()) == ([8], [2])
    assert len(driver.output("a.1")) == len(driver.output("a.2")) == 1
    driver.run_to_end()


def test_a_leader_that_ends_with_its_first_token_leaves_the_others_their_block():
    driver = build()
    probe = build()
    probe.submit("a", PROMPT, 5)
    probe.run_to_end()
    first = probe.output("a")[0]
    driver.submit("a", PROMPT, 5, stop_token_ids=(first,), n=3)
    driver.step()
    assert driver.requests["a"].finished.reason is FinishReason.STOP
    driver.submit("thief", [8] * 9, 3)  # gets the leader's partial block in the step that copies it
    driver.run_to_end()


def test_a_group_is_preempted_as_one_and_comes_back_as_one():
    driver = build(num_blocks=16, max_num_batched_tokens=8, ordering="priority")
    preempted(driver)
    assert running(driver) == ["urgent"]
    while running(driver) != ["a", "a.1", "a.2"]:
        assert not any(name.startswith("a") for name in running(driver))
        driver.step()
    driver.run_to_end()


def test_after_the_fork_each_is_preempted_and_resumed_on_its_own():
    """Case 23: with too few blocks for all of them to grow, each loses its blocks in turn and loses no token."""
    driver = build(num_blocks=7)
    driver.submit("a", PROMPT, 14, n=4)
    driver.run_to_end()
    assert any(isinstance(event, Preempted) for event in driver.events)
    resumed = [e for e in driver.events if isinstance(e, Admitted) and e.resumed]
    assert resumed
    assert all(event.num_cached_tokens >= 8 for event in resumed)  # the prompt's full blocks are still there


@pytest.mark.parametrize("max_preemptions", [1, 2])
def test_a_group_is_safe_before_its_members_would_be_preempted_too_often(max_preemptions):
    driver = build(num_blocks=16, max_num_batched_tokens=8, ordering="priority", max_preemptions=max_preemptions)
    for number in range(4):
        driver.submit("a", PROMPT, 14, n=3) if not number else None
        while not driver.requests["a"].is_running:
            driver.step()
        driver.submit(f"urgent{number}", [number] * 48, 2, priority=-1)
        driver.step()
    driver.run_to_end()
    assert driver.requests["a"].num_preemptions <= max_preemptions


def test_a_displaced_group_counts_all_that_it_gives_back():
    """Blocks that siblings share come back when the last of them leaves."""
    driver = build(num_blocks=8, ordering="priority", block_size=4)
    driver.submit("a", PROMPT + PROMPT[:6], 4, n=4, priority=1)  # four shared blocks and four of their own
    driver.step()
    driver.submit("urgent", [7] * 28, 4)
    driver.step()
    assert running(driver) == ["urgent"]
    driver.run_to_end()


def test_every_sequence_can_be_explained():
    driver = build(num_blocks=16, max_num_batched_tokens=8, ordering="priority")
    waiting(driver)
    spans = [driver.scheduler.explain(name, driver.now_s) for name in ("a", "a.1", "a.2")]
    assert spans[0] == spans[1] == spans[2]
    assert sum(driver.scheduler.num_waiting_by_reason.values()) == driver.scheduler.num_waiting == 3
    driver.run_to_end()
    told = [[s.reason for s in driver.scheduler.explain(name, driver.now_s)] for name in ("a", "a.1", "a.2")]
    assert told == [[Reason.QUEUED, Reason.PREFILLING, Reason.DECODING, Reason.ENDED]] * 3


def test_a_late_group_is_refused_as_one():
    driver = build(ordering="slo")
    request = Request(
        request_id="a",
        prompt=np.array(PROMPT, np.int32),
        max_tokens=3,
        slo=Slo(ttft_s=0.1),
        refuse_late=True,
        arrival_s=driver.now_s,
    )
    scheduler = driver.scheduler
    scheduler.add_group(sequences_of(request, 3), 0.0)
    plan = scheduler.plan(50.0)
    assert plan.is_empty
    assert [(e.request_id, e.reason) for e in plan.events] == [(n, RejectReason.LATE) for n in ("a", "a.1", "a.2")]
    assert not scheduler.has_work
    scheduler.live.check()


def test_a_group_must_be_one():
    driver = build()
    request = Request(request_id="a", prompt=np.array(PROMPT, np.int32), max_tokens=3)
    for other in (
        replace(request, request_id="b", max_tokens=4),
        replace(request, request_id="b", prompt=np.array(PROMPT[1:], np.int32)),
        replace(request, request_id="b", cache_salt="x"),
        request,
    ):
        with pytest.raises(InvariantError, match="group"):
            driver.scheduler.add_group([request, other], 0.0)
    assert not driver.scheduler.has_work


groups = st.lists(
    st.tuples(st.integers(1, 20), st.integers(1, 12), st.integers(1, 4), st.sampled_from([(), (3, 7, 11, 30)])),
    min_size=1,
    max_size=6,
)


@settings(deadline=None, max_examples=150)
@given(
    groups,
    st.sampled_from(sorted(ORDERINGS)),
    st.sampled_from(["paged", "full", "predicted_peak"]),
    st.sampled_from(["stall_free", "iteration_level"]),
    st.booleans(),
    st.integers(1, 5),
)
def test_groups_under_every_rule_say_what_they_say_alone(rows, ordering, memory, batching, prefix_caching, block_size):
    """Case 23: whatever the policy; `SchedulerDriver` compares each token with the toy model's."""
    driver = build(
        num_blocks=-(-96 // block_size),
        block_size=block_size,
        policy=PolicyConfig(memory=memory, batching=batching),
        ordering=ordering,
        prefix_caching=prefix_caching,
        max_num_seqs=5,
        max_num_batched_tokens=64,
    )
    for number, (length, max_tokens, n, stops) in enumerate(rows):
        request = Request(
            request_id=f"r{number}",
            prompt=np.array((PROMPT * 2)[:length], np.int32),
            max_tokens=max_tokens,
            stop_token_ids=stops,
            sampling=SamplingParams(seed=number),
            arrival_s=driver.now_s,
        )
        driver.add(*sequences_of(request, n))
        driver.step(max_repeat=3)
    driver.run_to_end(max_repeat=5)
