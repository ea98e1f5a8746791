"""Who may run: what never fits, who waits for whom, who gives way, and how much a step holds."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expediter.core.events import Admitted, PreemptCause, Preempted, RejectReason
from expediter.scheduling.config import SchedulerConfig
from expediter.testing.scheduler_driver import SchedulerDriver


def events_of(driver, kind, request_id):
    return [event for event in driver.events if isinstance(event, kind) and event.request_id == request_id]


def prompt(seed: int, length: int) -> list[int]:
    """Return a prompt that shares no block with one of another seed."""
    return [(seed * 7 + i * (seed + 3)) % 49 if i else seed for i in range(length)]


@settings(deadline=None, max_examples=60)
@given(num_blocks=st.integers(1, 8), block_size=st.integers(1, 5), excess=st.integers(1, 9), data=st.data())
def test_what_never_fits_the_pool_is_refused_and_the_next_one_served(num_blocks, block_size, excess, data):
    """Case 1 (vllm #39734): the prompt is below max_model_len, but not below the pool; then a short one comes."""
    capacity = num_blocks * block_size
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=4, max_model_len=10 * capacity + 20)
    driver = SchedulerDriver.build(config, num_blocks=num_blocks, block_size=block_size)
    # The KV of the last output token is never stored, so the pool holds one token less than the whole request.
    length = data.draw(st.integers(1, capacity + excess))
    assert not driver.submit("never", prompt(1, length), capacity + 1 + excess - length)
    assert driver.rejected["never"].reason is RejectReason.UNSERVABLE
    assert str(capacity) in driver.rejected["never"].message
    exact = data.draw(st.integers(1, capacity))
    assert driver.submit("fits", prompt(2, exact), capacity + 1 - exact)
    assert driver.submit("short", prompt(3, 1), 1)
    driver.run_to_end()


def test_a_prompt_beyond_the_model_is_refused_as_too_long():
    """Case 1 (vllm #39734), the model's side of the limit."""
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=4, max_model_len=10)
    driver = SchedulerDriver.build(config, num_blocks=16, block_size=4)
    assert driver.submit("fits", prompt(1, 7), 3)
    assert not driver.submit("long", prompt(1, 7), 4)
    assert driver.rejected["long"].reason is RejectReason.TOO_LONG
    driver.run_to_end()


@pytest.mark.parametrize("ordering", ["fcfs", "priority"])
@pytest.mark.parametrize("max_preemptions", [0, 1, 3])
@pytest.mark.parametrize("load", [2, 5, 10])
def test_overload_ends_with_few_preemptions_each(ordering, max_preemptions, load):
    """Case 2 (inference-sim #349, #297): a pool for five requests gets 2 to 10 times as many."""
    config = SchedulerConfig(
        max_num_seqs=20, max_num_batched_tokens=24, max_model_len=64, max_preemptions=max_preemptions
    )
    driver = SchedulerDriver.build(config, num_blocks=20, block_size=4, ordering=ordering)
    for number in range(5 * load):
        driver.submit(f"r{number}", prompt(number, 3 + number % 4), 10, priority=number % 3)
    driver.run_to_end()
    assert all(len(set(step.preempted)) == len(step.preempted) for step in driver.steps)
    preemptions = [request.num_preemptions for request in driver.requests.values()]
    assert max(preemptions) <= max_preemptions
    assert (sum(preemptions) > 0) == (max_preemptions > 0)


@pytest.mark.parametrize("ordering", ["fcfs", "priority"])
@pytest.mark.parametrize("max_bypasses", [0, 1, 2, 5])
@pytest.mark.parametrize("max_num_seqs", [2, 8])
def test_small_requests_pass_a_large_one_only_so_often(ordering, max_bypasses, max_num_seqs):
    """Case 4 (vllm #31731): a request of seven blocks waits ahead of an endless stream of small ones."""
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=64,
        max_model_len=64,
        max_bypasses=max_bypasses,
        max_scan=8,
    )
    driver = SchedulerDriver.build(config, num_blocks=8, block_size=4, ordering=ordering)
    driver.submit("holder", prompt(0, 8), 13)
    driver.step()
    driver.submit("large", prompt(1, 28), 1)
    small = 0
    while not driver.requests["large"].is_running and driver.requests["large"].finished is None:
        for _ in range(3):
            driver.submit(f"s{small}", prompt(2 + small, 3), 2)
            small += 1
        driver.step()
        assert len(driver.steps) < 40
    before = driver.events.index(events_of(driver, Admitted, "large")[0])
    passed = [e for e in driver.events[:before] if isinstance(e, Admitted) and e.request_id.startswith("s")]
    assert len(passed) == max_bypasses
    driver.run_to_end()


@pytest.mark.parametrize("low", [1, 2, 7])
@pytest.mark.parametrize("num_low", [1, 3])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_higher_priority_displaces_one_lower_and_equals_wait(low, num_low, prefix_caching):
    """Case 5 (vllm #40004, PR#54530): every slot runs low priority, then one of higher and equal ones arrive."""
    config = SchedulerConfig(max_num_seqs=num_low, max_num_batched_tokens=32, max_model_len=64)
    driver = SchedulerDriver.build(
        config, num_blocks=32, block_size=4, ordering="priority", prefix_caching=prefix_caching
    )
    for number in range(num_low):
        driver.submit(f"low{number}", prompt(number, 5), 12, priority=low)
    driver.step()
    for number in range(num_low):
        driver.submit(f"equal{number}", prompt(10 + number, 5), 3, priority=low)
    driver.submit("high", prompt(20, 5), 3, priority=low - 1)
    driver.step()
    assert driver.steps[-1].admitted == ("high",)
    assert len(driver.steps[-1].preempted) == 1
    driver.run_to_end()
    assert sum(request.num_preemptions for request in driver.requests.values()) == 1
    # Who was displaced goes on before its equals that arrived later.
    order = [e.request_id for e in driver.events if isinstance(e, Admitted)]
    assert order[num_low + 1].startswith("low")


@pytest.mark.parametrize("ordering", ["fcfs", "priority"])
def test_equal_priorities_never_displace_each_other(ordering):
    """Case 5 (vllm #40004, PR#54530): no ping-pong, whoever arrived first."""
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=32, max_model_len=64)
    driver = SchedulerDriver.build(config, num_blocks=32, block_size=4, ordering=ordering)
    for number in range(12):
        driver.submit(f"r{number}", prompt(number, 5), 4, priority=3, arrival_s=-float(number))
        driver.step()
    driver.run_to_end()
    assert not [event for event in driver.events if isinstance(event, Preempted)]


@pytest.mark.parametrize("gain", [0, 1, 2])
def test_nobody_is_displaced_unless_that_makes_room(gain):
    """Case 5 (vllm #40004, PR#54530): the lower one's blocks are the very prefix that the higher one hits.

    Displacing it gives fewer blocks than it owns; it must not lose its work to somebody who then waits anyway.
    """
    shared = prompt(1, 4)
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)
    driver = SchedulerDriver.build(config, num_blocks=6 + gain, block_size=4, ordering="priority")
    driver.submit("low", shared, 5, priority=2)
    driver.submit("other", prompt(2, 7), 2, priority=0)
    driver.step()
    driver.submit("high", shared + prompt(3, 16), 1, priority=1)
    driver.step()
    fits = gain >= 1  # 5 blocks, of which 1 is cached; 2 + gain are free, and the lower one's second block comes
    assert driver.steps[-1].admitted == (("high",) if fits else ())
    assert driver.steps[-1].preempted == (("low",) if gain == 1 else ())
    driver.run_to_end()


@pytest.mark.parametrize("ordering", ["fcfs", "priority"])
@pytest.mark.parametrize("num_output_of_b", [1, 3, 9])
@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_who_is_preempted_resumes_right_after_those_that_came_earlier(ordering, num_output_of_b, block_size):
    """Case 6 (vllm #41951): A gives way to a long decode; B waits with the same priority and an earlier arrival."""
    config = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=32, max_model_len=40, max_bypasses=0)
    driver = SchedulerDriver.build(
        config, num_blocks=24 // block_size, block_size=block_size, ordering=ordering, prefix_caching=False
    )
    driver.submit("long", prompt(1, 12), 13, arrival_s=-2.0)
    driver.submit("A", prompt(2, 8), 8)
    driver.step()
    driver.submit("B", prompt(3, 8), num_output_of_b, arrival_s=-1.0)
    driver.submit("later", prompt(4, 8), 2, arrival_s=9.0)
    while not driver.steps[-1].preempted:
        driver.step()
    assert driver.steps[-1].preempted == ("A",)
    preempted_at = driver.steps[-1].step_id
    driver.run_to_end()
    order = [event.request_id for event in driver.events if isinstance(event, Admitted)]
    assert order[:3] == ["long", "A", "B"]  # B's place was before A's all the time
    assert order[-1] == "later"  # and nobody who came after A went before it
    waited = [step for step in driver.steps if step.step_id > preempted_at and "A" not in step.entries]
    assert len(waited) <= 13 + num_output_of_b


@pytest.mark.parametrize("watermark", [0, 1, 2])
def test_a_higher_priority_may_have_the_whole_pool(watermark):
    """Case 5 (vllm #40004, PR#54530): when everybody gives way, nothing is kept back for their growth."""
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, watermark_blocks=watermark)
    driver = SchedulerDriver.build(config, num_blocks=8, block_size=4, ordering="priority")
    driver.submit("low", prompt(1, 5), 20, priority=1)
    driver.step()
    driver.submit("high", prompt(2, 32), 1, priority=0)
    driver.step()
    assert driver.steps[-1].preempted == ("low",)
    assert driver.steps[-1].admitted == ("high",)
    driver.run_to_end()


@pytest.mark.parametrize("num_low", [2, 3, 5])
def test_who_displaces_gets_the_budget_too(num_low):
    """Case 5 (vllm #40004, PR#54530): the victim's share of the step goes to who took its place."""
    config = SchedulerConfig(max_num_seqs=num_low, max_num_batched_tokens=num_low + 1, max_model_len=64)
    driver = SchedulerDriver.build(config, num_blocks=32, block_size=4, ordering="priority")
    for number in range(num_low):
        driver.submit(f"low{number}", [number], 20, priority=1)
    while not all(request.output for request in driver.live):
        driver.step()
    driver.submit("high", prompt(9, 5), 1, priority=0)
    driver.step()
    assert len(driver.steps[-1].preempted) == 1
    assert driver.steps[-1].entries["high"] == (0, 2)  # one token was free, one was the victim's
    driver.run_to_end()


@settings(deadline=None, max_examples=60)
@given(
    length=st.integers(2, 12),
    max_tokens=st.integers(2, 12),
    block_size=st.integers(1, 4),
    priority=st.integers(0, 1),
    ordering=st.sampled_from(["fcfs", "priority"]),
)
def test_equals_do_not_preempt_each_other_in_turns(length, max_tokens, block_size, priority, ordering):
    """Case 6 (vllm #41951): order of admission and of victims agree, whatever the sizes."""
    num_blocks = -(-(length + max_tokens) // block_size) + 1
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=64)
    driver = SchedulerDriver.build(config, num_blocks=num_blocks, block_size=block_size, ordering=ordering)
    driver.submit("A", prompt(1, length), max_tokens, priority=priority, arrival_s=1.0)
    driver.step()
    driver.submit("B", prompt(2, length), max_tokens, priority=priority, arrival_s=0.0)
    driver.run_to_end()
    # One of them at a time fits to its end: each may lose its place to the other once, not in turns.
    assert sum(request.num_preemptions for request in driver.requests.values()) <= 1
    assert len(driver.steps) <= 2 * (length + max_tokens) + 2


@settings(deadline=None, max_examples=40)
@given(budget=st.integers(2, 40), block_size=st.integers(1, 8), share=st.floats(0.55, 1.0), data=st.data())
def test_two_long_prompts_do_not_take_turns_at_the_pool(budget, block_size, share, data):
    """Case 7 (vllm PR#21793): two prompts that fit one at a time, in chunks."""
    num_blocks = 80 // block_size
    capacity = num_blocks * block_size
    length = min(capacity - 1, int(share * capacity))
    max_tokens = data.draw(st.integers(1, capacity + 1 - length))
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=budget, max_model_len=capacity + 1)
    driver = SchedulerDriver.build(config, num_blocks=num_blocks, block_size=block_size, prefix_caching=False)
    driver.submit("first", prompt(1, length), max_tokens)
    driver.submit("second", prompt(2, length), max_tokens)
    driver.run_to_end()
    assert not [event for event in driver.events if isinstance(event, Preempted)]
    assert sum(step.num_tokens for step in driver.steps) == 2 * (length + max_tokens - 1)
    assert [event.request_id for event in driver.events if isinstance(event, Admitted)] == ["first", "second"]


@settings(deadline=None, max_examples=60)
@given(block_size=st.integers(1, 9), cached=st.integers(0, 5), rest=st.integers(1, 30))
def test_only_uncached_tokens_are_scheduled_and_charged(block_size, cached, rest):
    """Case 9 (nano-vllm PR#210): the budget pays for the uncached part, and what is left of it serves the next one."""
    check_charge(block_size, cached, rest)


def test_465_tokens_of_which_256_are_cached_cost_209():
    """Case 9 (nano-vllm PR#210), with its numbers."""
    assert check_charge(256, 1, 209) == (256, 209)


def check_charge(block_size: int, cached: int, rest: int) -> tuple[int, int]:
    stem = prompt(1, cached * block_size)
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=rest + 3, max_model_len=2000)
    driver = SchedulerDriver.build(config, num_blocks=400 // block_size + 8, block_size=block_size)
    if cached:
        driver.submit("stem", [*stem, 49], 1)
        driver.run_to_end()
    driver.submit("warm", [*stem, *[48] * rest], 1)
    driver.submit("next", prompt(2, 9), 1)
    driver.step()
    assert driver.steps[-1].entries == {"warm": (cached * block_size, rest), "next": (0, 3)}
    assert driver.steps[-1].num_tokens == config.max_num_batched_tokens
    driver.run_to_end()
    return driver.requests["warm"].admissions[0], rest


@settings(deadline=None, max_examples=60)
@given(block_size=st.integers(1, 5), num_seqs=st.integers(2, 7), spare=st.integers(0, 3), data=st.data())
def test_preemption_frees_blocks_enough_and_no_more(block_size, num_seqs, spare, data):
    """Case 16 (sglang #9982): several sequences reach a block edge at once; a victim's tokens are not its blocks."""
    lengths = [block_size * data.draw(st.integers(1, 3)) for _ in range(num_seqs)]
    num_blocks = sum(lengths) // block_size + spare
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=200, max_model_len=num_blocks * block_size)
    driver = SchedulerDriver.build(config, num_blocks=num_blocks, block_size=block_size, prefix_caching=False)
    for number, length in enumerate(lengths):
        most = num_blocks * block_size - length
        driver.submit(f"r{number}", prompt(number, length), max(1, min(4, most)))
    driver.step()
    waiting_for_a_block = {r.request_id: r for r in driver.live}
    if not waiting_for_a_block:
        return
    owned = {name: lengths[int(name[1:])] // block_size for name in waiting_for_a_block}
    available = driver.scheduler.kv.num_available_blocks
    driver.step()
    victims = driver.steps[-1].preempted

    def lacks(gone):
        return len(owned) - len(gone) > available + sum(owned[name] for name in gone)

    assert not lacks(victims)
    assert not victims or lacks(victims[:-1])
    driver.run_to_end()


@settings(deadline=None, max_examples=40)
@given(
    length=st.integers(1, 4),
    num_output=st.integers(6, 20),
    budget=st.integers(2, 9),
    block_size=st.integers(1, 4),
    prefix_caching=st.booleans(),
)
def test_recomputation_covers_prompt_and_output_inside_the_budget(
    length, num_output, budget, block_size, prefix_caching
):
    """Case 18 (vllm-gaudi PR#524, sglang PR#7434): preempted when the output is longer than the prompt."""
    config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=budget, max_model_len=64)
    driver = SchedulerDriver.build(
        config, num_blocks=64 // block_size, block_size=block_size, ordering="priority", prefix_caching=prefix_caching
    )
    driver.submit("long", prompt(1, length), num_output + 3, priority=1)
    while not driver.requests or len(driver.output("long")) < num_output:
        driver.step()
    driver.submit("urgent", prompt(2, 2), 1, priority=0)
    driver.step()
    assert driver.steps[-1].preempted == ("long",)
    start = len(driver.steps)
    driver.run_to_end()
    again = events_of(driver, Admitted, "long")[1]
    assert again.resumed
    assert again.num_known_tokens == length + num_output
    assert prefix_caching or again.num_cached_tokens == 0
    chunks = [step.entries["long"] for step in driver.steps[start:] if "long" in step.entries]
    recomputed = [chunk for chunk in chunks if chunk[0] < length + num_output]
    assert sum(size for _, size in recomputed) == length + num_output - again.num_cached_tokens
    assert all(size <= budget for _, size in recomputed)


@pytest.mark.parametrize("num_decoding", [1, 3, 7])
@pytest.mark.parametrize("budget", [8, 9, 16, 64])
def test_a_long_prompt_never_costs_a_decoder_its_token(num_decoding, budget):
    """Case 25 (vllm #1026, llama.cpp #29175, ds4 #600): the prompt comes in chunks beside the decoders."""
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=budget, max_model_len=256)
    driver = SchedulerDriver.build(config, num_blocks=200, block_size=4)
    names = [f"d{number}" for number in range(num_decoding)]
    for number, name in enumerate(names):
        driver.submit(name, prompt(number, 2), 120)
    while not all(driver.output(name) for name in names):
        driver.step()
    driver.submit("long", prompt(20, 90), 1)
    while driver.requests["long"].finished is None:
        before = [len(driver.output(name)) for name in names]
        driver.step()
        assert [len(driver.output(name)) for name in names] == [count + 1 for count in before]
        room = budget - num_decoding
        assert driver.steps[-1].entries["long"][1] == min(room, 90 - driver.steps[-1].entries["long"][0])
    driver.run_to_end()


def test_causes_of_preemption_are_told_apart():
    """Cases 5 and 16: the event says what a request had to make room for."""
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=16)
    driver = SchedulerDriver.build(config, num_blocks=4, block_size=2, ordering="priority")
    driver.submit("a", prompt(1, 4), 4, priority=1)
    driver.submit("b", prompt(2, 4), 4, priority=2)
    driver.step()
    driver.step()
    assert [e.cause for e in events_of(driver, Preempted, "b")] == [PreemptCause.GROWTH]
    driver.submit("c", prompt(3, 6), 1, priority=0)
    driver.step()
    assert [e.cause for e in events_of(driver, Preempted, "a")] == [PreemptCause.PRIORITY]
    driver.run_to_end()
