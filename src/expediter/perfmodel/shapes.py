"""Model shapes from Hugging Face config.json files, and the catalogue of common models, which holds such files' fields.

Families name the same thing differently; what their fields mean is from the configuration classes of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Final

import msgspec

from expediter.core.errors import ConfigurationError
from expediter.perfmodel.dimensions import Experts, LatentAttention, ModelShape

_CATALOGUE: Final = "models.json"
_QUANTIZED: Final = ("fp8", "fp4")


@cache
def _catalogue() -> dict[str, dict[str, Any]]:
    data = resources.files("expediter.perfmodel").joinpath(_CATALOGUE).read_bytes()
    return msgspec.json.decode(data, type=dict[str, dict[str, Any]])


SHAPE_NAMES: Final = tuple(sorted(_catalogue()))
"""Names of the catalogue."""


@cache
def _known_shape(name: str) -> ModelShape:
    return _Fields(_catalogue()[name], f"catalogue entry {name}").shape(name)


def shape_named(name: str) -> ModelShape:
    """Return a shape of the catalogue, or that of the Hugging Face folder (or config.json) at that path.

    A name of the catalogue followed by -fp8 or -fp4 is that model with such weights.

    Raises:
        ConfigurationError: neither exists (the message lists the catalogue), or the folder holds no model that a shape
            can describe.
    """
    known = _catalogue()
    if name in known:
        return _known_shape(name)
    base, _, dtype = name.rpartition("-")
    if base in known and dtype in _QUANTIZED:
        return replace(_known_shape(base).with_dtypes(weights=dtype), name=name)
    path = Path(name)
    config = path / "config.json" if path.is_dir() else path
    if config.is_file():
        return shape_from_config(config)
    raise ConfigurationError(
        f"no model shape {name!r}; there are: {', '.join(SHAPE_NAMES)}, each also with -fp8 or -fp4 at its end; "
        "or name a folder with a Hugging Face config.json"
    )


def shape_from_config(path: Path) -> ModelShape:
    """Return the shape that a Hugging Face config.json describes; its name is that of the folder.

    Raises:
        ConfigurationError: the file is not such a config, or its architecture is not one that a shape can describe; the
            message names the field.
    """
    try:
        config = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigurationError(f"{path} does not describe a decoder model: {error}") from error
    return _Fields(config, str(path)).shape(path.resolve().parent.name)


_ALIASES: Final = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "hidden_size": ("n_embd", "n_embed", "d_model"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv"),
    "intermediate_size": ("ffn_dim", "n_inner", "ffn_hidden_size"),
    "num_experts": ("num_local_experts", "n_routed_experts"),
    "num_experts_per_tok": ("experts_per_token",),
    "torch_dtype": ("dtype",),
}
_FOURFOLD: Final = frozenset({"bloom", "gpt2", "gpt_bigcode", "falcon", "mpt", "gptj", "codegen"})
"""Families whose feed-forward block is four times as wide as the residual stream where no width is given."""
_PLAIN: Final = _FOURFOLD | {"opt", "gpt_neox", "phi", "starcoder2", "nemotron"}
"""Families without a gate."""
_TIED: Final = frozenset(
    {"opt", "bloom", "gpt2", "gpt_bigcode", "falcon", "gemma", "gemma2", "gemma3", "gemma3_text", "mpt"}
)
"""Families whose output head is the embedding table where the file does not say."""
_EXPERTS_IN_INTERMEDIATE: Final = frozenset({"mixtral", "gpt_oss", "minimax_m2", "phimoe", "olmoe", "granitemoe"})
"""Families whose `intermediate_size` is the width of an expert."""
_NORMS_ACROSS_HEADS: Final = frozenset({"olmo2", "olmo3", "olmoe"})
_REFUSED: Final = {
    "is_encoder_decoder": "encoders are not modelled",
    "state_size": "state-space layers are not modelled",
    "mamba_d_state": "state-space layers are not modelled",
    "mamba_num_heads": "state-space layers are not modelled",
    "ssm_cfg": "state-space layers are not modelled",
    "hybrid_override_pattern": "layers other than attention are not modelled",
    "layers_block_type": "layers other than attention are not modelled",
    "linear_num_value_heads": "linear attention is not modelled",
    "attention_hidden_size": "recurrent layers are not modelled",
    "block_types": "layers other than attention are not modelled",
    "interleave_moe_layer_step": "experts in some layers of two widths are not modelled",
}
_GENERATES: Final = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Ends of the names of architectures that generate text."""
_DTYPES: Final = {"float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "bf16", "half": "bf16"}
_WINDOWED: Final = frozenset({"sliding_attention", "chunked_attention"})
_WHOLE: Final = "full_attention"


class _Fields:
    """A config's fields, read with the file's name in every complaint."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        inner = config.get("text_config")  # models that also see
        self._config: Mapping[str, Any] = inner if isinstance(inner, dict) else config
        self._outer = config
        self._source = source

    def shape(self, name: str) -> ModelShape:
        for field, reason in _REFUSED.items():
            if self._config.get(field):
                raise self._error(field, reason)
        architectures = self._outer.get("architectures")
        if isinstance(architectures, list) and not any(str(name).endswith(_GENERATES) for name in architectures):
            raise self._error("architectures", f"{', '.join(map(str, architectures))} does not generate text")
        family = self._config.get("model_type", "")
        hidden_size, num_layers, num_heads = (
            self._count(field) for field in ("hidden_size", "num_hidden_layers", "num_attention_heads")
        )
        window, num_windowed = self._window(family, num_layers)
        weights, expert_dtype = self._weight_dtypes()
        experts = self._experts(family, num_layers, expert_dtype)
        tied = self._outer.get("tie_word_embeddings", self._config.get("tie_word_embeddings"))
        try:
            return ModelShape(
                name=name,
                num_layers=num_layers,
                hidden_size=hidden_size,
                num_heads=num_heads,
                num_kv_heads=self._kv_heads(family, num_heads),
                head_dim=self._count("head_dim", hidden_size // num_heads),
                intermediate_size=self._count("intermediate_size", 4 * hidden_size if family in _FOURFOLD else None),
                vocab_size=self._count("vocab_size"),
                gated=family not in _PLAIN,
                tied=family in _TIED if tied is None else bool(tied),
                experts=experts,
                latent=self._latent(),
                window_tokens=window,
                num_windowed_layers=num_windowed,
                norms_across_heads=self._config.get("qk_norm_type") == "per_layer" or family in _NORMS_ACROSS_HEADS,
                dtype=_DTYPES.get(str(self._get("torch_dtype")), "bf16"),
                weight_dtype=weights,
            )
        except ConfigurationError as error:
            raise ConfigurationError(f"{self._source}: {error}") from error

    def _get(self, field: str) -> Any:  # noqa: ANN401 - whatever the JSON holds
        for name in (field, *_ALIASES.get(field, ())):
            if self._config.get(name) is not None:
                return self._config[name]
        return None

    def _count(self, field: str, default: int | None = None) -> int:
        value = self._get(field)
        if value is None and default is not None:
            return default
        if value is None:
            others = f" (or {', '.join(_ALIASES[field])})" if field in _ALIASES else ""
            raise self._error(field, f"is missing{others}")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._error(field, f"must be a whole number above 0, not {value!r}")
        return value

    def _error(self, field: str, reason: str) -> ConfigurationError:
        return ConfigurationError(f"{self._source} does not describe a model that can be simulated: {field}: {reason}")

    def _kv_heads(self, family: str, num_heads: int) -> int:
        if family == "gpt_bigcode" or (family == "falcon" and not self._config.get("new_decoder_architecture")):
            return 1 if self._config.get("multi_query", True) else num_heads
        return self._count("num_key_value_heads", num_heads)

    def _window(self, family: str, num_layers: int) -> tuple[int, int]:
        """Return the window and how many layers have it.

        A list of layer types comes first; then every sixth (Gemma 3) or second layer (Gemma 2, gpt-oss) that sees
        everything; then, in Qwen, the layers from `max_window_layers` on if windows are used; then all.
        """
        types = self._config.get("layer_types")
        if isinstance(types, list):
            unknown = [kind for kind in types if kind not in _WINDOWED and kind != _WHOLE]
            if unknown:
                raise self._error("layer_types", f"{unknown[0]!r} is not modelled")
        window = self._config.get("sliding_window") or self._config.get("attention_chunk_size")
        if not window or self._config.get("use_sliding_window") is False:
            return 0, 0
        window = self._count("sliding_window", window)
        if isinstance(types, list):
            return window, sum(kind in _WINDOWED for kind in types)
        every = self._config.get("sliding_window_pattern") or {"gemma3_text": 6, "gemma2": 2, "gpt_oss": 2}.get(family)
        if every:
            return window, num_layers - num_layers // int(every)
        if self._config.get("use_sliding_window"):
            return window, max(0, num_layers - self._count("max_window_layers", num_layers))
        return window, num_layers

    def _weight_dtypes(self) -> tuple[str, str | None]:
        """Return the type of the layers' matrices, and that of the experts where they alone are quantized."""
        own = _DTYPES.get(str(self._get("torch_dtype")), "bf16")
        quantization = self._outer.get("quantization_config") or self._config.get("quantization_config")
        if quantization is None:
            return own, None
        if not isinstance(quantization, dict):
            raise self._error("quantization_config", "must be an object")
        method = str(quantization.get("quant_method", "")).lower()
        if method == "mxfp4":  # gpt-oss: its experts only
            return own, "fp4"
        bits = quantization.get("bits") or quantization.get("w_bit")
        if method in {"fp8", "fbgemm_fp8"}:
            return "fp8", None
        if method in {"gptq", "awq"} and bits in {4, 8, None}:
            return ("fp8" if bits == 8 else "fp4"), None
        if method in {"compressed-tensors", "modelopt"}:
            return self._compressed(quantization), None
        raise self._error("quantization_config.quant_method", f"{method!r} is not modelled")

    def _compressed(self, quantization: Mapping[str, Any]) -> str:
        algorithm = str(quantization.get("quant_algo", "")).lower()
        groups = quantization.get("config_groups")
        bits: set[object] = {4 if "4" in algorithm else 8} if algorithm else set()
        if isinstance(groups, dict):
            bits |= {(group.get("weights") or {}).get("num_bits") for group in groups.values()}
        if bits not in ({4}, {8}):
            raise self._error("quantization_config.config_groups", f"weights of {sorted(map(str, bits))} bits")
        return "fp8" if bits == {8} else "fp4"

    def _latent(self) -> LatentAttention | None:
        if self._get("kv_lora_rank") is None:
            return None
        return LatentAttention(
            query_rank=self._count("q_lora_rank", 0),
            kv_rank=self._count("kv_lora_rank"),
            nope_head_dim=self._count("qk_nope_head_dim"),
            rope_head_dim=self._count("qk_rope_head_dim"),
            value_head_dim=self._count("v_head_dim"),
        )

    def _experts(self, family: str, num_layers: int, dtype: str | None) -> Experts | None:
        num_experts = self._count("num_experts", 1)
        if num_experts == 1:
            return None
        widths_from = "intermediate_size" if family in _EXPERTS_IN_INTERMEDIATE else "moe_intermediate_size"
        width = self._count(widths_from)
        shared = self._config.get("shared_expert_intermediate_size")
        if shared is None:
            shared = (self._config.get("n_shared_experts") or 0) * width
        dense = self._config.get("mlp_only_layers") or []
        sparse_step = self._config.get("decoder_sparse_step") or self._config.get("moe_layer_freq") or 1
        if not isinstance(sparse_step, int):
            raise self._error("moe_layer_freq", "only a number is modelled")
        first_dense = self._config.get("first_k_dense_replace") or 0
        with_experts = [
            layer
            for layer in range(num_layers)
            if layer >= first_dense and layer not in dense and (layer - first_dense) % sparse_step == 0
        ]
        return Experts(
            num_experts=num_experts,
            top_k=self._count("num_experts_per_tok"),
            intermediate_size=width,
            num_layers=len(with_experts),
            shared_intermediate_size=int(shared),
            dtype=dtype,
        )
