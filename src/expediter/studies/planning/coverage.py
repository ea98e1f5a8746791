"""How much of an answer rests on step times outside what the step-time model was fitted to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from expediter.core.plan import StepFeatures


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranges:
    """Largest step that measurements cover.

    Args:
        tokens: computed in a step.
        prompt_tokens: attended by a prompt's tokens.
        batch: sequences.
        context_tokens: of KV per decoding sequence.
    """

    tokens: int
    prompt_tokens: int
    batch: int
    context_tokens: int

    def hold(self, features: StepFeatures) -> bool:
        """Return whether a step lies within them."""
        return (
            features.num_tokens <= self.tokens
            and features.num_seqs <= self.batch
            and features.decode_context_tokens <= self.context_tokens * features.num_decodes
            # A prompt of n tokens attends to n / 2 on average.
            and features.prefill_attention <= self.prompt_tokens / 2 * features.num_prefill_tokens
        )


KERNELS: Final = Ranges(tokens=8192, prompt_tokens=16_384, batch=512, context_tokens=131_072)
"""Tables that the kernels' constants are fitted to (docs/perfmodel.md)."""

_SERVED: Final = Ranges(tokens=4223, prompt_tokens=4096, batch=128, context_tokens=4608)
_EAGER: Final = Ranges(tokens=32_768, prompt_tokens=8192, batch=64, context_tokens=8256)
ENGINES: Final[Mapping[str, Ranges]] = {
    "vllm": _SERVED,
    "trtllm": _SERVED,
    "sglang": _SERVED,
    "vllm-0.18": Ranges(tokens=8255, prompt_tokens=8192, batch=64, context_tokens=8704),
    "eager-a100": _EAGER,
    "eager-h100": _EAGER,
}
"""Served requests or steps that the engines' constants are fitted to (docs/perfmodel.md)."""

_ENGINE_GPU: Final = {
    "vllm": "h100",
    "trtllm": "h100",
    "sglang": "h100",
    "eager-a100": "a100-80g",
    "eager-h100": "h100",
}
_MEASURED_GPUS: Final = frozenset({"a100-80g", "h100"})
"""GPUs with kernel tables of their own; the others take those of the nearest generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Shares of the time of all steps, in [0, 1].

    Attributes:
        outside_kernels: in steps larger than any of the kernel tables.
        outside_engine: in steps larger than any that the engine was fitted to; None if its measurements are not known.
    """

    outside_kernels: float
    outside_engine: float | None


class StepWatch:
    """Adds up the time of steps by what they are.

    Args:
        engine: name of the engine that the steps are modelled with.
    Attributes:
        total_s: time of all steps.
        prompt_s: of those that compute prompts.
        decode_s, num_decodes: of the others, the time that each token took, all together, and the number of tokens.
    """

    def __init__(self, engine: str) -> None:
        self.total_s = 0.0
        self.prompt_s = 0.0
        self.decode_s = 0.0
        self.num_decodes = 0
        self._ranges = ENGINES.get(engine)
        self._outside_kernels_s = 0.0
        self._outside_engine_s = 0.0

    def add(self, features: StepFeatures, durations_s: Sequence[float]) -> None:
        """Take in a step, or a run of decode steps by its first: the context grows little over a run."""
        taken_s = sum(durations_s)
        self.total_s += taken_s
        if features.num_prefill_tokens:
            self.prompt_s += taken_s
        else:
            self.decode_s += taken_s * features.num_decodes
            self.num_decodes += len(durations_s) * features.num_decodes
        if not KERNELS.hold(features):
            self._outside_kernels_s += taken_s
        if self._ranges is not None and not self._ranges.hold(features):
            self._outside_engine_s += taken_s

    @property
    def coverage(self) -> Coverage:
        total_s = self.total_s or 1.0
        return Coverage(
            outside_kernels=self._outside_kernels_s / total_s,
            outside_engine=None if self._ranges is None else self._outside_engine_s / total_s,
        )


def borrowed(gpu: str, engine: str, *, is_calibrated: bool) -> list[str]:
    """Return, in words, which of a GPU's constants were not measured on it."""
    said = []
    if gpu not in _MEASURED_GPUS:
        said.append(f"no kernel was measured on {gpu}: efficiencies are those of the nearest generation")
    origin = _ENGINE_GPU.get(engine)
    if not is_calibrated and origin is not None and origin != gpu:
        said.append(f"the overhead of {engine} was measured on {origin}")
    return said
