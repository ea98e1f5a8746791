"""Set-ups to choose from: a kind of GPU, how a replica spreads over them, and the policy; the size is left open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from expediter.assembly.presets import Preset, load_preset
from expediter.assembly.simulation import SimulationConfig
from expediter.core.errors import ConfigurationError
from expediter.perfmodel.hardware import gpu_named
from expediter.perfmodel.parallelism import Parallelism
from expediter.perfmodel.shapes import shape_named
from expediter.scheduling.build import BATCHINGS

DEFAULT_PRESETS: Final = ("sarathi", "sglang", "expediter")
DEFAULT_BUDGETS: Final = (512, 2048, 8192)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A deployment of which only the number of replicas is open.

    Args:
        gpu: kind.
        price_per_hour: of one GPU, in US dollars.
        tensor_parallel, pipeline_parallel, expert_parallel: how a replica's GPUs share the model
            (`perfmodel.parallelism.Parallelism`).
        preset: composition of scheduling parts.
        max_num_batched_tokens: token budget of a step; None for the preset's.
    """

    gpu: str
    price_per_hour: float
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    preset: str
    max_num_batched_tokens: int | None = None

    @property
    def parallelism(self) -> Parallelism:
        """How a replica's GPUs share the model."""
        return Parallelism(tensor=self.tensor_parallel, pipeline=self.pipeline_parallel, expert=self.expert_parallel)

    def num_gpus(self, size: int) -> int:
        """Return the GPUs of `size` replicas."""
        return self.parallelism.num_gpus * size

    def cost_per_hour(self, size: int) -> float:
        """Return the price of `size` replicas, in US dollars per hour."""
        return self.num_gpus(size) * self.price_per_hour

    def simulation(self, base: SimulationConfig, size: int) -> SimulationConfig:
        """Return what to simulate: `base` on this set-up with `size` replicas."""
        return replace(
            base,
            gpu=self.gpu,
            tensor_parallel=self.tensor_parallel,
            pipeline_parallel=self.pipeline_parallel,
            expert_parallel=self.expert_parallel,
            replicas=size,
            preset=self.preset,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs(base),
        )

    def max_num_seqs(self, base: SimulationConfig) -> int:
        """Return the most running sequences: `base`'s or the preset's, at most the token budget."""
        limits = load_preset(self.preset).scheduler
        asked = limits.max_num_seqs if base.max_num_seqs is None else base.max_num_seqs
        return asked if self.max_num_batched_tokens is None else min(asked, self.max_num_batched_tokens)

    @property
    def split(self) -> str:
        """A replica's GPUs in a few characters, such as `tp4 pp2`."""
        sizes = {"tp": self.tensor_parallel, "pp": self.pipeline_parallel, "ep": self.expert_parallel}
        return " ".join(f"{name}{n}" for name, n in sizes.items() if n > 1) or "1 GPU"

    @property
    def policy(self) -> str:
        """The preset, and the token budget if it is a choice."""
        return self.preset if self.max_num_batched_tokens is None else f"{self.preset} {self.max_num_batched_tokens}"

    def describe(self, size: int) -> str:
        """Return the set-up in a few words."""
        return f"{size} x {self.gpu} {self.split}, {self.policy}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """What the planner may choose.

    Args:
        gpus: kinds, each with its price per GPU and hour in US dollars.
        tensor_parallel: sizes of the groups that share every layer; empty for every power of two that the model and a
            node allow.
        pipeline_parallel, expert_parallel: numbers of stages, and of groups that share experts.
        presets: compositions of scheduling parts.
        budgets: token budgets of a step. Presets that set their own (whole prompts, or a budget by predicted time) have
            one set-up each instead of one per budget.
        max_gpus: most GPUs in all.
    Raises:
        ConfigurationError: there is nothing to choose from, a name does not exist, or a number is out of range.
    """

    gpus: Mapping[str, float]
    tensor_parallel: Sequence[int] = ()
    pipeline_parallel: Sequence[int] = (1, 2)
    expert_parallel: Sequence[int] = (1,)
    presets: Sequence[str] = DEFAULT_PRESETS
    budgets: Sequence[int] = DEFAULT_BUDGETS
    max_gpus: int = 64

    def __post_init__(self) -> None:
        for name in ("gpus", "presets", "budgets", "pipeline_parallel", "expert_parallel"):
            if not getattr(self, name):
                raise ConfigurationError(f"there are no {name} to choose from")
        for name, price in self.gpus.items():
            gpu_named(name)
            if not 0 < price < float("inf"):
                raise ConfigurationError(f"the price of {name} must be a number of dollars above 0, not {price}")
        for number in (
            *self.tensor_parallel,
            *self.pipeline_parallel,
            *self.expert_parallel,
            *self.budgets,
            self.max_gpus,
        ):
            if number < 1:
                raise ConfigurationError(f"GPUs and token budgets must be at least 1, not {number}")
        for preset in self.presets:
            load_preset(preset)

    def setups(self, model: str) -> list[Setup]:
        """Return every set-up, in a fixed order; some may be impossible (`bounds` says which)."""
        shape = shape_named(model)
        splits = [
            (gpu, split)
            for gpu in self.gpus
            for tensor in self.tensor_parallel or _powers_of_two(gpu_named(gpu).max_tensor_parallel)
            for pipeline in sorted(set(self.pipeline_parallel))
            for expert in sorted(set(self.expert_parallel))
            if (self.tensor_parallel or shape.divides_among(tensor))
            and (split := Parallelism(tensor=tensor, pipeline=pipeline, expert=expert)).num_gpus <= self.max_gpus
        ]
        return [
            Setup(
                gpu=gpu,
                price_per_hour=self.gpus[gpu],
                tensor_parallel=split.tensor,
                pipeline_parallel=split.pipeline,
                expert_parallel=split.expert,
                preset=preset,
                max_num_batched_tokens=budget,
            )
            for gpu, split in splits
            for preset in self.presets
            for budget in self._budgets(load_preset(preset))
        ]

    def _budgets(self, preset: Preset) -> Sequence[int | None]:
        own = BATCHINGS[preset.policy.batching].whole_prompts or preset.policy.budget != "fixed"
        return (None,) if own else sorted(set(self.budgets))


def _powers_of_two(largest: int) -> list[int]:
    return [1 << exponent for exponent in range(largest.bit_length())]
