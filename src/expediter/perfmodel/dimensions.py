"""Shapes of decoder models: what their weights and KV weigh, how much they compute, how they divide among GPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Final

from expediter.core.errors import ConfigurationError

DTYPE_BYTES: Final = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0, "fp4": 0.53125}
"""Bytes per value. fp4: four bits and an eighth-bit share of a scale per 32 values (OCP Microscaling Formats, 2023);
other 4-bit formats are within 6 % of it. float16 counts as bf16."""
WEIGHT_DTYPES: Final = ("bf16", "fp8", "fp4")
KV_DTYPES: Final = ("bf16", "fp8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The mixture of experts in place of some layers' feed-forward block; every expert has three matrices.

    Args:
        num_experts: routed experts per layer.
        top_k: of them, how many compute a token.
        intermediate_size: width of one, in elements.
        num_layers: layers that have them; the others have the dense block.
        shared_intermediate_size: width of the experts that compute every token, together; 0 if there are none.
        dtype: of the routed experts' weights; None for that of the model's other layers.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    num_layers: int
    shared_intermediate_size: int = 0
    dtype: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, 2405.04434): KV is one latent vector per token, shared by all heads.

    Args:
        query_rank: width of the compressed query; 0 where it is not compressed.
        kv_rank: width of the latent vector.
        nope_head_dim, rope_head_dim: elements of a query and key head without and with position; the latter is kept
            once per token beside the latent vector.
        value_head_dim: elements of a value head.
    """

    query_rank: int
    kv_rank: int
    nope_head_dim: int
    rope_head_dim: int
    value_head_dim: int

    @property
    def kv_width(self) -> int:
        """Elements of KV per token and layer."""
        return self.kv_rank + self.rope_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Dimensions of a transformer decoder; one attention and one feed-forward block per layer.

    Args:
        num_layers: transformer layers.
        hidden_size: width of the residual stream, in elements.
        num_heads: query heads per layer.
        num_kv_heads: key and value heads per layer; below `num_heads` with grouped queries.
        head_dim: elements per head.
        intermediate_size: width of the dense feed-forward block, in elements.
        vocab_size: tokens.
        gated: the dense feed-forward block has a gate (three matrices instead of two).
        tied: the output head is the embedding table.
        experts: None in a dense model.
        latent: of multi-head latent attention; None in attention with heads of KV.
        window_tokens: of the layers whose attention sees only so many tokens back; 0 if all see everything.
        num_windowed_layers: how many such layers.
        norms_across_heads: queries and keys are normalized over all heads at once, so that GPUs which share the heads
            add up their sums of squares, twice more per layer.
        dtype: of activations, embedding and output head.
        weight_dtype: of the layers' matrices.
        kv_dtype: of the KV cache.
    Raises:
        ConfigurationError: a dimension is below 1, the heads do not form whole groups, or a type is not known.
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
    experts: Experts | None = None
    latent: LatentAttention | None = None
    window_tokens: int = 0
    num_windowed_layers: int = 0
    norms_across_heads: bool = False
    dtype: str = "bf16"
    weight_dtype: str = "bf16"
    kv_dtype: str = "bf16"

    def __post_init__(self) -> None:
        self._check_dimensions()
        if self.num_heads % self.num_kv_heads:
            raise ConfigurationError(
                f"model {self.name}: {self.num_heads} heads do not divide into {self.num_kv_heads} groups"
            )
        expert_dtype = self.experts and self.experts.dtype
        for field, value in (
            ("dtype", self.dtype),
            ("weight_dtype", self.weight_dtype),
            ("kv_dtype", self.kv_dtype),
            ("experts.dtype", expert_dtype or self.weight_dtype),
        ):
            if value not in DTYPE_BYTES:
                raise ConfigurationError(
                    f"model {self.name}: no {field} {value!r}; there are: {', '.join(DTYPE_BYTES)}"
                )

    def _check_dimensions(self) -> None:
        least = {
            "num_layers": 1,
            "hidden_size": 1,
            "num_heads": 1,
            "num_kv_heads": 1,
            "head_dim": 1,
            "intermediate_size": 1,
            "vocab_size": 1,
            "window_tokens": 1 if self.num_windowed_layers else 0,
            "num_windowed_layers": 0,
        }
        for field, minimum in least.items():
            if getattr(self, field) < minimum:
                raise ConfigurationError(
                    f"model {self.name}: {field} must be at least {minimum}, not {getattr(self, field)}"
                )
        if self.num_windowed_layers > self.num_layers:
            raise ConfigurationError(f"model {self.name}: more windowed layers than its {self.num_layers} layers")
        if self.experts is None:
            return
        experts = self.experts
        if not 1 <= experts.top_k <= experts.num_experts:
            raise ConfigurationError(
                f"model {self.name}: top_k must be 1 to {experts.num_experts} experts, not {experts.top_k}"
            )
        if not 1 <= experts.num_layers <= self.num_layers or experts.intermediate_size < 1:
            raise ConfigurationError(
                f"model {self.name}: experts of width {experts.intermediate_size} in {experts.num_layers} of "
                f"{self.num_layers} layers"
            )

    def with_dtypes(self, *, weights: str | None = None, kv: str | None = None) -> ModelShape:
        """Return the model with other types of weights (the experts' too) or KV; None leaves them.

        Raises:
            ConfigurationError: no such type.
        """
        for what, dtype, known in (("weight", weights, WEIGHT_DTYPES), ("kv", kv, KV_DTYPES)):
            if dtype is not None and dtype not in known:
                raise ConfigurationError(f"no {what} dtype {dtype!r}; there are: {', '.join(known)}")
        experts = self.experts
        if weights is not None and experts is not None:
            experts = replace(experts, dtype=None)
        return replace(self, weight_dtype=weights or self.weight_dtype, kv_dtype=kv or self.kv_dtype, experts=experts)

    @property
    def bytes_per_value(self) -> float:
        """Bytes per value of activations, embedding and output head."""
        return DTYPE_BYTES[self.dtype]

    @property
    def expert_dtype(self) -> str:
        """Type of the routed experts' weights; that of the layers where there are none."""
        return (self.experts and self.experts.dtype) or self.weight_dtype

    @property
    def num_attention_params(self) -> int:
        """Parameters of one layer's attention."""
        if self.latent is None:
            return self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        latent, heads = self.latent, self.num_heads
        query = heads * (latent.nope_head_dim + latent.rope_head_dim)
        query_params = latent.query_rank * (self.hidden_size + query) if latent.query_rank else self.hidden_size * query
        return (
            query_params
            + self.hidden_size * latent.kv_width
            + latent.kv_rank * heads * (latent.nope_head_dim + latent.value_head_dim)
            + heads * latent.value_head_dim * self.hidden_size
        )

    @property
    def num_dense_params(self) -> int:
        """Parameters of all layers that every token is multiplied with: all but the routed experts.

        Norms and biases are left out (below 0.2 %).
        """
        matrices = 3 if self.gated else 2
        params = self.num_layers * self.num_attention_params
        if self.experts is None:
            return params + self.num_layers * matrices * self.hidden_size * self.intermediate_size
        experts = self.experts
        params += (self.num_layers - experts.num_layers) * matrices * self.hidden_size * self.intermediate_size
        router_and_shared = experts.num_experts + 3 * experts.shared_intermediate_size
        return params + experts.num_layers * self.hidden_size * router_and_shared

    @property
    def num_params_per_expert(self) -> int:
        """Parameters of one routed expert of one layer; 0 where there are none."""
        return 0 if self.experts is None else 3 * self.hidden_size * self.experts.intermediate_size

    @property
    def num_expert_params(self) -> int:
        """Parameters of all routed experts of all layers."""
        if self.experts is None:
            return 0
        return self.experts.num_layers * self.experts.num_experts * self.num_params_per_expert

    @property
    def num_head_params(self) -> int:
        """Parameters of the output head, which only sampled tokens are multiplied with."""
        return self.vocab_size * self.hidden_size

    @property
    def num_params(self) -> int:
        """All parameters, the embedding table included."""
        tables = self.num_head_params * (1 if self.tied else 2)
        return self.num_dense_params + self.num_expert_params + tables

    @property
    def num_active_params(self) -> int:
        """Parameters that one token is multiplied with; the embedding table counts as in `num_params`."""
        used = 0 if self.experts is None else self.experts.num_layers * self.experts.top_k * self.num_params_per_expert
        return self.num_params - self.num_expert_params + used

    @property
    def dense_weight_bytes(self) -> int:
        """Memory of the layers' matrices without the routed experts, over all GPUs together."""
        return ceil(self.num_dense_params * DTYPE_BYTES[self.weight_dtype])

    @property
    def expert_weight_bytes(self) -> int:
        """Memory of the routed experts, over all GPUs together."""
        return ceil(self.num_expert_params * DTYPE_BYTES[self.expert_dtype])

    @property
    def table_bytes(self) -> int:
        """Memory of the embedding table and of the output head, if it has its own."""
        return ceil(self.num_head_params * self.bytes_per_value) * (1 if self.tied else 2)

    @property
    def weight_bytes(self) -> int:
        """Memory of all weights, over all GPUs together."""
        return self.dense_weight_bytes + self.expert_weight_bytes + self.table_bytes

    @property
    def kv_bytes_per_token_and_layer(self) -> int:
        """KV of one token in one layer: 2 * KV heads * head size * bytes, or the latent vector."""
        width = 2 * self.num_kv_heads * self.head_dim if self.latent is None else self.latent.kv_width
        return ceil(width * DTYPE_BYTES[self.kv_dtype])

    @property
    def kv_bytes_per_token(self) -> int:
        """KV of one token over all layers, windowed ones included."""
        return self.num_layers * self.kv_bytes_per_token_and_layer

    def kv_bytes(self, num_tokens: int) -> int:
        """Return the KV that the next token needs after so many; windowed layers need no more than their window."""
        windowed = self.num_windowed_layers * min(num_tokens, self.window_tokens)
        whole = (self.num_layers - self.num_windowed_layers) * num_tokens
        return (windowed + whole) * self.kv_bytes_per_token_and_layer

    def kv_bytes_per_token_on_gpu(self, tensor_parallel: int, pipeline_parallel: int = 1) -> int:
        """KV of one token on each GPU of the fullest stage.

        KV heads are copied where there are more GPUs than heads; a latent vector is copied to every GPU.
        """
        layer = self.kv_bytes_per_token_and_layer
        if self.latent is None:
            layer = layer // self.num_kv_heads * max(1, self.num_kv_heads // tensor_parallel)
        return -(-self.num_layers // pipeline_parallel) * layer

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

    def divides_among(self, num_gpus: int) -> bool:
        """Return whether query heads divide among the GPUs, and KV heads divide or are copied evenly."""
        if self.num_heads % num_gpus:
            return False
        if self.latent is not None:
            return True
        return self.num_kv_heads % num_gpus == 0 or num_gpus % self.num_kv_heads == 0
