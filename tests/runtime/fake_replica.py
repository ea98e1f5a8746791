"""A replica without a model: the runtime's own process around an executor that needs no torch."""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np

from expediter.assembly.replica import assemble_replica
from expediter.core.errors import ConfigurationError
from expediter.core.plan import StepPlan, StepResult, TokenLogprobs
from expediter.core.ports import ExecutorLimits
from expediter.runtime.process import BuiltReplica, replica_main
from expediter.runtime.spec import ReplicaSpec
from expediter.testing.fake_executor import FakeExecutor

VOCAB_SIZE = 300
EOS = 256


class EchoExecutor:
    """Says the prompt again, then the end-of-sequence token: tests choose the output by choosing the prompt."""

    def __init__(self, limits: ExecutorLimits) -> None:
        self.limits = limits
        self._prompts: dict[int, np.ndarray] = {}
        self._logprobs: dict[int, int | None] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        for admission in plan.admitted:
            self._prompts[admission.slot] = admission.state.request.prompt
            self._logprobs[admission.slot] = admission.state.request.sampling.logprobs
        tokens, logprobs = [], []
        for entry, slot in zip(plan.sampled.tolist(), plan.sample_slots.tolist(), strict=True):
            prompt = self._prompts[slot]
            index = int(plan.starts[entry] + plan.lengths[entry]) - len(prompt)
            token = int(prompt[index]) if index < len(prompt) else EOS
            tokens.append(token)
            wanted = self._logprobs[slot]
            top = ((token, -0.5), (0, float("-inf")))
            logprobs.append(None if wanted is None else TokenLogprobs(-0.5, 1, top[:wanted]))
        return StepResult(plan.step_id, np.array([tokens], dtype=np.int32).reshape(1, -1), 0.0, tuple(logprobs))

    def close(self) -> None:
        self._prompts.clear()


class SlowExecutor:
    """Takes a while for each step."""

    def __init__(self, inner: FakeExecutor | EchoExecutor, step_s: float) -> None:
        self._inner = inner
        self._step_s = step_s

    @property
    def limits(self) -> ExecutorLimits:
        return self._inner.limits

    def execute(self, plan: StepPlan) -> StepResult:
        time.sleep(self._step_s)
        result = self._inner.execute(plan)
        return StepResult(result.step_id, result.tokens, self._step_s, result.logprobs)

    def close(self) -> None:
        self._inner.close()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=("toy", "echo"), default="echo")
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--refuse", action="store_true")
    parser.add_argument("--exit-at-start", type=int)
    args = parser.parse_args()

    def build(spec: ReplicaSpec) -> BuiltReplica:
        if args.refuse:
            raise ConfigurationError("this replica refuses")
        if args.exit_at_start is not None:
            sys.exit(args.exit_at_start)
        limits = ExecutorLimits(
            num_blocks=spec.num_blocks or 256,
            block_size=spec.block_size,
            max_model_len=spec.max_model_len or 2048,
            vocab_size=VOCAB_SIZE,
            max_num_seqs=spec.scheduler.max_num_seqs,
        )
        inner = EchoExecutor(limits) if args.model == "echo" else FakeExecutor(limits)
        return assemble_replica(spec, SlowExecutor(inner, args.step_s) if args.step_s else inner)

    return replica_main(build)


if __name__ == "__main__":
    sys.exit(main())
