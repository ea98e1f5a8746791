"""From a model folder to an executor: weights, device, and how large the KV cache may be."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from expediter.core.errors import ConfigurationError
from expediter.core.ranges import require_at_least, require_not_negative
from expediter.engine.executor import TorchExecutor
from expediter.engine.kv_pool import KVShape
from expediter.engine.structured import CompiledGrammars, GrammarCompiler

_DTYPES: Final = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16}
_CPU_KV_CACHE_BYTES: Final = 1 << 30
_CUDA_MEMORY_SHARE: Final = 0.9
"""Of the device's memory, for weights and KV together; the rest is for activations (vLLM's default share)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How one replica's model is loaded.

    Args:
        model: folder with config.json and safetensors, as `resolve_model` returns it.
        dtype: "auto" (the folder's own), "float32" or "bfloat16"; of weights and KV cache.
        device: "auto" (CUDA if there is one, else CPU), "cpu", "cuda" or "cuda:N".
        block_size: tokens per KV block.
        num_blocks: of the KV cache; takes precedence over `kv_cache_bytes`.
        kv_cache_bytes: memory for the KV cache. Without either: 1 GiB on CPU, 90 % of the device less what is in use on
            CUDA, and never more than `max_num_seqs` longest sequences need.
        swap_space_bytes: host memory for the KV of preempted requests.
        max_num_seqs: slots.
        max_model_len: longest sequence in tokens; None for the model's own.
        num_threads: of torch in this process; None leaves it as it is.
        seed: source of the seeds of requests that bring none.
    Raises:
        ConfigurationError: a value is out of range.
    """

    model: Path
    dtype: str = "auto"
    device: str = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_bytes: int | None = None
    swap_space_bytes: int = 0
    max_num_seqs: int = 256
    max_model_len: int | None = None
    num_threads: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ConfigurationError(f"no dtype {self.dtype!r}; there are {', '.join(_DTYPES)}")
        require_at_least(1, self, "block_size", "num_blocks", "kv_cache_bytes")
        require_at_least(1, self, "max_num_seqs", "max_model_len", "num_threads")
        require_not_negative(self, "swap_space_bytes")


def load_executor(config: EngineConfig) -> TorchExecutor:
    """Load the model and make its executor.

    Raises:
        ConfigurationError: the folder, the device or the sizes cannot be used.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    model = load_model(config.model, dtype=config.dtype, device=config.device)
    shape = KVShape.of_config(model.config, model.dtype)
    return TorchExecutor(
        model,
        num_blocks=config.num_blocks or _num_blocks(config, model, shape),
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        seed=config.seed,
        num_host_blocks=config.swap_space_bytes // shape.bytes_per_block(config.block_size),
        grammars=CompiledGrammars(lambda: GrammarCompiler.of_folder(config.model)),
    )


def load_model(folder: Path, *, dtype: str = "auto", device: str = "auto") -> PreTrainedModel:
    """Load a causal language model from safetensors, in evaluation mode; runs no code from the folder.

    Raises:
        ConfigurationError: the folder or the device cannot be used.
    """
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # theirs
    target = _device(device)
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=_DTYPES[dtype], local_files_only=True, use_safetensors=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigurationError(f"{folder} cannot be loaded as a causal language model: {error}") from error
    model.train(False)
    model.to(target)  # type: ignore[arg-type]  # a decorator hides the argument's type
    return model


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigurationError(f"no device {name!r}; there are cpu, cuda and cuda:N") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigurationError(f"no device {name!r}: torch sees {torch.cuda.device_count()} CUDA devices")
    return device


def _num_blocks(config: EngineConfig, model: PreTrainedModel, shape: KVShape) -> int:
    if config.kv_cache_bytes is not None:
        return shape.num_blocks(config.kv_cache_bytes, config.block_size)
    num_bytes = _CPU_KV_CACHE_BYTES
    if model.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(model.device)
        num_bytes = int(_CUDA_MEMORY_SHARE * total) - (total - free)
    fitting = shape.num_blocks(num_bytes, config.block_size)
    longest = config.max_model_len or getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest is None:
        return fitting
    return min(fitting, config.max_num_seqs * -(-longest // config.block_size))
