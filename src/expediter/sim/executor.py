"""An executor that takes modelled time and makes up tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from expediter.core.errors import InvariantError, RequestError
from expediter.core.plan import StepPlan, StepResult
from expediter.core.ports import ExecutorLimits, StepTimeModel, run_s
from expediter.core.request import Grammar, RequestState, TokenArray
from expediter.sim.synthetic_tokens import VOCAB_SIZE, output_base, output_tokens


class SimulatedExecutor:
    """`Executor` over a step-time model.

    Output tokens depend on the request and on their position alone, and no two requests of one scheduler share any, so
    outputs never give false prefix hits. Copies of blocks take no time: one is some microseconds of a GPU's bandwidth.
    Nothing is computed: wrong blocks go unnoticed here (see
    `testing.FakeExecutor`).

    Args:
        num_blocks, block_size, max_model_len, max_num_seqs: what it claims to hold; see `ExecutorLimits`.
        step_time: how long steps take.
        num_host_blocks, block_swap_s: of the host tier. A step takes longer by `block_swap_s` for every block that
            moves: nothing overlaps.
        number_of: a number for each request that no other has; None for its order of arrival at the scheduler, which
            is enough as long as no request comes from another one.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        max_num_seqs: int,
        step_time: StepTimeModel,
        num_host_blocks: int = 0,
        block_swap_s: float | None = None,
        number_of: Callable[[RequestState], int] | None = None,
    ) -> None:
        self._number_of = number_of or _order_of_arrival
        self._limits = ExecutorLimits(
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            vocab_size=VOCAB_SIZE,
            max_num_seqs=max_num_seqs,
            num_host_blocks=num_host_blocks,
            block_swap_s=block_swap_s,
        )
        self._step_time = step_time
        self._bases = np.zeros(max_num_seqs, np.int32)
        self._is_closed = False

    @property
    def limits(self) -> ExecutorLimits:
        return self._limits

    def execute(self, plan: StepPlan) -> StepResult:
        """Return the plan's tokens and its modelled duration; takes no real time.

        Raises:
            InvariantError: the executor is closed.
        """
        if self._is_closed:
            raise InvariantError("executor is closed")
        return self.result(plan, self.durations_s(plan, plan.num_steps))

    def durations_s(self, plan: StepPlan, num_steps: int) -> list[float]:
        """Return how long each of `num_steps` steps in a row takes; see `scheduling.runs`."""
        if num_steps == 1:
            moving_s = plan.num_swapped_blocks * (self._limits.block_swap_s or 0.0)
            return [self._step_time.step_time_s(plan.features) + moving_s]
        return run_s(self._step_time, plan.features, num_steps)

    def result(self, plan: StepPlan, durations_s: Sequence[float]) -> StepResult:
        """Return the plan's result where the durations are known already; `execute` without asking the model again."""
        return StepResult(
            step_id=plan.step_id,
            tokens=self._tokens(plan),
            elapsed_s=sum(durations_s),
            durations_s=tuple(durations_s),
        )

    def prepare(self, grammar: Grammar) -> None:  # noqa: ARG002 - the protocol's signature
        """Refuse: made-up tokens follow no grammar."""
        raise RequestError("a simulated model follows no grammar", param="grammar")

    def close(self) -> None:
        self._is_closed = True

    def _tokens(self, plan: StepPlan) -> TokenArray:
        for admission in plan.admitted:
            self._bases[admission.slot] = output_base(self._number_of(admission.state))
        sampled = plan.sampled
        if not len(sampled):
            return np.empty((plan.num_steps, 0), np.int32)
        positions = plan.starts + plan.lengths
        if plan.num_decodes < plan.num_seqs:  # else each entry is sampled once
            positions = positions[sampled]
        return output_tokens(self._bases[plan.sample_slots], positions, plan.num_steps)


def _order_of_arrival(state: RequestState) -> int:
    return state.sequence
