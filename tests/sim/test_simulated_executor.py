"""The simulated executor is an executor."""

import numpy as np
import pytest
from sim_builders import ConstantTime, ContextTime

from expediter.core.errors import InvariantError
from expediter.core.ports import ExecutorLimits
from expediter.sim.executor import SimulatedExecutor
from expediter.testing.executor_conformance import ExecutorConformance
from expediter.testing.plan_driver import PlanDriver


def make(limits: ExecutorLimits, step_time=None):
    return SimulatedExecutor(
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        step_time=step_time or ConstantTime(0.01),
        num_host_blocks=limits.num_host_blocks,
        block_swap_s=limits.block_swap_s,
    )


class TestSimulatedExecutor(ExecutorConformance):
    reads_kv = False  # it makes tokens up
    repeats = True

    def make_executor(self, limits):
        return make(limits)


def test_outputs_of_two_requests_never_meet():
    driver = PlanDriver(make(ExecutorConformance.LIMITS))
    prompt = [1, 2, 3]
    first, second = driver.admit(prompt), driver.admit(prompt)
    driver.step((first, 3), (second, 3))
    driver.step((first, 1), (second, 1), num_steps=9)
    assert not set(first.output) & set(second.output)


def test_a_repeated_plan_takes_the_time_and_gives_the_tokens_of_its_steps():
    outputs, elapsed = [], []
    for num_steps in ((6,), (1, 2, 3)):
        driver = PlanDriver(make(ExecutorConformance.LIMITS, ContextTime(0.013)))
        sequence = driver.admit([1, 2, 3])
        driver.step((sequence, 3))
        elapsed.append(sum(driver.step((sequence, 1), num_steps=n).elapsed_s for n in num_steps))
        outputs.append(sequence.output)
    assert outputs[0] == outputs[1]
    assert elapsed[0] == pytest.approx(elapsed[1])
    assert np.isfinite(elapsed[0])


def test_closed_executors_run_nothing():
    executor = make(ExecutorConformance.LIMITS)
    driver = PlanDriver(executor)
    sequence = driver.admit([1])
    executor.close()
    with pytest.raises(InvariantError, match="closed"):
        driver.step((sequence, 1))
