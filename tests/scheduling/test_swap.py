"""Preemption by swap: when it is chosen, what moves, what becomes of host blocks, and that tokens stay the same."""

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expediter.core.errors import ConfigurationError
from expediter.core.events import Admitted, PreemptCause, Preempted
from expediter.scheduling.build import PREEMPTION_MODES, PolicyConfig
from expediter.scheduling.config import SchedulerConfig
from expediter.testing.scheduler_driver import SchedulerDriver

PROMPT = [5, 3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


class TokenTime:
    """A step-time model: so many seconds per token, and as many for the step."""

    def __init__(self, token_s):
        self.token_s = token_s

    def step_time_s(self, features):
        return self.token_s * (1 + features.num_tokens)

    def decode_run_s(self, features, num_steps):
        return np.full(num_steps, self.step_time_s(features))


def build(mode="swap", *, num_blocks=16, num_host_blocks=8, block_swap_s=None, token_s=None, caching=True, **limits):
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64} | limits
    return SchedulerDriver.build(
        SchedulerConfig(**limits),
        num_blocks=num_blocks,
        block_size=2,
        policy=PolicyConfig(ordering="priority", preemption_mode=mode),
        prefix_caching=caching,
        num_host_blocks=num_host_blocks,
        block_swap_s=block_swap_s,
        prior=None if token_s is None else TokenTime(token_s),
    )


def displace(driver, *, num_output=2, urgent_tokens=29):
    """Let "it" decode, and something urgent take its blocks; return the plan in flight in which that happens."""
    driver.submit("it", PROMPT, 6, priority=1)
    while len(driver.output("it")) < num_output:
        driver.step()
    driver.submit("urgent", [9] * urgent_tokens, 2)
    return driver.plan()


def preempted(driver):
    return [event for event in driver.events if isinstance(event, Preempted)]


def resumed(driver):
    return [event for event in driver.events if isinstance(event, Admitted) and event.resumed]


# -- what is chosen ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "block_swap_s", "token_s", "swaps"),
    [
        ("recompute", 0.0, 1.0, False),
        ("swap", 100.0, 0.1, True),
        ("swap", None, None, True),
        # 12 computed tokens are 6 blocks: out and in takes 12 block moves, recomputing 12 tokens.
        ("cheaper", 0.99, 1.0, True),
        ("cheaper", 1.01, 1.0, False),
        ("cheaper", 0.0, None, False),
        ("cheaper", None, 1.0, False),
    ],
)
def test_what_takes_less_time_is_chosen_and_what_is_unknown_is_not(mode, block_swap_s, token_s, swaps):
    driver = build(mode, block_swap_s=block_swap_s, token_s=token_s)
    plan = displace(driver)
    (event,) = preempted(driver)
    assert event.num_lost_tokens == 12
    assert event.num_swapped_tokens == (12 if swaps else 0)
    assert plan.swap_out.num_blocks == driver.scheduler.kv.host.num_held == (6 if swaps else 0)
    driver.finish(plan)
    driver.run_to_end()
    assert driver.output("it") == driver.requests["it"].expected


def test_step_times_that_were_learned_decide_too():
    driver = build("cheaper", block_swap_s=1e-4)
    driver.executor._step_time = TokenTime(1e-3)
    for number in range(6):
        driver.submit(f"teacher{number}", [number] * (1 + 3 * number), 3)
        driver.run_to_end()
    assert displace(driver).swap_out.num_blocks == 6


def test_an_uncertain_step_time_counts_for_less():
    driver = build("cheaper", block_swap_s=0.9, token_s=1.0)
    driver.scheduler.knowledge.step_time.relative_error = 0.1
    assert not displace(driver).swap_out.num_blocks


def test_a_full_host_means_recomputing():
    driver = build(num_host_blocks=5)
    plan = displace(driver)
    assert not plan.swap_out.num_blocks
    assert preempted(driver)[0].num_swapped_tokens == 0
    driver.finish(plan)
    driver.run_to_end()


def test_modes_have_names():
    assert set(PREEMPTION_MODES) == {"recompute", "swap", "cheaper"}
    with pytest.raises(ConfigurationError, match="no preemption mode 'drop'; there are: recompute, swap, cheaper"):
        PolicyConfig(preemption_mode="drop")


# -- what moves -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [False, True])
def test_a_swapped_request_goes_on_where_it_stopped(caching):
    driver = build(caching=caching)
    plan = displace(driver)
    taken = driver.scheduler.kv.tables.ids[plan.admitted[0].slot]
    assert set(plan.swap_out.sources.tolist()) & set(taken.tolist()), "blocks move away and are handed out in one plan"
    driver.finish(plan)
    num_run = driver.requests["it"].num_tokens_run
    driver.run_to_end()
    (event,) = resumed(driver)
    # 16 blocks are 15 for the urgent one, and one that the cache keeps.
    assert (event.num_cached_tokens, event.num_restored_tokens) == ((2, 10) if caching else (0, 12))
    assert driver.requests["it"].num_tokens_run == num_run + 4, "nothing is computed twice"


def test_only_what_the_cache_lost_moves_back():
    driver = build(num_host_blocks=8)
    plan = displace(driver, urgent_tokens=25)
    driver.finish(plan)
    plan = driver.plan()
    while not plan.swap_in.num_blocks:
        driver.finish(plan)
        plan = driver.plan()
    (event,) = resumed(driver)
    assert event.num_cached_tokens == 6
    assert event.num_restored_tokens == 6
    assert plan.swap_in.num_blocks == 3
    assert driver.scheduler.kv.host.num_in_transit == 6, "all of them are given back, read or not"
    assert driver.scheduler.kv.host.num_held == 0
    driver.finish(plan)
    assert driver.scheduler.kv.host.num_free == 8


def test_a_whole_match_needs_no_move():
    driver = build(num_blocks=40)
    driver.submit("it", PROMPT, 6, priority=1)
    for _ in range(3):
        driver.step()
    driver.submit("urgent", [9] * 61, 2)
    driver.finish(driver.plan())
    assert driver.scheduler.kv.host.num_held == 0
    assert not preempted(driver), "there was room for both"


def test_blocks_that_others_own_are_not_copied():
    driver = build(num_blocks=18)
    driver.submit("twin", PROMPT[:8], 12)
    driver.step()
    plan = displace(driver, urgent_tokens=23)
    assert preempted(driver)[0].request_id == "it"
    copy = driver.scheduler.kv.host.find(driver.scheduler.find("it").sequence)
    assert copy.first_block == 4
    assert plan.swap_out.num_blocks == 2
    assert preempted(driver)[0].num_swapped_tokens == 4
    driver.finish(plan)
    driver.run_to_end()
    (event,) = resumed(driver)
    assert event.num_cached_tokens >= 8


def test_a_copy_behind_a_lost_prefix_is_given_up():
    driver = build(num_blocks=18)
    driver.submit("twin", PROMPT[:8], 12)
    driver.step()
    driver.finish(displace(driver, urgent_tokens=23))
    assert driver.scheduler.kv.host.num_held == 2
    driver.abort("twin")
    driver.submit("flood", [8] * 35, 1)
    driver.run_to_end()
    (event,) = resumed(driver)
    assert event.num_restored_tokens == 0
    assert event.num_cached_tokens < 8
    assert driver.output("it") == driver.requests["it"].expected


def test_plans_that_move_blocks_are_not_repeated():
    driver = build(num_blocks=8, max_num_seqs=2)
    driver.submit("a", [1, 2, 3], 9)
    driver.submit("b", [4, 5, 6], 9)
    plan = driver.plan()
    while not plan.swap_out.num_blocks:
        driver.finish(plan)
        plan = driver.plan()
    assert plan.num_decodes == plan.num_seqs == 1
    assert preempted(driver)[0].cause is PreemptCause.GROWTH
    assert driver.scheduler.runs.repeatable_steps(plan) == 1
    driver.finish(plan)
    driver.run_to_end(max_repeat=9)


# -- aborts -----------------------------------------------------------------------------------------------------------


def swapping_out(driver):
    return displace(driver)


def swapped(driver):
    driver.finish(displace(driver))
    return driver.plan()


def swapping_in(driver):
    driver.finish(displace(driver))
    plan = driver.plan()
    while not plan.swap_in.num_blocks:
        driver.finish(plan)
        plan = driver.plan()
    return plan


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("executes_first", [False, True])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("reach", [swapping_out, swapped, swapping_in])
def test_an_abort_frees_both_tiers_once(reach, caching, executes_first, broken):
    """Case 14 (vllm PR#29987, sglang PR#36988), around a swap; blocks whose contents never came are never reused."""
    driver = build(caching=caching)
    plan = reach(driver)
    if broken:
        driver.executor.broken_host_blocks = set(range(8))
    result = driver.executor.execute(plan) if executes_first else None
    for _ in range(2):
        driver.abort("it")
    host = driver.scheduler.kv.host
    assert host.num_held == 0
    assert host.num_in_transit == (6 if reach is swapping_in else 0)
    result = driver.executor.execute(plan) if result is None else result
    driver.apply(result)
    driver.apply_late(result)
    assert host.num_free == host.num_blocks
    driver.submit("again", [*PROMPT, *driver.output("it")], 4)
    driver.run_to_end()


def test_aborting_everybody_frees_everything():
    driver = build(num_blocks=10, num_host_blocks=20)
    for number in range(4):
        driver.submit(f"r{number}", [number, *PROMPT[:3]], 9, priority=number)
    while not any(event.num_swapped_tokens for event in preempted(driver)):
        driver.step()
    plan = driver.plan()
    for number in range(4):
        driver.abort(f"r{number}")
    kv = driver.scheduler.kv
    assert kv.num_used_blocks == 0
    driver.finish(plan)
    assert kv.host.num_free == 20


def test_who_leads_a_swapped_group_next_gets_its_copy():
    driver = build(max_num_batched_tokens=8)
    driver.submit("it", PROMPT, 6, priority=1, n=2)
    driver.step()
    driver.submit("urgent", [9] * 25, 2)
    driver.step()
    leader, follower = [name for name in driver.requests if name != "urgent"]
    assert driver.scheduler.kv.host.num_held == 4
    driver.abort(leader)
    assert driver.scheduler.kv.host.num_held == 4
    driver.run_to_end()
    assert driver.requests[follower].num_restored_tokens + driver.requests[follower].admissions[-1] == 8
    assert driver.requests[follower].output == driver.requests[follower].expected


def test_a_fork_is_whole_before_its_blocks_leave():
    """The step in which a sequence is swapped out is the one that copies its partial block."""
    driver = build(max_num_batched_tokens=64, num_host_blocks=16)
    driver.submit("it", PROMPT, 6, priority=1, n=2)
    driver.step()
    driver.submit("urgent", [9] * 31, 1)
    plan = driver.plan()
    assert plan.copies.shape[1] == 1
    assert set(plan.copies[1].tolist()) <= set(plan.swap_out.sources.tolist())
    driver.finish(plan)
    driver.run_to_end()
    assert sum(request.num_restored_tokens for request in driver.requests.values()) > 0


# -- failures ---------------------------------------------------------------------------------------------------------


def test_a_copy_that_could_not_be_written_is_not_read():
    driver = build()
    plan = displace(driver)
    driver.executor.broken_host_blocks = {3}
    result = driver.finish(plan)
    assert result.failed_host_blocks == (3,)
    assert driver.scheduler.kv.host.num_free == 8
    driver.run_to_end()
    assert resumed(driver)[0].num_restored_tokens == 0


@pytest.mark.parametrize("caching", [False, True])
def test_kv_that_does_not_come_back_is_computed_again(caching):
    driver = build(caching=caching, max_preemptions=1)
    plan = swapping_in(driver)
    driver.executor.broken_host_blocks = {3}
    driver.finish(plan)
    assert [event.cause for event in preempted(driver)] == [PreemptCause.PRIORITY, PreemptCause.SWAP_FAILED]
    assert not driver.requests["it"].is_running
    driver.run_to_end()
    assert driver.output("it") == driver.requests["it"].expected
    assert driver.requests["it"].finished.num_preemptions == 1, "a failure is not counted"


# -- everything at once -----------------------------------------------------------------------------------------------


def scuffle(seed, seen, *, broken_share=0.0):
    """Requests that fight for few blocks, with aborts between plan and apply and moves that fail."""
    rng = random.Random(seed)
    mode = rng.choice(["swap", "cheaper"])
    driver = build(
        mode,
        num_blocks=rng.randint(7, 12),
        num_host_blocks=rng.randint(2, 12),
        block_swap_s=0.8,
        token_s=1.0,
        caching=rng.random() < 0.7,
        max_num_batched_tokens=rng.randint(4, 12),
        max_model_len=15,
        max_preemptions=rng.randint(1, 4),
    )
    kv = driver.scheduler.kv
    for number in range(12):
        stem = PROMPT[: rng.choice([0, 4, 4])]
        tail = [rng.randrange(3) for _ in range(rng.randint(1, 3))]
        driver.submit(
            f"r{number}", [*stem, *tail], rng.randint(3, 8), priority=rng.randint(0, 3), n=rng.choice([1, 1, 1, 2])
        )
        for _ in range(rng.randint(0, 6)):
            plan = driver.plan()
            if plan.is_empty:
                break
            if rng.random() < broken_share:
                driver.executor.broken_host_blocks = set(rng.sample(range(12), 3))
            result = driver.executor.execute(plan) if rng.random() < 0.5 else None
            if rng.random() < 0.15 and driver.live:
                arriving = [r for r in driver.live if driver.scheduler.find(r.request_id).slot in kv.swaps._arriving]
                victim = rng.choice(arriving or driver.live).request_id
                state = driver.scheduler.find(victim)
                if kv.host.find(state.sequence):
                    seen["aborted on the host"] += 1
                elif state.slot in kv.swaps._arriving:
                    seen["aborted on its way back"] += 1
                driver.abort(victim)
            driver.apply(result or driver.executor.execute(plan))
    driver.executor.broken_host_blocks = set()
    driver.run_to_end()
    for event in preempted(driver):
        seen[event.cause.value] += 1
        seen["swapped"] += event.num_swapped_tokens > 0
    seen["restored"] += sum(event.num_restored_tokens > 0 for event in resumed(driver))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from([0.0, 0.3]))
def test_tokens_are_the_models_whatever_moves(seed, broken_share):
    scuffle(seed, Counter(), broken_share=broken_share)


def test_a_scuffle_tests_what_it_should():
    seen = Counter()
    for seed in range(100):
        scuffle(seed, seen, broken_share=0.3)
    for what in ("growth", "priority", "swap_failed", "swapped", "restored", "aborted on the host"):
        assert seen[what] > 5, (what, seen)
    assert seen["aborted on its way back"] > 0
