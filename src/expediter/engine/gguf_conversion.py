"""`python -m expediter.engine.gguf_conversion FILE FOLDER`: a GGUF file becomes a Hugging Face folder in float32.

Run as a process of its own by `default_model`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

_NOT_OF_THE_MODEL = ("quantization_config", "_name_or_path", "transformers_version", "architectures", "dtype")


def convert(gguf: Path, folder: Path) -> None:
    """Write config, weights (safetensors), tokenizer and chat template of `gguf` into a new folder."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    quantized = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, local_files_only=True, dtype=torch.float32
    )
    # The loaded model remembers that it was quantized and refuses to be saved; its weights are plain float32.
    fields = {name: value for name, value in quantized.config.to_dict().items() if name not in _NOT_OF_THE_MODEL}
    config = AutoConfig.for_model(**fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]  # theirs
    model.load_state_dict(quantized.state_dict())
    model.generation_config.eos_token_id = config.eos_token_id
    model.generation_config.pad_token_id = config.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
