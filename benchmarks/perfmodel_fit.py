"""Fits the constants of `expediter.perfmodel` to published measurements and writes its constants.json.

Kernels are fitted by GPU generation on single-kernel tables (bfloat16), engines on whole steps or served requests with
the kernels held fixed. After a change to the model: `python -m benchmarks.perfmodel_fit kernels`, then `engines`. The
tables are not part of the repository (`benchmarks.measurements` says where they are from).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

import expediter.perfmodel
from benchmarks.measurements import DATA, DATASETS, SOURCES
from expediter.perfmodel.calibration import Vector, fit_engine, fit_relative
from expediter.perfmodel.constants import ExpertKernels, ExpertKernelsByType, Kernels
from expediter.perfmodel.dimensions import DTYPE_BYTES

_PEAKS: Final = {"ampere": ("a100", 312e12, 2.039e12, 300e9), "hopper": ("h100", 989e12, 3.35e12, 450e9)}
"""FLOP/s, memory bandwidth and link bandwidth of the GPU whose tables stand for the generation (`hardware`)."""
_FP8: Final = frozenset({"hopper"})
_SMALL_KERNEL_S: Final = 3e-6
"""Shortest kernel: AIConfigurator's constant of each GPU's hardware file."""
_LOAD: Final = "power_law_1.2"
"""How tokens spread over experts: of the table's three, the nearest to what served models show."""
_EXPERT_TABLES: Final = {
    "bf16": ("bfloat16", "", 2.0, 989e12),
    "fp8": ("fp8_block", "", 1.0, 1978e12),
    "fp4": ("w4a16_mxfp4", "gptoss", DTYPE_BYTES["fp4"], 989e12),
}
"""By type: that of the table, a part of the kernel's name, bytes per value, peak FLOP/s.

The table's products with one fp8 scale per tensor are left out: they reach a fifth of the bandwidth of those with a
scale per block, which the models that are published in fp8 use.
"""


_ATTENTION: Final = (
    (pc.field("head_dim") == 128) & (pc.field("window_tokens") == 0) & (pc.field("attn_dtype") == "bfloat16")
)
_DECODES: Final = (pc.field("num_heads") <= 64) & (pc.field("kv_tokens") >= 128) & (pc.field("batch_size") <= 512)


def _columns(name: str, where: Any, *columns: str) -> list[Vector]:
    table = pq.read_table(DATA / "kernels" / f"{name}.parquet").filter(where)
    return [table[column].to_numpy().astype(np.float64) for column in columns]


def _smooth_max(a: Vector, b: Vector) -> Vector:
    return np.asarray((a**4 + b**4) ** 0.25)


def _fit(name: str, predict: Any, measured: Vector, start: list[float]) -> list[float]:
    values = fit_relative(predict, measured, np.array(start))
    errors = np.abs(predict(values) / measured - 1)
    print(f"{name:28} {len(measured):6} rows  mean {errors.mean():5.1%}  median {np.median(errors):5.1%}  {values}")
    return [float(value) for value in values]


def fit_kernels(generation: str) -> Kernels:
    """Fit what kernels reach; prints the error of each table.

    Products of a width and depth of at least 1,024 (those of models from 3B on), up to 8,192 tokens. Attention with 128
    elements per head and full attention, at least 128 tokens; KV reads of at least 1 MB, below which the floor rules.
    """
    gpu, flops, bandwidth, link = _PEAKS[generation]
    gemm = _fit_products(gpu, "bfloat16", flops, bandwidth)
    fp8 = _fit_products(gpu, "fp8", 2 * flops, bandwidth) if generation in _FP8 else [0.0, 0.0, 0.0]
    plain = _ATTENTION & (pc.field("kv_dtype") == "bfloat16")
    batch, tokens, heads, ms = _columns(
        f"{gpu}_sxm_context_attention",
        plain & (pc.field("prompt_tokens") >= 128) & (pc.field("batch_size") * pc.field("prompt_tokens") <= 32768),
        *("batch_size", "prompt_tokens", "num_heads", "latency_ms"),
    )
    prefill = _fit(
        f"{gpu} prefill attention",
        lambda x: x[0] + 4 * heads * 128 * batch * (tokens**2 / 2 + tokens * x[2] / 2) / (flops * x[1]),
        ms / 1e3,
        [1e-5, 0.5, 128.0],
    )
    batch, tokens, heads, ms = _columns(
        f"{gpu}_sxm_generation_attention",
        plain & _DECODES,
        *("batch_size", "kv_tokens", "num_kv_heads", "latency_ms"),
    )
    kv_bytes = batch * tokens * heads * 128 * 2 * 2
    decode = _fit(f"{gpu} decode attention", lambda x: x[0] + kv_bytes / (bandwidth * x[1]), ms / 1e3, [1e-5, 0.7])
    fp8_kv = decode
    if generation in _FP8:
        batch, tokens, heads, ms = _columns(
            f"{gpu}_sxm_generation_attention",
            _ATTENTION & (pc.field("kv_dtype") == "fp8") & _DECODES,
            *("batch_size", "kv_tokens", "num_kv_heads", "latency_ms"),
        )
        fp8_bytes = batch * tokens * heads * 128 * 2
        fp8_kv = _fit(
            f"{gpu} decode attention, fp8 KV",
            lambda x: decode[0] + fp8_bytes / (bandwidth * x[0]),
            ms / 1e3,
            [0.7],
        )
    size, group, ms = _columns(
        f"{gpu}_sxm_allreduce_custom",
        (pc.field("mode") == "graph") & (pc.field("message_bytes") <= 1 << 28) & (pc.field("message_bytes") >= 1 << 12),
        *("message_bytes", "num_gpus", "latency_ms"),
    )
    reduce = _fit(
        f"{gpu} all-reduce",
        lambda x: x[0] + 2 * (group - 1) / group * size / (link * x[1]),
        ms / 1e3,
        [5e-6, 0.7],
    )
    to_all = _fit_all_to_all(gpu, link)
    skew, imbalance, experts = _fit_experts()
    return Kernels(
        gemm_latency_s=gemm[0],
        gemm_bandwidth_share=gemm[1],
        gemm_flops_share=gemm[2],
        prefill_attention_latency_s=prefill[0],
        prefill_attention_share=prefill[1],
        prefill_attention_tile=prefill[2],
        decode_attention_latency_s=decode[0],
        kv_bandwidth_share=decode[1],
        all_reduce_latency_s=reduce[0],
        link_share=reduce[1],
        small_kernel_s=_SMALL_KERNEL_S,
        fp8_kv_bandwidth_share=fp8_kv[-1],
        all_to_all_latency_s=to_all[0],
        all_to_all_share=to_all[1],
        expert_skew=skew,
        expert_imbalance=imbalance,
        experts=experts,
        fp8_gemm_latency_s=fp8[0],
        fp8_gemm_bandwidth_share=fp8[1],
        fp8_gemm_flops_share=fp8[2],
    )


def _fit_all_to_all(gpu: str, link: float) -> list[float]:
    """Return latency and the share of the link; the table's size is that of all a GPU sends, its own part included."""
    size, group, ms = _columns(
        f"{gpu}_sxm_nccl",
        (pc.field("collective") == "alltoall") & (pc.field("message_bytes") >= 1 << 12),
        *("message_bytes", "num_gpus", "latency_ms"),
    )
    return _fit(f"{gpu} all-to-all", lambda x: x[0] + (group - 1) / group * size / (link * x[1]), ms / 1e3, [1e-5, 0.7])


def _fit_experts() -> tuple[float, float, ExpertKernelsByType]:
    """Return skew, imbalance, and the kernels by type of weights.

    Kernels are fitted where experts share the tokens evenly, so that what they touch and compute is known. With them
    held, skew and imbalance are fitted on all types together where tokens follow a power law. Up to 16 groups, slices
    of 128 and wider. A100 has no such table and takes this one.
    """
    kernels, predictions, measured = {}, [], []
    for dtype, (name, kernel, size, flops) in _EXPERT_TABLES.items():
        even = _expert_rows(name, kernel, "balanced")
        predict = partial(_predict_experts, even, size, flops, None)
        found = _fit(f"h100 experts, {dtype}", predict, even[-1], [4e-5, 0.8, 0.6, 30, 1, 1, 1e-5])
        kernels[dtype] = ExpertKernels(
            latency_s=found[0],
            bandwidth_share=found[1],
            flops_share=found[2],
            tile_tokens=found[3],
            row_factor=found[4],
            token_factor=found[5],
            group_latency_s=found[6],
        )
        uneven = _expert_rows(name, kernel, _LOAD)
        predictions.append(partial(_predict_experts, uneven, size, flops, found=np.array(found)))
        measured.append(uneven[-1])
    skew, imbalance = _fit(
        "h100 experts, uneven",
        lambda x: np.concatenate([predict(x) for predict in predictions]),
        np.concatenate(measured),
        [0.8, 0.2],
    )
    return skew, imbalance, ExpertKernelsByType(**kernels)


def _expert_rows(dtype: str, kernel: str, load: str) -> list[Vector]:
    where = (pc.field("dtype") == dtype) & (pc.field("expert_load") == load) & (pc.field("moe_ep_size") <= 16)
    where &= pc.field("moe_tp_size") * 128 <= pc.field("intermediate_size")
    where &= pc.match_substring(pc.field("kernel"), kernel)
    names = ("num_tokens", "hidden_size", "intermediate_size", "top_k", "num_experts", "moe_tp_size", "moe_ep_size")
    *columns, ms = _columns("h100_sxm_moe", where, *names, "latency_ms")
    return [*columns, ms / 1e3]


def _predict_experts(rows: list[Vector], size: float, flops: float, uneven: Vector | None, found: Vector) -> Vector:
    """Return seconds by the formula of `perfmodel.expert_time`; without `uneven` (skew, imbalance) tokens are even."""
    tokens, hidden, width, top_k, num_experts, sliced, groups, _ = rows
    params, bandwidth = 3 * hidden * width / sliced, _PEAKS["hopper"][2]
    if uneven is None:
        touched, fullest = np.minimum(num_experts, tokens * top_k) / groups, np.ones(len(tokens))
    else:
        touched = num_experts / groups * (1 - (1 - top_k / num_experts) ** (uneven[0] * tokens))
        fullest = groups ** uneven[1]
    routed = tokens * top_k / groups
    reading = touched * params * size / (bandwidth * found[1])
    computing = 2 * (routed * fullest + touched * found[3]) * params / (flops * found[2])
    moving = (4 * routed * found[4] + 2 * tokens * found[5]) * 2 * hidden / bandwidth
    return np.asarray(found[0] + (groups > 1) * found[6] + _smooth_max(reading, computing) + moving)


def _fit_products(gpu: str, dtype: str, flops: float, bandwidth: float) -> list[float]:
    """Return latency and the shares of bandwidth and FLOP/s."""
    m, n, k, ms = _columns(
        f"{gpu}_sxm_gemm",
        (pc.field("dtype") == dtype) & (pc.field("n") >= 1024) & (pc.field("k") >= 1024) & (pc.field("m") <= 8192),
        *("m", "n", "k", "latency_ms"),
    )
    size, start = 2, [3e-6, 0.7, 0.7]
    input_s = np.zeros(len(m))
    if dtype == "fp8":
        # The table's products convert their input, in kernels of their own: 2 bytes per value are read and 1 written,
        # by a fitted multiple of that. What engines do instead is the model's (`roofline._converted_width`).
        size, start = 1, [*start, 1.0]
        input_s = 3 * m * k / bandwidth

    def predict(x: Vector) -> Vector:
        products = _smooth_max(size * n * k / (bandwidth * x[1]), 2 * m * n * k / (flops * x[2]))
        return np.asarray(x[0] + products + (_SMALL_KERNEL_S + x[3] * input_s if dtype == "fp8" else 0.0))

    return _fit(f"{gpu} products, {dtype}", predict, ms / 1e3, start)


def main() -> None:
    """Fit one part and write it into the package's sources; engines need the kernels of an earlier run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["kernels", "engines"])
    part = parser.parse_args().part
    path = Path(expediter.perfmodel.__path__[0]) / "constants.json"
    content = msgspec.json.decode(path.read_bytes())
    content["sources"] = SOURCES
    if part == "kernels":
        content["kernels"] = {generation: asdict(fit_kernels(generation)) for generation in _PEAKS}
    else:
        content["engines"] = {}
        for name, dataset in DATASETS.items():
            rows = [row.measurement for row in dataset.rows()]
            engine = fit_engine(rows, dataset.free)
            content["engines"][name] = asdict(engine)
            print(f"{name:12} {len(rows):4} rows  {engine}")
    path.write_text(json.dumps(_rounded(content), indent=2) + "\n")


def _rounded(content: Any) -> Any:
    """Return the same with four significant digits: more would pretend to be known."""
    if isinstance(content, dict):
        return {key: _rounded(value) for key, value in content.items()}
    return float(f"{content:.4g}") if isinstance(content, float) else content


if __name__ == "__main__":
    main()
