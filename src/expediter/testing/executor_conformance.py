"""What any `Executor` must do, as a pytest class to inherit from.

    class TestMyExecutor(ExecutorConformance):
        def make_executor(self, limits): return MyExecutor(limits)

The suite drives the executor with plans made by hand. It checks tokens against the executor's own undisturbed run, so
it needs no reference model.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest

from expediter.core.ports import Executor, ExecutorLimits
from expediter.core.request import SamplingParams
from expediter.testing.plan_driver import DrivenSequence, PlanDriver


class ExecutorConformance:
    """Contract of `expediter.core.ports.Executor`; a subclass says how to make one.

    Attributes:
        reads_kv: tokens depend on the KV contents and on nothing but the sequence. An executor that only pretends to
            compute, as in simulation, sets it to False; then shapes and limits are checked, tokens are not compared.
        repeats: plans with `num_steps > 1` are accepted.
    """

    reads_kv: ClassVar[bool] = True
    repeats: ClassVar[bool] = False

    LIMITS: ClassVar = ExecutorLimits(
        num_blocks=64, block_size=4, max_model_len=128, vocab_size=1000, max_num_seqs=4, num_host_blocks=12
    )

    def make_executor(self, limits: ExecutorLimits) -> Executor:
        """Return a fresh executor with exactly these limits; vocab_size may be the model's own."""
        raise NotImplementedError

    @pytest.fixture
    def executor(self) -> Executor:
        return self.make_executor(self.LIMITS)

    @pytest.fixture
    def driver(self, executor: Executor) -> PlanDriver:
        return PlanDriver(executor)

    def alone(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Return what a fresh executor generates for this prompt with nothing else in it."""
        driver = PlanDriver(self.make_executor(self.LIMITS))
        return driver.generate(driver.admit(prompt), num_tokens)

    def assert_same(self, output: list[int], expected: list[int]) -> None:
        """Compare tokens, or their number where the executor only pretends."""
        assert len(output) == len(expected)
        if self.reads_kv:
            assert output == expected

    def test_limits_are_the_ones_asked_for(self, executor: Executor) -> None:
        limits = executor.limits
        assert limits.vocab_size >= 1
        for name in ("num_blocks", "block_size", "max_model_len", "max_num_seqs", "num_host_blocks"):
            assert getattr(limits, name) == getattr(self.LIMITS, name)

    def test_result_has_one_token_in_range_per_sampled_entry(self, executor: Executor, driver: PlanDriver) -> None:
        sequences = [driver.admit(_prompt(seed, 3 + seed)) for seed in range(3)]
        for _ in range(3):
            result = driver.step(*[(sequence, sequence.num_missing) for sequence in sequences])
            assert result.tokens.dtype == np.int32
            assert result.tokens.shape == (1, 3)
            assert (result.tokens >= 0).all()
            assert (result.tokens < executor.limits.vocab_size).all()
            assert np.isfinite(result.elapsed_s)
            assert result.elapsed_s >= 0

    def test_results_come_in_plan_order(self, driver: PlanDriver) -> None:
        prompts = [_prompt(seed, 9) for seed in range(3)]
        first, second, third = (driver.admit(prompt) for prompt in prompts)
        driver.step((second, 9))
        driver.step((third, 9), (second, 1), (first, 4))
        driver.step((first, 5), (third, 1), (second, 1))
        for sequence, prompt in zip((first, second, third), prompts, strict=True):
            self.assert_same(sequence.output, self.alone(prompt, len(sequence.output)))

    def test_chunk_inside_the_prompt_yields_nothing(self, driver: PlanDriver) -> None:
        sequence = driver.admit(_prompt(0, 10))
        assert driver.step((sequence, 4)).tokens.shape == (1, 0)
        assert driver.step((sequence, 5)).tokens.shape == (1, 0)
        assert driver.step((sequence, 1)).tokens.shape == (1, 1)

    @pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 7, 8, 16, 21])
    def test_chunking_does_not_change_tokens(self, driver: PlanDriver, chunk: int) -> None:
        prompt = _prompt(1, 21)
        output = driver.generate(driver.admit(prompt), 6, chunk=chunk)
        self.assert_same(output, self.alone(prompt, 6))

    def test_decodes_and_chunks_share_a_step(self, driver: PlanDriver) -> None:
        prompts = [_prompt(seed, length) for seed, length in enumerate((2, 30, 17, 5))]
        sequences = [driver.admit(prompt) for prompt in prompts]
        while min(len(sequence.output) for sequence in sequences) < 5:
            driver.step(*[(sequence, min(sequence.num_missing, 6)) for sequence in sequences])
        for sequence, prompt in zip(sequences, prompts, strict=True):
            self.assert_same(sequence.output, self.alone(prompt, len(sequence.output)))

    @pytest.mark.parametrize("num_blocks_reused", [1, 3])
    def test_cached_blocks_serve_another_request(self, driver: PlanDriver, num_blocks_reused: int) -> None:
        prompt = _prompt(2, 15)
        first = driver.admit(prompt)
        driver.generate(first, 2)
        driver.release(first)
        longer = [*prompt[: num_blocks_reused * 4], *_prompt(3, 6)]
        second = driver.admit(longer, cached_blocks=first.blocks[:num_blocks_reused])
        self.assert_same(driver.generate(second, 6), self.alone(longer, 6))

    def test_two_live_requests_share_a_prefix(self, driver: PlanDriver) -> None:
        shared = _prompt(4, 8)
        first = driver.admit([*shared, 1, 2, 3])
        driver.step((first, 11))
        second = driver.admit([*shared, 9], cached_blocks=first.blocks[:2])
        _step_both(driver, first, second, 6)
        self.assert_same(first.output, self.alone([*shared, 1, 2, 3], len(first.output)))
        self.assert_same(second.output, self.alone([*shared, 9], len(second.output)))

    def test_slot_and_blocks_serve_the_next_request(self, driver: PlanDriver) -> None:
        first = driver.admit(_prompt(5, 13))
        driver.generate(first, 5)
        driver.release(first)
        prompt = _prompt(6, 6)
        second = driver.admit(prompt)
        assert second.slot == first.slot
        assert second.blocks[:1] == [] or second.blocks[0] == first.blocks[0]
        self.assert_same(driver.generate(second, 6), self.alone(prompt, 6))

    def test_block_ids_need_no_order(self, driver: PlanDriver) -> None:
        holders = [driver.admit(_prompt(seed, 10)) for seed in range(3)]
        driver.step(*[(holder, 10) for holder in holders])
        for holder in (holders[2], holders[0]):
            driver.release(holder)
        prompt = _prompt(7, 26)
        self.assert_same(driver.generate(driver.admit(prompt), 4, chunk=9), self.alone(prompt, 4))

    def test_recomputing_after_preemption_goes_on_with_the_same_tokens(self, driver: PlanDriver) -> None:
        prompt = _prompt(8, 11)
        first = driver.admit(prompt)
        before = driver.generate(first, 7)
        driver.release(first)
        other = driver.admit(_prompt(9, 20))  # takes over the blocks
        driver.generate(other, 3)
        resumed = driver.admit(prompt, output=before)
        self.assert_same(before + driver.generate(resumed, 4, chunk=5), self.alone(prompt, 11))

    @pytest.mark.parametrize("length", [8, 11, 12])
    def test_swapped_out_and_in_again_goes_on_with_the_same_tokens(self, driver: PlanDriver, length: int) -> None:
        prompt = _prompt(13, length)
        first = driver.admit(prompt)
        before = driver.generate(first, 7)
        host = [5, 11, 0, 1, 7][: -(-first.num_computed // 4)]
        driver.swap_out(first, host)
        other = driver.admit(_prompt(14, 60))  # takes over the blocks in the plan that moves their contents away
        driver.generate(other, 3)
        resumed = driver.swap_in(first, host)
        assert resumed.blocks != first.blocks
        again = driver.step((other, 1), (resumed, 1)).tokens.shape[1]
        assert again == 2
        self.assert_same(before + resumed.output[7:] + driver.generate(resumed, 3), self.alone(prompt, 11))

    def test_blocks_change_places_with_the_host_in_one_plan(self, driver: PlanDriver) -> None:
        """One sequence goes out and another comes in, into the same device blocks."""
        prompts = [_prompt(15, 10), _prompt(16, 10)]
        first = driver.admit(prompts[0])
        driver.generate(first, 2)
        driver.swap_out(first, [2, 3, 4])
        second = driver.admit(prompts[1])
        driver.generate(second, 2)
        driver.swap_out(second, [8, 9, 10])
        resumed = driver.swap_in(first, [2, 3, 4])
        assert resumed.blocks[:3] == second.blocks[:3]
        self.assert_same([*driver.generate(resumed, 4)], self.alone(prompts[0], 6)[2:])
        driver.release(resumed)
        back = driver.swap_in(second, [8, 9, 10])
        self.assert_same([*driver.generate(back, 4)], self.alone(prompts[1], 6)[2:])

    def test_swapped_in_behind_a_cached_prefix(self, driver: PlanDriver) -> None:
        prompt = _prompt(17, 13)
        first = driver.admit(prompt)
        driver.generate(first, 2)
        driver.swap_out(first, [6, 2, 9, 4])
        other = driver.admit(_prompt(18, 2))
        driver.generate(other, 1)  # the first block is lost on the device, which the host has; the others are there
        last = driver.swap_in(first, [6, 2, 9, 4])
        self.assert_same(driver.generate(last, 2), self.alone(prompt, 4)[2:])
        driver.swap_out(last, [0, 1, 2, 3])
        driver.step((other, 1))
        again = driver.swap_in(last, [2, 3], num_reused=2)
        self.assert_same(driver.generate(again, 2), self.alone(prompt, 6)[4:])

    @pytest.mark.parametrize("length", [3, 8, 9, 15])
    @pytest.mark.parametrize("chunk", [4, 20])
    def test_sequences_of_one_prompt_fork(self, driver: PlanDriver, length: int, chunk: int) -> None:
        """At a block edge and inside a block: they share the prompt's full blocks and have the rest for themselves."""
        prompt = _prompt(13, length)
        leader = driver.admit(prompt)
        group = [leader, driver.follow(leader), driver.follow(leader)]
        while not leader.output:
            driver.step((leader, min(leader.num_missing, chunk)))
        assert [len(sequence.output) for sequence in group] == [1, 1, 1]
        for _ in range(6):
            driver.step(*[(sequence, 1) for sequence in group])
        for sequence in group:
            assert sequence.blocks[: length // 4] == leader.blocks[: length // 4]
            self.assert_same(sequence.output, self.alone(prompt, 7))
        assert len({sequence.blocks[length // 4] for sequence in group}) == 3

    def test_who_forks_goes_on_without_the_others(self, driver: PlanDriver) -> None:
        """The leader ends with its first token, and its blocks are written again in the step that copies them."""
        prompt = _prompt(14, 10)
        leader = driver.admit(prompt)
        follower, aborted = driver.follow(leader), driver.follow(leader)
        driver.step((leader, 10))
        driver.release(leader, shared=follower.blocks)
        driver.release(aborted, shared=follower.blocks)
        newcomer = driver.admit(_prompt(15, 12))
        driver.step((newcomer, 12))
        driver.generate(follower, 5)
        self.assert_same(follower.output, self.alone(prompt, 6))
        self.assert_same(driver.generate(newcomer, 3), self.alone(_prompt(15, 12), 4)[1:])

    def test_each_sequence_is_sampled_by_its_own_parameters(self, driver: PlanDriver) -> None:
        prompt, seeds = _prompt(16, 6), (5, 6, 7)
        alone = []
        for seed in seeds:
            fresh = PlanDriver(self.make_executor(self.LIMITS))
            alone.append(fresh.generate(fresh.admit(prompt, SamplingParams(seed=seed)), 6))
        leader = driver.admit(prompt, SamplingParams(seed=seeds[0]))
        group = [leader, *(driver.follow(leader, SamplingParams(seed=seed)) for seed in seeds[1:])]
        driver.step((leader, 6))
        for _ in range(5):
            driver.step(*[(sequence, 1) for sequence in group])
        for sequence, expected in zip(group, alone, strict=True):
            self.assert_same(sequence.output, expected)
        if self.reads_kv:
            assert alone[0] != alone[1] != alone[2]

    def test_longest_sequence_that_the_limits_allow(self, executor: Executor, driver: PlanDriver) -> None:
        longest = executor.limits.max_model_len
        sequence = driver.admit(_prompt(10, longest - 1))
        assert len(driver.generate(sequence, 1, chunk=50)) == 1
        assert driver.step((sequence, 1)).tokens.shape == (1, 1)

    def test_repeated_decodes_equal_single_ones(self, driver: PlanDriver) -> None:
        if not self.repeats:
            pytest.skip("this executor runs one step at a time")
        prompts = [_prompt(11, 3), _prompt(12, 8)]
        sequences = [driver.admit(prompt) for prompt in prompts]
        driver.step(*[(sequence, sequence.num_missing) for sequence in sequences])
        result = driver.step(*[(sequence, 1) for sequence in sequences], num_steps=7)
        assert result.tokens.shape == (7, 2)
        for sequence, prompt in zip(sequences, prompts, strict=True):
            self.assert_same(sequence.output, self.alone(prompt, 8))

    def test_close_twice(self, executor: Executor, driver: PlanDriver) -> None:
        driver.generate(driver.admit([1]), 1)
        executor.close()
        executor.close()


def _prompt(seed: int, length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 100, length)]


def _step_both(driver: PlanDriver, first: DrivenSequence, second: DrivenSequence, num_steps: int) -> None:
    for _ in range(num_steps):
        driver.step((first, first.num_missing), (second, second.num_missing))
