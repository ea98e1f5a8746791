"""How one replica's GPUs share the model."""

from __future__ import annotations

from dataclasses import dataclass

from expediter.core.errors import ConfigurationError
from expediter.perfmodel.dimensions import ModelShape
from expediter.perfmodel.hardware import Gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """Sizes of a replica's groups of GPUs.

    Args:
        tensor: GPUs that share every layer's matrices and heads.
        pipeline: stages that share the layers.
        expert: groups that share the routed experts. 1: every expert is sliced among the `tensor` GPUs. Up to
            `tensor`: each of so many groups of them holds whole experts of its own. Beyond: so many GPUs per stage,
            whose attention is computed by `num_groups` groups of `tensor` GPUs for sequences of their own.
    Raises:
        ConfigurationError: a size is below 1, or the tensor and expert sizes do not divide.
    """

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "expert"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} parallel size must be at least 1, not {getattr(self, name)}")
        if self.tensor % self.expert and self.expert % self.tensor:
            raise ConfigurationError(
                f"expert parallel size {self.expert} and tensor parallel size {self.tensor} do not divide"
            )

    @property
    def num_groups(self) -> int:
        """Groups that compute the attention of sequences of their own."""
        return max(1, self.expert // self.tensor)

    @property
    def num_gpus_per_stage(self) -> int:
        return self.tensor * self.num_groups

    @property
    def num_gpus(self) -> int:
        return self.num_gpus_per_stage * self.pipeline

    def check(self, shape: ModelShape, gpu: Gpu) -> None:
        """Raise ConfigurationError unless the model divides so among such GPUs."""
        shape.check_tensor_parallel(self.tensor)
        if self.tensor > gpu.max_tensor_parallel:
            raise ConfigurationError(
                f"{self.tensor} GPUs per replica exceed the {gpu.max_tensor_parallel} of one {gpu.name} node"
            )
        if self.pipeline > shape.num_layers:
            raise ConfigurationError(
                f"model {shape.name} has {shape.num_layers} layers, too few for {self.pipeline} pipeline stages"
            )
        if self.expert == 1:
            return
        if shape.experts is None:
            raise ConfigurationError(f"model {shape.name} has no experts that {self.expert} groups could share")
        if shape.experts.num_experts % self.expert:
            raise ConfigurationError(
                f"model {shape.name} has {shape.experts.num_experts} experts per layer, which {self.expert} groups "
                "cannot share evenly"
            )

    def layers_factor(self, shape: ModelShape) -> float:
        """Return by how much the fullest stage exceeds an even share of the layers, at least 1."""
        return -(-shape.num_layers // self.pipeline) * self.pipeline / shape.num_layers

    def weight_bytes_on_gpu(self, shape: ModelShape) -> int:
        """Return the weights on each GPU of the fullest stage: its layers, and an end of the pipeline or both."""
        per_stage = self.layers_factor(shape) / self.pipeline
        dense = shape.dense_weight_bytes * per_stage / self.tensor
        experts = shape.expert_weight_bytes * per_stage / self.num_gpus_per_stage
        tables = shape.table_bytes
        if self.pipeline > 1 and not shape.tied:
            tables //= 2
        return int(dense + experts + tables / self.tensor) + 1
