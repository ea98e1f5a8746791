"""Published step and serving times that `benchmarks.fidelity` compares with; the tables are not part of the repository.

`EXPEDITER_PERF_DATA` names the folder that holds them; without it, `shared/data/perf` beside the repository.
"""

from __future__ import annotations

import csv
import gzip
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final

from expediter.core.plan import StepFeatures
from expediter.perfmodel.hardware import gpu_named
from expediter.perfmodel.measurements import Measurement, decode_step, prefill_step
from expediter.perfmodel.parallelism import Parallelism
from expediter.perfmodel.shapes import shape_named

DATA: Final = Path(
    os.environ.get("EXPEDITER_PERF_DATA", Path(__file__).resolve().parents[2] / "shared" / "data" / "perf")
)
SOURCES: Final = [
    {
        "used_for": "kernels; engines vllm, trtllm and sglang",
        "repository": "ai-dynamo/aiconfigurator",
        "commit": "095f58a51c4ca8e61b66ec108d86f223f8d559ce",
        "licence": "Apache-2.0",
        "attribution": "AIConfigurator, Copyright (c) 2025-2026 NVIDIA CORPORATION & AFFILIATES",
        "changes": "constants fitted to its tables; no table is included",
    },
    {
        "used_for": "engines eager-a100 and eager-h100",
        "repository": "Mutinifni/splitwise-sim",
        "commit": "8f99e7dc9b407f4ce2488d03dd44c0b8b946dab0",
        "licence": "MIT",
        "attribution": "SplitwiseSim, Copyright (c) 2024 Pratyush Patel",
        "changes": "constants fitted to its measurements; no measurement is included",
    },
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelled:
    """A measurement with what the splits go by.

    Args:
        kind: prefill or decode.
        prompt: prompt tokens of each sequence.
        batch: sequences, or concurrent requests.
        model: of the measured rows.
    """

    kind: str
    model: str
    tensor_parallel: int
    prompt: int
    batch: int
    measurement: Measurement


_SPLITWISE_GPUS: Final = {"a100-80gb": "a100-80g", "h100-80gb": "h100"}
_SPLITWISE_MODELS: Final = {"llama2-70b": "llama-2-70b", "bloom-176b": "bloom-176b"}


def splitwise(gpu: str) -> list[Labelled]:
    """Return SplitwiseSim's medians on a GPU: a prefill per (model, GPUs, prompt, batch), a decode per row.

    The power-capped H100 is left out (its rows are computed from the others), and so is batch 64 on two GPUs (faster
    than batch 32: it did not run as one). Rows that differ in output length only share one prefill, their median.
    A decode's context is the prompt and half of the output.
    """
    labelled, prefills = [], defaultdict(list)
    with (DATA / "splitwise_medians.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            prompt, batch, output, n = (
                int(row[name]) for name in ("prompt_tokens", "batch_size", "output_tokens", "tensor_parallel")
            )
            if _SPLITWISE_GPUS.get(row["hardware"]) != gpu or (n == 2 and batch == 64):
                continue
            prefills[row["model"], n, prompt, batch].append(float(row["prefill_ms"]))
            step = decode_step(prompt + output // 2, batch)
            labelled.append(
                _labelled("decode", row["model"], gpu, n, prompt, batch, step, float(row["decode_ms_per_token"]))
            )
    for (model, n, prompt, batch), times in prefills.items():
        step = prefill_step(prompt, batch)
        labelled.append(_labelled("prefill", model, gpu, n, prompt, batch, step, median(times)))
    return labelled


def _labelled(
    kind: str, model: str, gpu: str, n: int, prompt: int, batch: int, step: StepFeatures, ms: float
) -> Labelled:
    measurement = Measurement(
        shape=shape_named(_SPLITWISE_MODELS[model]),
        gpu=gpu_named(gpu),
        parallelism=Parallelism(tensor=n),
        parts=((1.0, step),),
        time_s=ms / 1e3,
    )
    return Labelled(kind=kind, model=model, tensor_parallel=n, prompt=prompt, batch=batch, measurement=measurement)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Rows of one engine and model in AIConfigurator's table of served requests on H100.

    Args:
        version: how the engine's version begins.
        model: end of the model's path there.
        shape: of ours, by name.
        mode: of the table's matrix products; empty where nothing is quantized.
    """

    backend: str
    model: str
    shape: str
    version: str = ""
    mode: str = ""


_VLLM: Final = Served(backend="vllm", version="0.12", model="Qwen3-32B", shape="qwen3-32b")
_TRTLLM: Final = Served(backend="trtllm", model="Llama-3.1-8B-Instruct", shape="llama-3.1-8b")
_SGLANG: Final = Served(backend="sglang", model="Qwen3-32B", shape="qwen3-32b")
_VLLM_70B: Final = Served(backend="vllm", model="Llama-3.1-70B", shape="llama-3.1-70b-fp8", mode="fp8")
"""vLLM's three rows of Qwen3-32B in fp8 are left out: their tokens come faster than weights and bfloat16 KV of that
load can be read at peak bandwidth."""
_TRTLLM_32B: Final = Served(backend="trtllm", model="Qwen3-32B", shape="qwen3-32b-fp8", mode="fp8")
_TRTLLM_MOE: Final = Served(
    backend="trtllm", version="1.0", model="Qwen3-235B-A22B-FP8", shape="qwen3-235b-a22b-fp8", mode="fp8_block"
)
_MINIMAX: Final = Served(backend="vllm", version="0.18", model="MiniMax-M2.5", shape="minimax-m2", mode="fp8")
_GPT_OSS: Final = Served(backend="vllm", version="0.18", model="gpt-oss-120b", shape="gpt-oss-120b", mode="nvfp4")
"""The table says nvfp4; H100 has no such units, and the model's experts are published in MXFP4."""
_BUDGET: Final = 8192
"""Tokens of a step that the engines' defaults allow on H100; longer prompts come in chunks."""
_QUEUED: Final = 2.0
"""Requests wait for memory, not for steps, where the first token takes more than this many seconds, and as many per
1,024 tokens of prompt more."""
_HARDLY_QUEUED: Final = 4
"""Most requests at a time whose first tokens are not ruled by queueing."""


def served(*sources: Served) -> list[Labelled]:
    """Return the time per output token of an engine on H100 under a fixed number of requests (AIConfigurator's table).

    Kept: one engine for prefill and decode, no data-parallel attention.
    Left out: concurrency whose KV does not fit (the first token takes seconds; fewer run than the row says), and rows
    that repeat another.

    From a request's arrival to its end, as long as it takes to its first token and for the others, each of the
    concurrent requests is prefilled once, whoever waits for whom, so that
    TTFT + (osl - 1) * TPOT = osl * decode + concurrency * (mixed step - decode).
    """
    labelled = []
    for source in sources:
        for row in _served_rows(source):
            prompt, output, batch = (int(float(row[name])) for name in ("isl", "osl", "batch_size"))
            if float(row["silicon_ttft_ms"]) / 1e3 <= _QUEUED * (1 + prompt / 1024):
                kind = "prefill" if (batch - 1) * prompt / output > 256 else "decode"
                parts = _served_steps(prompt, output, batch)
                ms = float(row["silicon_ttft_ms"]) / output + float(row["silicon_tpot_ms"]) * (1 - 1 / output)
                labelled.append(_labelled_row(row, source, kind, parts, ms))
    return labelled


def first_tokens() -> list[Labelled]:
    """Return times to first token that are not ruled by queueing: vLLM, Llama-3.1-70B in fp8, four requests at a time.

    All other rows of one engine have more requests at a time. A first token takes the rest of a decode step, half of it
    on average, and a step with the prompt and the other requests' decodes.
    """
    labelled = []
    for row in _served_rows(_VLLM_70B):
        prompt, output, batch = (int(float(row[name])) for name in ("isl", "osl", "batch_size"))
        if batch <= _HARDLY_QUEUED:
            context = prompt + output // 2
            mixed = StepFeatures(
                num_tokens=prompt + batch - 1,
                num_seqs=batch,
                num_decodes=batch - 1,
                decode_context_tokens=(batch - 1) * context,
                prefill_attention=prompt**2 / 2,
            )
            parts = ((0.5, decode_step(context, batch - 1)), (1.0, mixed))
            labelled.append(_labelled_row(row, _VLLM_70B, "prefill", parts, float(row["silicon_ttft_ms"])))
    return labelled


_LABELS: Final = ("id", "silicon_data_source")
"""Columns by which rows differ that say the same."""


def _served_rows(source: Served) -> Iterator[dict[str, str]]:
    seen = set()
    with gzip.open(DATA / "silicon_h100.csv.gz", "rt", newline="") as file:
        for row in csv.DictReader(file):
            if row["backend"] != source.backend or not row["backend_version"].startswith(source.version):
                continue
            if not row["model_path"].endswith(source.model) or row["gemm_quant_mode"] != source.mode:
                continue
            if row["mode"] != "agg" or not {row["pp_size"], row["attention_dp_size"]} <= {"", "1.0"}:
                continue
            key = tuple(value for name, value in row.items() if name not in _LABELS)
            if key not in seen:
                seen.add(key)
                yield row


def _labelled_row(
    row: dict[str, str], source: Served, kind: str, parts: tuple[tuple[float, StepFeatures], ...], ms: float
) -> Labelled:
    prompt, batch, n = (int(float(row[name])) for name in ("isl", "batch_size", "tp_size"))
    measurement = Measurement(
        shape=shape_named(source.shape),
        gpu=gpu_named("h100"),
        parallelism=Parallelism(tensor=n, expert=max(1, int(float(row["moe_ep_size"] or 1)))),
        parts=parts,
        time_s=ms / 1e3,
    )
    return Labelled(
        kind=kind, model=row["model_path"], tensor_parallel=n, prompt=prompt, batch=batch, measurement=measurement
    )


def _served_steps(prompt: int, output: int, batch: int) -> tuple[tuple[float, StepFeatures], ...]:
    """Return the weighted steps of one output token; prompts are packed into steps of up to `_BUDGET` tokens."""
    context = prompt + output // 2
    decode = decode_step(context, batch)
    packed = max(1.0, min(_BUDGET // prompt, batch / output))
    others = batch - 1
    mixed = StepFeatures(
        num_tokens=others + round(packed * prompt),
        num_seqs=batch,
        num_decodes=others,
        decode_context_tokens=others * context,
        prefill_attention=packed * prompt * prompt / 2,
    )
    share = batch / packed / output
    return ((1.0 - share, decode), (share, mixed))


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Measurements of one engine on one machine.

    Args:
        free: constants of the engine that they determine.
        other: further measurements of the same engine, which its constants are not fitted to, by what they are of.
    """

    rows: Callable[[], list[Labelled]]
    free: tuple[str, ...]
    other: Mapping[str, Callable[[], list[Labelled]]] = field(default_factory=dict)


_EAGER: Final = (
    "worker_s",
    "seq_s",
    "decode_launch_s",
    "prefill_launch_s",
    "compute_factor",
    "memory_factor",
    "all_reduce_factor",
    "bulk_all_reduce_factor",
)
_GRAPH: Final = ("step_s", "prefill_step_s", "seq_s", "compute_factor", "all_reduce_factor")

DATASETS: Final = {
    "eager-a100": Dataset(rows=partial(splitwise, "a100-80g"), free=_EAGER),
    "eager-h100": Dataset(rows=partial(splitwise, "h100"), free=_EAGER),
    "vllm": Dataset(
        rows=partial(served, _VLLM),
        free=_GRAPH,
        other={
            "qwen3-32b -> llama-3.1-70b in fp8": partial(served, _VLLM_70B),
            "the same -> first tokens": first_tokens,
        },
    ),
    "vllm-0.18": Dataset(
        rows=partial(served, _MINIMAX, _GPT_OSS), free=tuple(name for name in _GRAPH if name != "prefill_step_s")
    ),
    "trtllm": Dataset(
        rows=partial(served, _TRTLLM),
        free=_GRAPH,
        other={
            "llama-3.1-8b -> qwen3-32b in fp8": partial(served, _TRTLLM_32B),
            "llama-3.1-8b -> qwen3-235b-a22b in fp8": partial(served, _TRTLLM_MOE),
        },
    ),
    "sglang": Dataset(rows=partial(served, _SGLANG), free=_GRAPH),
}
"""By engine of `constants.json`."""
