"""Set-ups to choose from: a kind of GPU, how a replica spreads over them, and the policy; the size is left open."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Final

from expediter.assembly.pools import PoolConfig
from expediter.assembly.presets import Preset, load_preset
from expediter.assembly.simulation import SimulationConfig
from expediter.core.errors import ConfigurationError
from expediter.perfmodel.hardware import gpu_named
from expediter.perfmodel.parallelism import Parallelism
from expediter.perfmodel.shapes import shape_named
from expediter.scheduling.build import BATCHINGS

DEFAULT_PRESETS: Final = ("sarathi", "sglang", "expediter", "distserve")
DEFAULT_BUDGETS: Final = (512, 2048, 8192)
DEFAULT_PREFILL_SHARES: Final = (0.25, 0.5, 0.75)
"""Flags of `expediter plan` repeat these three, so that its parser loads nothing heavy."""


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
        prefill_share: of the replicas that only compute prompts, the others then only decode; 0 where all do both.
        decode_tensor_parallel: of those that only decode, if there are any; their other sizes are the same.
    """

    gpu: str
    price_per_hour: float
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    preset: str
    max_num_batched_tokens: int | None = None
    prefill_share: float = 0.0
    decode_tensor_parallel: int = 0

    @property
    def is_split(self) -> bool:
        """Whether prompts are computed on other replicas than later tokens."""
        return self.prefill_share > 0

    @property
    def least_size(self) -> int:
        """Fewest replicas that it can have."""
        return 2 if self.is_split else 1

    @property
    def parallelism(self) -> Parallelism:
        """How the GPUs of a replica that computes prompts share the model."""
        return Parallelism(tensor=self.tensor_parallel, pipeline=self.pipeline_parallel, expert=self.expert_parallel)

    @property
    def decode_parallelism(self) -> Parallelism:
        """How the GPUs of a replica that decodes share the model."""
        return replace(self.parallelism, tensor=self.decode_tensor_parallel) if self.is_split else self.parallelism

    def num_prefill(self, size: int) -> int:
        """Return how many of `size` replicas only compute prompts; neither they nor the others ever get fewer as there
        are more in all."""
        return min(max(1, round(size * self.prefill_share)), size - 1) if self.is_split else 0

    def num_gpus(self, size: int) -> int:
        """Return the GPUs of `size` replicas."""
        num_prefill = self.num_prefill(size)
        num_decode = size - num_prefill
        return self.parallelism.num_gpus * num_prefill + self.decode_parallelism.num_gpus * num_decode

    def largest_size(self, max_gpus: int, max_cost_per_hour: float) -> int:
        """Return the most replicas within both limits; 0 if there is no size that is."""
        size = self.least_size
        while self.num_gpus(size) <= max_gpus and self.cost_per_hour(size) <= max_cost_per_hour + 1e-9:
            size += 1
        return size - 1 if size > self.least_size else 0

    def cost_per_hour(self, size: int) -> float:
        """Return the price of `size` replicas, in US dollars per hour."""
        return self.num_gpus(size) * self.price_per_hour

    def simulation(self, base: SimulationConfig, size: int) -> SimulationConfig:
        """Return what to simulate: `base` on this set-up with `size` replicas."""
        num_prefill = self.num_prefill(size)
        return replace(
            base,
            pools=self._pools(num_prefill, size - num_prefill) if self.is_split else (),
            gpu=self.gpu,
            tensor_parallel=self.tensor_parallel,
            pipeline_parallel=self.pipeline_parallel,
            expert_parallel=self.expert_parallel,
            replicas=size,
            preset=self.preset,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs(base),
        )

    def _pools(self, num_prefill: int, num_decode: int) -> tuple[PoolConfig, ...]:
        prefill = PoolConfig(
            role="prefill",
            replicas=num_prefill,
            tensor_parallel=self.tensor_parallel,
            pipeline_parallel=self.pipeline_parallel,
            expert_parallel=self.expert_parallel,
        )
        decode_tensor = self.decode_parallelism.tensor
        return prefill, replace(prefill, role="decode", replicas=num_decode, tensor_parallel=decode_tensor)

    def max_num_seqs(self, base: SimulationConfig) -> int:
        """Return the most running sequences: `base`'s or the preset's, at most the token budget."""
        limits = load_preset(self.preset).scheduler
        asked = limits.max_num_seqs if base.max_num_seqs is None else base.max_num_seqs
        return asked if self.max_num_batched_tokens is None else min(asked, self.max_num_batched_tokens)

    @property
    def split(self) -> str:
        """A replica's GPUs in a few characters, such as `tp4 pp2`."""
        sizes = {"tp": self.tensor_parallel, "pp": self.pipeline_parallel, "ep": self.expert_parallel}
        if self.is_split:
            sizes["tp"] = 0
        same = " ".join(f"{name}{n}" for name, n in sizes.items() if n > 1)
        if not self.is_split:
            return same or "tp1"
        return " ".join(part for part in (f"tp{self.tensor_parallel}:tp{self.decode_tensor_parallel}", same) if part)

    @property
    def policy(self) -> str:
        """The preset, and the token budget if it is a choice."""
        return self.preset if self.max_num_batched_tokens is None else f"{self.preset} {self.max_num_batched_tokens}"

    def describe(self, size: int) -> str:
        """Return the set-up in a few words."""
        return f"{self.replicas_text(size)}, {self.policy}"

    def replicas_text(self, size: int) -> str:
        """Return the replicas in a few words; `prefill:decode` where they are not alike."""
        num_prefill = self.num_prefill(size)
        number = f"{num_prefill}:{size - num_prefill}" if self.is_split else str(size)
        return f"{number} x {self.gpu} {self.split}"


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
            one set-up each instead of one per budget; so have those with replicas for prompts alone.
        prefill_shares: of the replicas that only compute prompts, to try with presets that have such replicas.
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
    prefill_shares: Sequence[float] = DEFAULT_PREFILL_SHARES
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
        for share in self.prefill_shares:
            if not 0 < share < 1:
                raise ConfigurationError(f"a share of prefill replicas must lie between 0 and 1, not {share}")
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
        tensors = {gpu: {split.tensor for kind, split in splits if kind == gpu} for gpu in self.gpus}
        return [
            Setup(
                gpu=gpu,
                price_per_hour=self.gpus[gpu],
                tensor_parallel=split.tensor,
                pipeline_parallel=split.pipeline,
                expert_parallel=split.expert,
                preset=preset.name,
                max_num_batched_tokens=budget,
                prefill_share=share,
                decode_tensor_parallel=decode_tensor,
            )
            for gpu, split in splits
            for preset in map(load_preset, self.presets)
            for budget in self._budgets(preset)
            for share, decode_tensor in self._roles(preset, split.tensor, tensors[gpu])
        ]

    def _roles(self, preset: Preset, tensor: int, others: Set[int]) -> Iterable[tuple[float, int]]:
        """Return shares of prefill replicas with the others' tensor parallel size: the same, or half of it."""
        if not preset.cluster.prefill_share:
            return ((0.0, 0),)
        sizes = [size for size in (tensor, tensor // 2) if size in others]
        return [(share, size) for share in sorted(set(self.prefill_shares)) for size in sizes]

    def _budgets(self, preset: Preset) -> Sequence[int | None]:
        whole, is_split = BATCHINGS[preset.policy.batching].whole_prompts, preset.cluster.prefill_share > 0
        # Where nobody decodes beside prompts, the budget is no compromise between the two.
        own = whole or is_split or preset.policy.budget != "fixed"
        return (None,) if own else sorted(set(self.budgets))


def _powers_of_two(largest: int) -> list[int]:
    return [1 << exponent for exponent in range(largest.bit_length())]
