"""A jump is the same as its single steps: tables, block ids, counters, queue, tokens and events."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_machine import fingerprint

from expediter.core.errors import InvariantError
from expediter.core.events import Finished
from expediter.scheduling.build import EVICTIONS, PolicyConfig
from expediter.scheduling.config import SchedulerConfig
from expediter.testing.scheduler_driver import SchedulerDriver


def load(num_blocks, block_size, lengths, *, ordering="fcfs", policy=None, max_num_seqs=4, stop_token_ids=()):
    config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=16, max_model_len=400)
    driver = SchedulerDriver.build(
        config, num_blocks=num_blocks, block_size=block_size, ordering=ordering, policy=policy
    )
    for number, (prompt, output) in enumerate(lengths):
        driver.submit(
            f"r{number}", [number] * prompt, output, priority=number % 2, arrival_s=0.0, stop_token_ids=stop_token_ids
        )
    return driver


def history(driver):
    finished = [event for event in driver.events if isinstance(event, Finished)]
    return finished, {name: request.output for name, request in driver.requests.items()}


@settings(deadline=None, max_examples=60)
@given(
    block_size=st.integers(1, 5),
    num_blocks=st.integers(30, 90),
    lengths=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 18)), min_size=1, max_size=7),
    ordering=st.sampled_from(["fcfs", "priority"]),
    max_repeat=st.integers(2, 40),
)
def test_a_run_in_jumps_equals_a_run_in_steps(block_size, num_blocks, lengths, ordering, max_repeat):
    jumping = load(num_blocks, block_size, lengths, ordering=ordering)
    stepping = load(num_blocks, block_size, lengths, ordering=ordering)
    while jumping.live:
        plan = jumping.step(max_repeat)
        for _ in range(plan.num_steps):
            stepping.step()
        now_s = stepping.now_s
        assert fingerprint(jumping.scheduler, now_s) == fingerprint(stepping.scheduler, now_s)
    assert history(jumping) == history(stepping)
    assert jumping.executor.num_steps_executed == stepping.executor.num_steps_executed


def test_a_long_decode_is_one_jump():
    driver = load(64, 4, [(3, 150), (5, 90)])
    driver.run_to_end(max_repeat=1000)
    assert len(driver.steps) == 3  # the prompts, until the shorter ends, the rest
    assert driver.executor.num_steps_executed == 150
    assert driver.now_s == 151  # and the empty plan at the end


def test_the_chunks_of_a_long_prompt_are_one_jump():
    driver = load(64, 4, [(3, 150), (100, 20)])
    driver.run_to_end(max_repeat=1000)
    chunks = [step.entries["r1"] for step in driver.steps[:4]]
    assert chunks == [(0, 13), (13, 15), (88, 12), (100, 1)], (
        "beside the other's prompt, its decodes, the rest, decoding"
    )
    assert driver.executor.num_steps_executed == 150


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 100), st.integers(1, 18)), min_size=1, max_size=5),
    eviction=st.sampled_from(sorted(EVICTIONS)),
    max_repeat=st.integers(2, 40),
)
def test_chunks_in_jumps_equal_chunks_in_steps(lengths, eviction, max_repeat):
    jumping, stepping = (load(64, 4, lengths, policy=PolicyConfig(eviction=eviction)) for _ in range(2))
    while jumping.live:
        plan = jumping.step(max_repeat)
        for _ in range(plan.num_steps):
            stepping.step()
        assert fingerprint(jumping.scheduler, stepping.now_s) == fingerprint(stepping.scheduler, stepping.now_s)
    assert history(jumping) == history(stepping)


def test_ticks_show_what_a_run_has_computed_so_far():
    driver = load(64, 4, [(100, 20)])
    plan = driver.plan()
    scheduler = driver.scheduler
    assert scheduler.runs.repeatable_steps(plan) == 6
    scheduler.runs.tick()
    scheduler.runs.tick()
    assert scheduler.num_pending_tokens == 100 - 2 * 16
    assert scheduler.runs.repeatable_steps(plan) == 6, "those included that are over"
    scheduler.runs.repeat(plan, 4)
    driver.finish(plan)
    assert scheduler.num_pending_tokens == 100 - 4 * 16
    driver.run_to_end()


def test_a_jump_stops_where_blocks_run_out():
    driver = load(7, 2, [(2, 10), (2, 8)])
    driver.step()
    plan = driver.plan()
    # Each has a block for its prompt and one for the next two tokens; three more blocks are free.
    assert driver.scheduler.runs.repeatable_steps(plan) == 4
    with pytest.raises(InvariantError, match="cannot be repeated 5 times"):
        driver.scheduler.runs.repeat(plan, 5)
    driver.scheduler.runs.repeat(plan, 4)
    assert plan.num_steps == 4
    driver.finish(plan)
    driver.run_to_end(max_repeat=9)


def test_only_uneventful_steps_are_repeated():
    def repeatable(driver):
        driver.step()
        return driver.scheduler.runs.repeatable_steps(driver.plan())

    assert repeatable(load(64, 4, [(3, 20)])) == 19
    assert repeatable(load(64, 4, [(3, 20)], stop_token_ids=(1,))) == 1
    assert repeatable(load(64, 4, [(3, 20), (40, 20)])) == 1  # a prompt is under way
    waiting = load(64, 4, [(3, 20), (3, 20)], max_num_seqs=1)
    assert repeatable(waiting) == 19  # the queue cannot move before a slot is free
    waiting.submit("new", [1], 1)
    assert waiting.scheduler.runs.repeatable_steps(waiting.scheduler.live.step.plan) == 1
    blocked = load(8, 4, [(3, 20), (32, 1), (2, 2)])
    blocked.scheduler.config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_bypasses=0)
    assert repeatable(blocked) > 1  # the second does not fit, and nobody may pass it
    blocked.abort("r1")
    assert blocked.scheduler.runs.repeatable_steps(blocked.scheduler.live.step.plan) == 1
    aborted = load(64, 4, [(3, 20), (3, 20)])
    aborted.step()
    plan = aborted.plan()
    aborted.abort("r0")
    assert aborted.scheduler.runs.repeatable_steps(plan) == 1


def test_a_result_must_have_the_shape_of_the_jump():
    driver = load(64, 4, [(3, 20)])
    driver.step()
    plan = driver.plan()
    driver.scheduler.runs.repeat(plan, 5)
    result = driver.executor.execute(plan)
    short = type(result)(result.step_id, result.tokens[:1], 0.0)
    with pytest.raises(InvariantError, match="tokens of shape"):
        driver.scheduler.apply(short, driver.now_s)
    driver.apply(result)
    assert np.asarray(driver.output("r0")).shape == (6,)
    driver.run_to_end()
