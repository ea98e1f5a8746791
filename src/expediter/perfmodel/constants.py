"""Constants fitted to published measurements, carried as data with their sources (`constants.json`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Final

import msgspec

from expediter.core.errors import ConfigurationError

_FILE: Final = "constants.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertKernels:
    """What the kernels of a layer's routed experts reach with weights of one type.

    Args:
        latency_s: of all kernels of the layer's experts beside their reading, computing and moving.
        bandwidth_share: of peak memory bandwidth while weights are read.
        flops_share: of peak FLOP/s.
        tile_tokens: rows by which an expert's tokens are rounded up on average.
        row_factor: on the time to write and read each expert's row and its result once.
        token_factor: on the time to read every token and to write its result, once on every GPU.
        group_latency_s: further latency where a GPU has only some of the experts.
    """

    latency_s: float
    bandwidth_share: float
    flops_share: float
    tile_tokens: float
    row_factor: float
    token_factor: float
    group_latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertKernelsByType:
    """By type of the experts' weights; fp4 is what is read so and computed in bfloat16."""

    bf16: ExpertKernels
    fp8: ExpertKernels
    fp4: ExpertKernels


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """What single kernels reach on one GPU generation, launched from a CUDA graph.

    Args:
        gemm_latency_s: of a matrix product beside its reading and computing.
        gemm_flops_share: of peak FLOP/s in large matrix products.
        gemm_bandwidth_share: of peak memory bandwidth while weights are read.
        prefill_attention_latency_s: of a prefill attention kernel beside its computing.
        prefill_attention_share: of peak FLOP/s.
        prefill_attention_tile: tokens per side of the square that is computed whole on the diagonal of the causal mask.
        decode_attention_latency_s: of a decode attention kernel beside its reading.
        kv_bandwidth_share: of peak memory bandwidth in decode attention.
        all_reduce_latency_s: of the smallest all-reduce.
        link_share: of link bandwidth in all-reduces.
        small_kernel_s: norm, rotation, KV write and activation, each.
        fp8_gemm_latency_s, fp8_gemm_flops_share, fp8_gemm_bandwidth_share: the same of products in fp8, whose input
            comes converted; 0 where the generation has none, or no table.
        fp8_kv_bandwidth_share: of peak memory bandwidth in decode attention over KV in fp8.
        all_to_all_latency_s: of the smallest all-to-all.
        all_to_all_share: of link bandwidth in all-to-alls.
        expert_skew: tokens that touch as many experts as this share of tokens that choose evenly.
        expert_imbalance: the fullest of g groups has g to this power times the mean.
        experts: what kernels of experts reach.
    """

    gemm_latency_s: float
    gemm_flops_share: float
    gemm_bandwidth_share: float
    prefill_attention_latency_s: float
    prefill_attention_share: float
    prefill_attention_tile: float
    decode_attention_latency_s: float
    kv_bandwidth_share: float
    all_reduce_latency_s: float
    link_share: float
    small_kernel_s: float
    fp8_kv_bandwidth_share: float
    all_to_all_latency_s: float
    all_to_all_share: float
    expert_skew: float
    expert_imbalance: float
    experts: ExpertKernelsByType
    fp8_gemm_latency_s: float = 0.0
    fp8_gemm_flops_share: float = 0.0
    fp8_gemm_bandwidth_share: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What an engine adds to its kernels; factors of 1 and seconds of 0 leave the kernels as measured.

    Args:
        step_s: host time of a step that overlaps nothing.
        worker_s: the same per GPU that shares a layer, where each is told what to run in turn.
        prefill_step_s: the same, in steps with a prompt chunk only.
        seq_s: per entry of the batch (sampling, tables, output); launches overlap it.
        decode_launch_s: host time to launch a decode without a CUDA graph; it overlaps the GPU's time.
        prefill_launch_s: host time to launch a step with a prompt chunk; it overlaps the GPU's time.
        compute_factor: on the time of compute-bound products and prefill attention.
        memory_factor: on the time to read weights and KV.
        all_reduce_factor: on the time that data of all-reduces take.
        bulk_all_reduce_factor: further cost of all-reduces at or above `bulk_bytes`, as a multiple of the time that the
            part of the message from beyond a pair of GPUs takes over the link to the host.
        bulk_bytes: message size from which that holds.
    """

    step_s: float = 0.0
    worker_s: float = 0.0
    prefill_step_s: float = 0.0
    seq_s: float = 0.0
    decode_launch_s: float = 0.0
    prefill_launch_s: float = 0.0
    compute_factor: float = 1.0
    memory_factor: float = 1.0
    all_reduce_factor: float = 1.0
    bulk_all_reduce_factor: float = 0.0
    bulk_bytes: int = 1 << 26


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """The whole file: where it is from, kernels by GPU generation, engines by name."""

    sources: list[dict[str, Any]]
    kernels: dict[str, Kernels]
    engines: dict[str, Engine]


@cache
def constants() -> Constants:
    """Return the constants that come with the package."""
    data = resources.files("expediter.perfmodel").joinpath(_FILE).read_bytes()
    return msgspec.json.decode(data, type=Constants)


def engine_named(name: str) -> Engine:
    """Return what is known of an engine.

    Raises:
        ConfigurationError: there is none of that name; the message lists those that exist.
    """
    engines = constants().engines
    if name not in engines:
        raise ConfigurationError(f"no engine {name!r}; there are: {', '.join(sorted(engines))}")
    return engines[name]
