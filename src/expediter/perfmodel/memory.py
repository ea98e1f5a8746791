"""What fits into a replica's GPUs and host memory beside the weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from expediter.core.errors import ConfigurationError
from expediter.perfmodel.dimensions import ModelShape
from expediter.perfmodel.hardware import Gpu
from expediter.perfmodel.parallelism import Parallelism


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCapacity:
    """How much KV a replica holds.

    Attributes:
        num_blocks: blocks of `block_size` tokens.
        kv_bytes: what they take on each GPU.
    """

    num_blocks: int
    kv_bytes: int


def kv_capacity(
    shape: ModelShape,
    gpu: Gpu,
    tensor_parallel: int,
    block_size: int,
    *,
    pipeline_parallel: int = 1,
    expert_parallel: int = 1,
    memory_utilization: float = 0.9,
) -> KVCapacity:
    """Return how many blocks fit beside the weights: memory * utilization - weights - reserved, on each GPU.

    Windowed layers keep as much as the others: blocks are of one kind.

    Args:
        memory_utilization: share of a GPU's memory that the engine may use (vLLM's gpu_memory_utilization).
    Raises:
        ConfigurationError: the weights leave no room for one block; the message says how many GPUs it would take.
    """
    parallelism = Parallelism(tensor=tensor_parallel, pipeline=pipeline_parallel, expert=expert_parallel)
    parallelism.check(shape, gpu)
    blocks = _blocks_beside_weights(shape, gpu, parallelism, block_size, memory_utilization)
    if blocks < 1:
        fitting = [
            n
            for n in (2, 4, 8, 16, 32, 64)
            if n > tensor_parallel
            and shape.divides_among(n)
            and max(n, expert_parallel) % min(n, expert_parallel) == 0
            and _blocks_beside_weights(shape, gpu, replace(parallelism, tensor=n), block_size, memory_utilization) > 0
        ]
        hint = f"; it takes at least {fitting[0] * pipeline_parallel}" if fitting else ""
        raise ConfigurationError(
            f"{shape.name} ({shape.weight_bytes / 1e9:.1f} GB of weights) does not fit {parallelism.num_gpus} x "
            f"{gpu.name} ({gpu.memory_bytes / 1e9:.1f} GB each, {memory_utilization:.0%} usable){hint}"
        )
    block_bytes = block_size * shape.kv_bytes_per_token_on_gpu(tensor_parallel, pipeline_parallel)
    return KVCapacity(num_blocks=blocks * parallelism.num_groups, kv_bytes=blocks * block_bytes)


def _blocks_beside_weights(
    shape: ModelShape, gpu: Gpu, parallelism: Parallelism, block_size: int, memory_utilization: float
) -> int:
    """Return the blocks that one group of GPUs holds."""
    room = int(gpu.memory_bytes * memory_utilization) - parallelism.weight_bytes_on_gpu(shape) - gpu.reserved_bytes
    return room // (shape.kv_bytes_per_token_on_gpu(parallelism.tensor, parallelism.pipeline) * block_size)


class HostTierSize(NamedTuple):
    """Blocks in host memory, and the time to move one there or back; every GPU moves its share over its own link."""

    num_blocks: int
    block_swap_s: float


def host_tier_size(
    shape: ModelShape,
    gpu: Gpu,
    tensor_parallel: int,
    block_size: int,
    swap_space_bytes: int,
    *,
    pipeline_parallel: int = 1,
) -> HostTierSize:
    """Return how many blocks fit the host memory of a replica, and how fast they move.

    Args:
        swap_space_bytes: host memory per GPU (vLLM's swap_space).
    """
    block_bytes = block_size * shape.kv_bytes_per_token_on_gpu(tensor_parallel, pipeline_parallel)
    return HostTierSize(swap_space_bytes // block_bytes, block_bytes / (gpu.host_bandwidth * gpu.host_efficiency))
