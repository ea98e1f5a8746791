"""Protocols that cross layers. Every implementation passes the conformance suite of `expediter.testing`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from expediter.core.plan import StepFeatures, StepPlan, StepResult
from expediter.core.request import Grammar


class Clock(Protocol):
    """Time as an argument: real in `runtime`, virtual in `sim` and tests."""

    def now(self) -> float:
        """Return seconds since the clock's own origin; never goes back."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorLimits:
    """What an executor can hold.

    Attributes:
        num_blocks: KV blocks in its pool; ids are [0, num_blocks).
        block_size: tokens per block.
        max_model_len: longest sequence that the model can attend over, in tokens.
        vocab_size: sampled tokens lie in [0, vocab_size).
        max_num_seqs: slots.
        num_host_blocks: blocks of the host tier; ids are [0, num_host_blocks).
        block_swap_s: time to move one block between device and host, one way; None if it is not known.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    num_host_blocks: int = 0
    block_swap_s: float | None = None


class Executor(Protocol):
    """Runs planned steps on a model (or pretends to)."""

    @property
    def limits(self) -> ExecutorLimits: ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one plan to its end; reads the plan's arrays, keeps none of them.

        Copies come first, then swaps out, then swaps in, then the forward pass.
        """
        ...

    def prepare(self, grammar: Grammar) -> None:
        """Get ready for requests with this grammar object. Called before the first of them is added, by a thread of its
        own, while steps are executed; may take long.

        Raises:
            RequestError: outputs cannot be held to it.
        """
        ...

    def close(self) -> None:
        """Give memory and processes back; safe to call twice."""
        ...


class StepTimeModel(Protocol):
    """Predicts how long a step takes."""

    def step_time_s(self, features: StepFeatures) -> float:
        """Return the duration of one step in seconds, above 0."""
        ...

    def decode_run_s(self, features: StepFeatures, num_steps: int) -> npt.NDArray[np.float64]:
        """Return the durations of `num_steps` successive decode steps, float64, shape [num_steps].

        In step k (from 0) the context has grown by k * num_decodes tokens. Entry k equals, bit for bit, what
        `step_time_s` says of those features: a jump in simulation is the same as stepping.
        """
        ...


def run_s(model: StepTimeModel, features: StepFeatures, num_steps: int) -> list[float]:
    """Return how long the steps of a repeated plan take, each as `step_time_s` says (`StepFeatures.later`)."""
    if features.num_prefill_tokens:
        return [model.step_time_s(features.later(number)) for number in range(num_steps)]
    durations: list[float] = model.decode_run_s(features, num_steps).tolist()
    return durations
