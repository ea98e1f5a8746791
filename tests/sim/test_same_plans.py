"""The same recorded arrivals through the simulator and through the runtime's loop: the same plans, step by step."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_builders import DATA, NO_DATA, ConstantTime, ContextTime, make_trace

from expediter.assembly.simulation import SimulationConfig, build_simulation
from expediter.core.clock import VirtualClock
from expediter.core.ports import ExecutorLimits
from expediter.core.slo import Slo
from expediter.runtime.recorded import run_recorded
from expediter.scheduling.build import ORDERINGS, CacheConfig, PolicyConfig, build_scheduler
from expediter.scheduling.config import SchedulerConfig
from expediter.sim.synthetic_tokens import VOCAB_SIZE
from expediter.sim.trace_readers import read_trace
from expediter.testing.fake_executor import FakeExecutor


class PlanRecorder:
    """Copies every plan that a scheduler makes; token ids aside, which each executor makes up in its own way."""

    def __init__(self, scheduler):
        self.plans = []
        self._plan = scheduler.plan
        scheduler.plan = self.plan

    def plan(self, now_s):
        plan = self._plan(now_s)
        if not plan.is_empty:
            admitted = [(a.slot, a.state.request_id, a.num_cached_tokens, len(a.tokens)) for a in plan.admitted]
            arrays = (plan.slots, plan.starts, plan.lengths, plan.sampled)
            tables = [
                plan.block_tables[slot, : -(-(start + length) // 4)].tolist()
                for slot, start, length in zip(plan.slots, plan.starts, plan.lengths, strict=True)
            ]
            moves = [array.tolist() for array in (*plan.swap_out, *plan.swap_in)]
            facts = (now_s, plan.step_id, plan.num_decodes, plan.features, list(plan.events), moves)
            self.plans.append((*facts, *(array.tolist() for array in arrays), tables, admitted))
        return plan


TARGETS = Slo(ttft_s=1.0, tpot_s=0.1)


class Ignored:
    def emit(self, events, step):
        pass


def plans_of_both(trace, *, step_time, num_blocks, max_num_seqs, budget, ordering, num_host_blocks=0):
    swap = {"num_host_blocks": num_host_blocks, "block_swap_s": 0.01}
    limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": budget, "max_model_len": 200}
    simulation = build_simulation(
        SimulationConfig(
            step_time=step_time,
            num_blocks=num_blocks,
            block_size=4,
            ordering=ordering,
            slo=TARGETS,
            jumps=False,
            **limits,
            **swap,
        )
    )
    simulated = PlanRecorder(simulation.schedulers[0])
    report = simulation.run(trace)

    scheduler = build_scheduler(
        config=SchedulerConfig(**limits),
        cache=CacheConfig(num_blocks=num_blocks, block_size=4, **swap),
        policy=PolicyConfig(ordering=ordering),
        prior=step_time,
    )
    live = PlanRecorder(scheduler)
    executor_limits = ExecutorLimits(
        num_blocks=num_blocks,
        block_size=4,
        max_model_len=200,
        vocab_size=VOCAB_SIZE,
        max_num_seqs=max_num_seqs,
        **swap,
    )
    requests = [replace(request, slo=TARGETS) for request in trace.requests()]
    clock = VirtualClock()
    executor = FakeExecutor(executor_limits, step_time=step_time, clock=clock)
    num_steps = run_recorded(requests, scheduler, executor, clock, Ignored())
    assert num_steps == report.num_steps == len(live.plans)
    return simulated.plans, live.plans


# Every prompt has a tail of its own: the toy model answers equal prompts alike and so shares blocks of outputs, which
# the simulator's made-up tokens never do.
rows = st.tuples(
    st.one_of(st.integers(0, 20).map(lambda t: t / 4), st.floats(0, 5)),
    st.integers(1, 60),
    st.integers(1, 30),
    st.lists(st.integers(0, 3), max_size=4),
).map(lambda row: (row[0], row[1] + 4 * len(row[3]), *row[2:]))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(rows, min_size=1, max_size=10).map(sorted),
    st.sampled_from([ConstantTime(0.25), ContextTime(0.013)]),
    st.sampled_from([12, 25, 100]),
    st.integers(1, 5),
    st.sampled_from(sorted(ORDERINGS)),
    st.sampled_from([0, 0, 40]),
)
def test_simulator_and_runtime_make_the_same_plans(
    requests, step_time, num_blocks, max_num_seqs, ordering, num_host_blocks
):
    trace = make_trace(requests, priorities=[len(row[3]) % 3 for row in requests])
    simulated, live = plans_of_both(
        trace,
        step_time=step_time,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        budget=24,
        ordering=ordering,
        num_host_blocks=num_host_blocks,
    )
    assert simulated == live


@pytest.mark.skipif(not DATA.exists(), reason=NO_DATA)
def test_a_slice_of_a_public_trace():
    trace = read_trace(DATA / "sharegpt300.jsonl.gz").take(20)
    trace.input_tokens[:] = trace.input_tokens // 40 + 1
    trace.output_tokens[:] = trace.output_tokens // 20 + 1
    simulated, live = plans_of_both(
        trace, step_time=ContextTime(0.02), num_blocks=120, max_num_seqs=8, budget=64, ordering="fcfs"
    )
    assert len(live) > 100
    assert simulated == live
