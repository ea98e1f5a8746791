"""Shapes of dense decoder models: what their weights and KV weigh and how much they compute.

The built-in shapes are the public config.json files of the models; any local Hugging Face folder works too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec

from expediter.core.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Dimensions of a dense transformer decoder; one attention and one feed-forward block per layer.

    Args:
        num_layers: transformer layers.
        hidden_size: width of the residual stream, in elements.
        num_heads: query heads per layer.
        num_kv_heads: key and value heads per layer; below `num_heads` with grouped queries.
        head_dim: elements per head.
        intermediate_size: width of the feed-forward block, in elements.
        vocab_size: tokens.
        gated: the feed-forward block has a gate (three matrices instead of two).
        tied: the output head is the embedding table.
        bytes_per_value: of weights, KV and activations; 2 for bfloat16 and float16.
        fp8_weights: matrices of the layers are kept and multiplied in fp8; the rest is not.
    Raises:
        ConfigurationError: a dimension is below 1, or the heads do not form whole groups.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    gated: bool = True
    tied: bool = False
    bytes_per_value: int = 2
    fp8_weights: bool = False

    def __post_init__(self) -> None:
        for field in (
            "num_layers",
            "hidden_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "intermediate_size",
            "vocab_size",
            "bytes_per_value",
        ):
            if getattr(self, field) < 1:
                raise ConfigurationError(f"model {self.name}: {field} must be at least 1, not {getattr(self, field)}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigurationError(
                f"model {self.name}: {self.num_heads} heads do not divide into {self.num_kv_heads} groups"
            )

    @property
    def num_layer_params(self) -> int:
        """Parameters of all layers that every token is multiplied with; norms and biases left out (below 0.1 %)."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        feed_forward = (3 if self.gated else 2) * self.hidden_size * self.intermediate_size
        return self.num_layers * (attention + feed_forward)

    @property
    def num_head_params(self) -> int:
        """Parameters of the output head, which only sampled tokens are multiplied with."""
        return self.vocab_size * self.hidden_size

    @property
    def num_params(self) -> int:
        """All parameters, the embedding table included."""
        return self.num_layer_params + self.num_head_params * (1 if self.tied else 2)

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights, over all GPUs together."""
        return self.layer_weight_bytes + (self.num_params - self.num_layer_params) * self.bytes_per_value

    @property
    def layer_weight_bytes(self) -> int:
        """Memory of the layers' matrices, over all GPUs together."""
        return self.num_layer_params * (1 if self.fp8_weights else self.bytes_per_value)

    @property
    def kv_bytes_per_token(self) -> int:
        """KV of one token over all layers: 2 * layers * KV heads * head size * bytes."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.bytes_per_value

    def check_tensor_parallel(self, tensor_parallel: int) -> None:
        """Raise ConfigurationError unless the heads divide among so many GPUs.

        KV heads may be fewer than GPUs: each then holds a copy of one.
        """
        if tensor_parallel < 1:
            raise ConfigurationError(f"tensor parallel size must be at least 1, not {tensor_parallel}")
        if not self.divides_among(tensor_parallel):
            fitting = [n for n in range(1, 9) if self.divides_among(n)]
            raise ConfigurationError(
                f"model {self.name} has {self.num_heads} heads and {self.num_kv_heads} KV heads, which "
                f"{tensor_parallel} GPUs cannot share evenly; possible are: {', '.join(map(str, fitting))}"
            )

    def kv_bytes_per_token_on_gpu(self, tensor_parallel: int) -> int:
        """KV of one token on each of `tensor_parallel` GPUs; KV heads are copied where there are more GPUs."""
        heads = max(1, self.num_kv_heads // tensor_parallel)
        return self.kv_bytes_per_token // self.num_kv_heads * heads

    def divides_among(self, num_gpus: int) -> bool:
        """Return whether query heads divide among the GPUs, and KV heads divide or are copied evenly."""
        if self.num_heads % num_gpus:
            return False
        return self.num_kv_heads % num_gpus == 0 or num_gpus % self.num_kv_heads == 0


_SHAPES: Final = {
    shape.name: shape
    for shape in (
        ModelShape(
            name="llama-2-7b",
            num_layers=32,
            hidden_size=4096,
            num_heads=32,
            num_kv_heads=32,
            head_dim=128,
            intermediate_size=11008,
            vocab_size=32000,
        ),
        ModelShape(
            name="llama-2-70b",
            num_layers=80,
            hidden_size=8192,
            num_heads=64,
            num_kv_heads=8,
            head_dim=128,
            intermediate_size=28672,
            vocab_size=32000,
        ),
        ModelShape(
            name="llama-3.1-8b",
            num_layers=32,
            hidden_size=4096,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            intermediate_size=14336,
            vocab_size=128256,
        ),
        ModelShape(
            name="llama-3.1-70b",
            num_layers=80,
            hidden_size=8192,
            num_heads=64,
            num_kv_heads=8,
            head_dim=128,
            intermediate_size=28672,
            vocab_size=128256,
        ),
        ModelShape(
            name="llama-3.1-405b",
            num_layers=126,
            hidden_size=16384,
            num_heads=128,
            num_kv_heads=8,
            head_dim=128,
            intermediate_size=53248,
            vocab_size=128256,
        ),
        ModelShape(
            name="qwen3-8b",
            num_layers=36,
            hidden_size=4096,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            intermediate_size=12288,
            vocab_size=151936,
        ),
        ModelShape(
            name="qwen3-32b",
            num_layers=64,
            hidden_size=5120,
            num_heads=64,
            num_kv_heads=8,
            head_dim=128,
            intermediate_size=25600,
            vocab_size=151936,
        ),
        ModelShape(
            name="opt-13b",
            num_layers=40,
            hidden_size=5120,
            num_heads=40,
            num_kv_heads=40,
            head_dim=128,
            intermediate_size=20480,
            vocab_size=50272,
            gated=False,
            tied=True,
        ),
        ModelShape(
            name="opt-66b",
            num_layers=64,
            hidden_size=9216,
            num_heads=72,
            num_kv_heads=72,
            head_dim=128,
            intermediate_size=36864,
            vocab_size=50272,
            gated=False,
            tied=True,
        ),
        ModelShape(
            name="bloom-176b",
            num_layers=70,
            hidden_size=14336,
            num_heads=112,
            num_kv_heads=112,
            head_dim=128,
            intermediate_size=57344,
            vocab_size=250880,
            gated=False,
            tied=True,
        ),
        ModelShape(
            name="smollm2-135m",
            num_layers=30,
            hidden_size=576,
            num_heads=9,
            num_kv_heads=3,
            head_dim=64,
            intermediate_size=1536,
            vocab_size=49152,
            tied=True,
        ),
    )
}
_FP8: Final = "-fp8"
SHAPE_NAMES: Final = tuple(sorted(_SHAPES))


def shape_named(name: str) -> ModelShape:
    """Return a built-in shape, or the shape of the Hugging Face folder (or config.json) at that path.

    A built-in name followed by -fp8 is that model with `fp8_weights`.

    Raises:
        ConfigurationError: neither exists (the message lists the built-in ones), or the folder holds no model that the
            shape can describe.
    """
    if name in _SHAPES:
        return _SHAPES[name]
    if name.removesuffix(_FP8) in _SHAPES:
        return replace(_SHAPES[name.removesuffix(_FP8)], name=name, fp8_weights=True)
    path = Path(name)
    config = path / "config.json" if path.is_dir() else path
    if config.is_file():
        return shape_from_config(config)
    raise ConfigurationError(
        f"no model shape {name!r}; there are: {', '.join(SHAPE_NAMES)}, each also with {_FP8} at its end; "
        "or name a folder with a Hugging Face config.json"
    )


class _Quantization(msgspec.Struct):
    quant_method: str = ""


class _Config(msgspec.Struct):
    """The fields of a Hugging Face config.json that the shape needs; both names where families differ."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    vocab_size: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    ffn_dim: int | None = None  # OPT
    tie_word_embeddings: bool | None = None
    num_experts: int | None = None  # Qwen-MoE
    num_local_experts: int | None = None  # Mixtral
    n_routed_experts: int | None = None  # DeepSeek
    dtype: str | None = None
    torch_dtype: str | None = None
    quantization_config: _Quantization | None = None
    model_type: str = ""


_BYTES: Final = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}


def shape_from_config(path: Path) -> ModelShape:
    """Return the shape that a Hugging Face config.json describes; its name is that of the folder.

    Raises:
        ConfigurationError: the file is not such a config, or the model is a mixture of experts.
    """
    try:
        config = msgspec.json.decode(path.read_bytes(), type=_Config)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigurationError(f"{path} does not describe a decoder model: {error}") from error
    if any(n is not None and n > 1 for n in (config.num_experts, config.num_local_experts, config.n_routed_experts)):
        raise ConfigurationError(f"{path}: mixtures of experts are not modelled")
    intermediate = config.intermediate_size or config.ffn_dim
    if intermediate is None:
        raise ConfigurationError(f"{path}: neither intermediate_size nor ffn_dim is given")
    gated = config.ffn_dim is None and config.model_type not in {"opt", "gpt_neox", "phi", "gpt2", "starcoder2"}
    tied = config.model_type == "opt" if config.tie_word_embeddings is None else config.tie_word_embeddings
    return ModelShape(
        name=path.resolve().parent.name,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=config.head_dim or config.hidden_size // max(config.num_attention_heads, 1),
        intermediate_size=intermediate,
        vocab_size=config.vocab_size,
        gated=gated,
        tied=tied,
        fp8_weights=config.quantization_config is not None and config.quantization_config.quant_method == "fp8",
        bytes_per_value=_BYTES.get(config.dtype or config.torch_dtype or "bfloat16", 2),
    )
