"""Aborts in every state, names used twice, and the same tokens however a request is run."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expediter.core.errors import InvariantError
from expediter.core.events import Finished
from expediter.core.request import FinishReason
from expediter.scheduling.config import SchedulerConfig
from expediter.testing.scheduler_driver import SchedulerDriver

PROMPT = [5, 3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def build(**changes):
    limits = {"max_num_seqs": 3, "max_num_batched_tokens": 8, "max_model_len": 64, **changes}
    return SchedulerDriver.build(SchedulerConfig(**limits), num_blocks=16, block_size=2, ordering="priority")


def waiting(driver):
    for number in range(3):
        driver.submit(f"other{number}", [number, 7], 9, priority=-1)
    driver.step()
    driver.submit("it", PROMPT, 4)
    driver.step()
    assert not driver.requests["it"].is_running


def mid_chunk(driver):
    driver.submit("it", PROMPT, 4)
    driver.step()
    assert 0 < driver.requests["it"].num_computed_tokens < len(PROMPT)


def decoding(driver):
    driver.submit("it", PROMPT, 4)
    driver.submit("other", PROMPT, 4)
    while len(driver.output("it")) < 2:
        driver.step()


def last_step(driver):
    driver.submit("it", PROMPT, 4)
    while len(driver.output("it")) < 3:
        driver.step()


def preempted(driver):
    driver.submit("it", PROMPT, 4, priority=1)
    driver.step()
    driver.submit("other", [9] * 24, 3)
    driver.step()
    assert driver.requests["it"].num_preemptions == 1
    assert not driver.requests["it"].is_running


@pytest.mark.parametrize("executes_first", [None, False, True])
@pytest.mark.parametrize("reach", [waiting, mid_chunk, decoding, last_step, preempted])
def test_an_abort_frees_once_and_ends_once(reach, executes_first):
    """Case 14 (vllm PR#29987, sglang PR#36988): in each state, between steps, and before or after the execution."""
    driver = build()
    reach(driver)
    plan = None if executes_first is None else driver.plan()
    result = driver.executor.execute(plan) if executes_first else None
    for _ in range(2):  # a second abort of the same name is no error and does nothing
        driver.abort("it")
    request = driver.requests["it"]
    assert request.finished.reason is FinishReason.ABORT
    num_output = len(request.output)
    if plan is not None:
        result = result or driver.executor.execute(plan)
        driver.apply(result)
        driver.apply_late(result)
    assert len(request.output) == num_output
    driver.run_to_end()
    ends = [event for event in driver.events if isinstance(event, Finished) and event.request_id == "it"]
    assert len(ends) == 1
    assert driver.submit("it", PROMPT, 4)
    driver.run_to_end()
    assert driver.requests["it"].finished.reason is FinishReason.LENGTH


def test_an_abort_for_a_stop_string_ends_as_a_stop():
    """Case 14, from the other side: the driver of the loop ends a request for a reason of its own."""
    driver = build()
    decoding(driver)
    (event,) = driver.scheduler.abort("it", driver.now_s, FinishReason.STOP)
    assert event.reason is FinishReason.STOP
    assert event.num_output_tokens == len(driver.output("it")) == 2


def test_an_id_in_use_is_refused_and_harms_nobody():
    """Case 20 (vllm #10583, #23697): two live requests can never have one id; the driver makes ids unique."""
    driver = build()
    decoding(driver)
    with pytest.raises(InvariantError, match="in use"):
        driver.scheduler.add(driver.requests["it"].request, driver.now_s)
    driver.run_to_end()
    assert driver.requests["it"].finished.reason is FinishReason.LENGTH


@pytest.mark.parametrize("reach", [waiting, mid_chunk, decoding, last_step, preempted])
def test_a_reused_id_gets_nothing_of_the_old_request(reach):
    """Case 20 (vllm #10583, #23697): aborted with a step in flight and used again at once, for another prompt."""
    driver = build()
    reach(driver)
    plan = driver.plan()
    driver.abort("it")
    assert driver.submit("it", [8, 8, 8], 5)
    driver.finish(plan)
    assert driver.output("it") == []
    driver.run_to_end()
    assert len(driver.output("it")) == 5


def alone(prompt, max_tokens, stops):
    driver = build(max_num_batched_tokens=64)
    driver.submit("it", prompt, max_tokens, stop_token_ids=stops)
    return driver


def batched(prompt, max_tokens, stops):
    driver = build(max_num_batched_tokens=64)
    driver.submit("x", [1, 2, 3], 9)
    driver.submit("it", prompt, max_tokens, stop_token_ids=stops)
    driver.submit("y", [*prompt, 4], 9)
    return driver


def chunked(prompt, max_tokens, stops):
    driver = build(max_num_batched_tokens=3)
    driver.submit("x", [1, 2, 3], 9)
    driver.submit("it", prompt, max_tokens, stop_token_ids=stops)
    return driver


def preempted_again_and_again(prompt, max_tokens, stops):
    driver = build(max_num_seqs=1, max_preemptions=3)
    driver.submit("it", prompt, max_tokens, stop_token_ids=stops, priority=9)
    request = driver.requests["it"]
    for number in range(3):
        while not request.is_running and request.finished is None:
            driver.step()
        driver.step()
        driver.submit(f"urgent{number}", [number] * 29, 1)
        driver.step()
    return driver


def warm(prompt, max_tokens, stops):
    driver = build()
    driver.submit("before", prompt, max_tokens)
    driver.run_to_end()
    driver.submit("it", prompt, max_tokens, stop_token_ids=stops)
    return driver


@settings(deadline=None, max_examples=40)
@given(
    prompt=st.lists(st.integers(0, 49), min_size=3, max_size=14),
    max_tokens=st.integers(4, 12),
    stops=st.sampled_from([(), tuple(range(0, 50, 8))]),
)
def test_tokens_do_not_depend_on_how_a_request_is_run(prompt, max_tokens, stops):
    """Case 23 (vllm #5543, #40896, #51187): alone, batched, chunked, preempted and warm give the same tokens."""
    outputs = []
    for way in (alone, batched, chunked, preempted_again_and_again, warm):
        driver = way(prompt, max_tokens, stops)
        driver.run_to_end()
        outputs.append((driver.output("it"), driver.requests["it"].finished.reason))
    assert all(output == outputs[0] for output in outputs)


def test_the_ways_are_what_their_names_say():
    """Case 23: no way of running is the plain one by accident."""
    driver = chunked(PROMPT, 12, ())
    driver.run_to_end()
    assert sum("it" in step.entries and "it" not in step.decodes for step in driver.steps) >= 4
    driver = preempted_again_and_again(PROMPT, 12, ())
    driver.run_to_end()
    assert driver.requests["it"].num_preemptions == 3
    driver = warm(PROMPT, 12, ())
    driver.run_to_end()
    assert driver.requests["it"].admissions[0] > 0
