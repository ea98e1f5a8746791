"""The toy model: equal to its reference however it is run, different as soon as a block is wrong."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expediter.core.clock import VirtualClock
from expediter.core.errors import InvariantError
from expediter.core.plan import StepFeatures
from expediter.core.ports import ExecutorLimits
from expediter.testing.fake_executor import FakeExecutor, toy_generate
from expediter.testing.plan_driver import PlanDriver

LIMITS = ExecutorLimits(num_blocks=32, block_size=4, max_model_len=96, vocab_size=50, max_num_seqs=4)


@given(
    prompt=st.lists(st.integers(0, 49), min_size=1, max_size=40),
    chunk=st.integers(1, 40),
    num_tokens=st.integers(1, 12),
)
def test_any_chunking_equals_the_reference(prompt: list[int], chunk: int, num_tokens: int) -> None:
    driver = PlanDriver(FakeExecutor(LIMITS))
    assert driver.generate(driver.admit(prompt), num_tokens, chunk=chunk) == toy_generate(prompt, num_tokens, 50)


@given(corrupted=st.integers(0, 31))
def test_a_changed_context_slot_changes_the_tokens(corrupted: int) -> None:
    executor = FakeExecutor(LIMITS)
    driver = PlanDriver(executor)
    prompt = list(range(32))
    sequence = driver.admit(prompt)
    driver.step((sequence, 32))
    executor._kv[corrupted] ^= np.uint64(1 << 40)
    assert driver.generate(sequence, 8) != toy_generate(prompt, 9, 50)[1:]


def test_swapped_blocks_change_the_tokens() -> None:
    driver = PlanDriver(FakeExecutor(LIMITS))
    prompt = list(range(16))
    first = driver.admit(prompt)
    driver.step((first, 16))
    blocks = first.blocks
    swapped = driver.admit(prompt, cached_blocks=[blocks[1], blocks[0], blocks[2]])
    assert driver.generate(swapped, 8) != toy_generate(prompt, 8, 50)


def test_repeated_decodes_equal_single_steps_in_tokens_and_time() -> None:
    class Linear:
        def step_time_s(self, features: StepFeatures) -> float:
            return 0.01 + 1e-4 * features.decode_context_tokens

        def decode_run_s(self, features: StepFeatures, num_steps: int) -> np.ndarray:
            steps = [
                features._replace(decode_context_tokens=features.decode_context_tokens + k * features.num_decodes)
                for k in range(num_steps)
            ]
            return np.array([self.step_time_s(step) for step in steps])

    outputs, times = [], []
    for jump in (False, True):
        clock = VirtualClock(1.0)
        driver = PlanDriver(FakeExecutor(LIMITS, step_time=Linear(), clock=clock))
        a, b = driver.admit([1, 2, 3]), driver.admit([9] * 7)
        driver.step((a, 3), (b, 7))
        if jump:
            driver.step((a, 1), (b, 1), num_steps=9)
        else:
            for _ in range(9):
                driver.step((a, 1), (b, 1))
        outputs.append((a.output, b.output))
        times.append(clock.now())
    assert outputs[0] == outputs[1] == (toy_generate([1, 2, 3], 10, 50), toy_generate([9] * 7, 10, 50))
    assert times[0] == times[1]


def test_inconsistent_plans_are_refused() -> None:
    def prepared():
        driver = PlanDriver(FakeExecutor(LIMITS))
        sequence = driver.admit([1, 2, 3, 4, 5])
        return driver, sequence, driver._executor

    driver, sequence, executor = prepared()
    plan, _ = driver.plan((sequence, 3))
    plan.starts[0] = 1
    with pytest.raises(InvariantError, match="stopped at"):
        executor.execute(plan)

    driver, sequence, executor = prepared()
    plan, _ = driver.plan((sequence, 5))
    plan.block_tables[sequence.slot, 1] = plan.block_tables[sequence.slot, 0]
    with pytest.raises(InvariantError, match="twice"):
        executor.execute(plan)

    driver, sequence, executor = prepared()
    plan, _ = driver.plan((sequence, 5))
    plan.block_tables[sequence.slot, 0] = -1
    with pytest.raises(InvariantError):
        executor.execute(plan)
    executor.close()
    with pytest.raises(InvariantError, match="closed"):
        executor.execute(plan)
