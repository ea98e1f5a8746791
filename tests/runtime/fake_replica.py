"""A replica without a model: the runtime's own process around an executor that needs no torch."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace

import numpy as np

from expediter.assembly.replica import assemble_replica
from expediter.core.errors import ConfigurationError, RequestError
from expediter.core.plan import SequenceFailure, StepPlan, StepResult, TokenLogprobs
from expediter.core.ports import ExecutorLimits
from expediter.core.request import Grammar, Request
from expediter.runtime.process import BuiltReplica, replica_main
from expediter.runtime.spec import ReplicaSpec
from expediter.testing.fake_executor import FakeExecutor

VOCAB_SIZE = 300
EOS = 256


class EchoExecutor:
    """Says the prompt again, then the end-of-sequence token: tests choose the output by choosing the prompt.

    Grammars do not change that. One that holds "slow" takes a while to prepare, one with "refused" cannot be, and
    outputs cannot follow one with "broken".
    """

    def __init__(self, limits: ExecutorLimits) -> None:
        self.limits = limits
        self._requests: dict[int, Request] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        for admission in plan.admitted:
            self._requests[admission.slot] = admission.state.request
        tokens, logprobs, failures = [], [], []
        for entry, slot in zip(plan.sampled.tolist(), plan.sample_slots.tolist(), strict=True):
            request = self._requests[slot]
            prompt = request.prompt
            index = int(plan.starts[entry] + plan.lengths[entry]) - len(prompt)
            token = int(prompt[index]) if index < len(prompt) else EOS
            tokens.append(token)
            if request.grammar is not None and "broken" in request.grammar.text:
                failures.append(SequenceFailure(request.request_id, "the grammar broke"))
            wanted = request.sampling.logprobs
            top = ((token, -0.5), (0, float("-inf")))
            logprobs.append(None if wanted is None else TokenLogprobs(-0.5, 1, top[:wanted]))
        drawn = np.array([tokens], dtype=np.int32).reshape(1, -1)
        return StepResult(plan.step_id, drawn, 0.0, tuple(logprobs), failures=tuple(failures))

    def prepare(self, grammar: Grammar) -> None:
        if "slow" in grammar.text:
            time.sleep(1.0)
        if "refused" in grammar.text:
            raise RequestError("the grammar is refused")

    def close(self) -> None:
        self._requests.clear()


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
        return replace(result, elapsed_s=self._step_s)

    def prepare(self, grammar: Grammar) -> None:
        self._inner.prepare(grammar)

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
