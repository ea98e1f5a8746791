"""Measured step times: what one is, and the files that hold one's own."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Final

import msgspec

from expediter.core.errors import ConfigurationError
from expediter.core.plan import StepFeatures
from expediter.perfmodel.dimensions import ModelShape
from expediter.perfmodel.hardware import Gpu, gpu_named
from expediter.perfmodel.parallelism import Parallelism
from expediter.perfmodel.shapes import shape_named

_MAX_STEPS: Final = 2000
"""Steps of a log that are used; more are thinned out evenly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A step, or several, whose weighted sum of durations was measured.

    Args:
        parallelism: how the GPUs shared the model.
        parts: (weight, step) pairs; one pair of weight 1 for the time of a single step.
        time_s: the sum, above 0.
    """

    shape: ModelShape
    gpu: Gpu
    parallelism: Parallelism
    parts: tuple[tuple[float, StepFeatures], ...]
    time_s: float


def prefill_step(prompt_tokens: int, batch_size: int) -> StepFeatures:
    """Return the step that prefills `batch_size` prompts of so many tokens whole."""
    return StepFeatures(prompt_tokens * batch_size, batch_size, 0, 0, batch_size * prompt_tokens**2 / 2)


def decode_step(context_tokens: int, batch_size: int) -> StepFeatures:
    """Return the step in which `batch_size` sequences decode over so many KV tokens each, the new one included."""
    return StepFeatures(batch_size, batch_size, batch_size, batch_size * context_tokens, 0.0)


def read_measurements(path: Path) -> list[Measurement]:
    """Read measured steps from a CSV, or from a JSON file (`.json`) made of a live server's answer to `GET /steps`.

    The CSV has the columns model, gpu, tensor_parallel, phase, tokens, batch_size and time_ms, and may have
    pipeline_parallel and expert_parallel. `phase` is prefill (`tokens` per prompt) or decode (`tokens` of context per
    sequence, the new one included); `time_ms` is that of one step of the whole batch. The JSON holds the server's
    `steps`, and beside them the same model, gpu and sizes, once for all steps.

    Raises:
        ConfigurationError: the file cannot be read, a column or field is missing, or a line or step is wrong; the
            message names it.
    """
    rows = _read_log(path) if path.suffix == ".json" else _read_csv(path)
    if not rows:
        raise ConfigurationError(f"{path} holds no measurements")
    return rows


_COLUMNS: Final = ("model", "gpu", "tensor_parallel", "phase", "tokens", "batch_size", "time_ms")


def _read_csv(path: Path) -> list[Measurement]:
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise ConfigurationError(f"{path}, line 1: no column {', '.join(missing)}")
            rows = []
            for row in reader:
                try:
                    rows.append(_measurement(row))
                except (ValueError, TypeError, ConfigurationError) as error:
                    raise ConfigurationError(f"{path}, line {reader.line_num}: {error}") from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error
    return rows


def _measurement(row: Mapping[str, str]) -> Measurement:
    tokens, batch_size, time_ms = int(row["tokens"]), int(row["batch_size"]), float(row["time_ms"])
    if tokens < 1 or batch_size < 1 or not 0 < time_ms < float("inf"):
        raise ValueError("tokens and batch_size must be at least 1, and time_ms above 0")
    if row["phase"] not in {"prefill", "decode"}:
        raise ValueError(f"phase must be prefill or decode, not {row['phase']!r}")
    step = (prefill_step if row["phase"] == "prefill" else decode_step)(tokens, batch_size)
    shape, gpu, parallelism = _replica_of(row["model"], row["gpu"], row)
    return Measurement(shape=shape, gpu=gpu, parallelism=parallelism, parts=((1.0, step),), time_s=time_ms / 1e3)


def _replica_of(model: str, gpu_name: str, sizes: Mapping[str, Any]) -> tuple[ModelShape, Gpu, Parallelism]:
    shape, gpu = shape_named(model), gpu_named(gpu_name)
    parallelism = Parallelism(
        tensor=int(sizes.get("tensor_parallel") or 1),
        pipeline=int(sizes.get("pipeline_parallel") or 1),
        expert=int(sizes.get("expert_parallel") or 1),
    )
    parallelism.check(shape, gpu)
    return shape, gpu, parallelism


class _Step(msgspec.Struct):
    num_tokens: int
    num_seqs: int
    num_decodes: int
    decode_context_tokens: int
    prefill_attention: float
    elapsed_s: float


class _Log(msgspec.Struct):
    model: str
    gpu: str
    steps: list[_Step]
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1


def _read_log(path: Path) -> list[Measurement]:
    try:
        log = msgspec.json.decode(path.read_bytes(), type=_Log)
        shape, gpu, parallelism = _replica_of(log.model, log.gpu, msgspec.structs.asdict(log))
    except (OSError, msgspec.DecodeError, ConfigurationError) as error:
        raise ConfigurationError(f"{path} cannot be used: {error}") from error
    rows = []
    for number in range(0, len(log.steps), max(1, -(-len(log.steps) // _MAX_STEPS))):
        step = log.steps[number]
        if step.num_tokens < 1 or not 0 <= step.num_decodes <= step.num_tokens or not step.num_seqs >= 1:
            raise ConfigurationError(f"{path}, step {number}: counts that no step has")
        if not (isfinite(step.elapsed_s) and step.elapsed_s > 0):
            raise ConfigurationError(f"{path}, step {number}: elapsed_s must be above 0, not {step.elapsed_s}")
        features = StepFeatures(
            step.num_tokens, step.num_seqs, step.num_decodes, step.decode_context_tokens, step.prefill_attention
        )
        rows.append(
            Measurement(shape=shape, gpu=gpu, parallelism=parallelism, parts=((1.0, features),), time_s=step.elapsed_s)
        )
    return rows
