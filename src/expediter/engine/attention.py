"""Paged attention as a transformers attention function: any causal LM that uses the interface runs on our blocks."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from expediter.core.errors import ConfigurationError, InvariantError
from expediter.engine.batch import PackedBatch

ATTENTION_NAME: Final = "expediter_paged"
BATCH_KEYWORD: Final = "expediter_batch"
"""Keyword under which a `PackedBatch` travels through `model.forward` to every layer."""

_UNSUPPORTED: Final = ("softcap", "s_aux", "position_bias")


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - the interface passes it by position
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,  # noqa: ANN401 - whatever the model passes on
) -> tuple[torch.Tensor, None]:
    """Write this layer's new KV into the pool and attend over each sequence's context.

    Args:
        query: packed, shape [1, num_heads, num_tokens, head_dim].
        key, value: packed, shape [1, num_kv_heads, num_tokens, head_dim].
        attention_mask: ignored; the batch knows who sees what.
    Returns:
        Shape [1, num_tokens, num_heads, head_dim], and no weights.
    Raises:
        ConfigurationError: the model's attention needs something that this function does not do.
    """
    batch = kwargs.get(BATCH_KEYWORD)
    if not isinstance(batch, PackedBatch):
        raise InvariantError(f"{ATTENTION_NAME} was called without a batch")
    _refuse_unsupported(key, value, sliding_window, kwargs)
    layer = int(module.layer_idx)  # type: ignore[arg-type]  # an int that torch types as any module attribute
    batch.pool.write(layer, batch.kv_slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
    num_heads, num_tokens, head_dim = query.shape[1:]
    out = query.new_empty(num_tokens, num_heads, head_dim)
    if batch.num_decodes:
        _attend_decodes(batch, layer, query, out, scaling)
    for chunk in batch.chunks:
        if chunk.blocks is None:
            keys, values = key[:, :, chunk.begin : chunk.end], value[:, :, chunk.begin : chunk.end]
        else:
            keys, values = batch.pool.read(layer, chunk.blocks, 1)
            keys, values = keys[:, :, : chunk.num_context], values[:, :, : chunk.num_context]
        attended = scaled_dot_product_attention(
            query[:, :, chunk.begin : chunk.end],
            keys,
            values,
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            scale=scaling,
            enable_gqa=num_heads != keys.shape[1],
        )
        out[chunk.begin : chunk.end] = attended[0].transpose(0, 1)
    return out[None], None


def _attend_decodes(
    batch: PackedBatch, layer: int, query: torch.Tensor, out: torch.Tensor, scaling: float | None
) -> None:
    """Attend for the leading one-token entries; the query heads of a group become the rows of one KV head."""
    num_heads, _, head_dim = query.shape[1:]
    decodes = query[0, :, : batch.num_decodes].transpose(0, 1)
    for group in batch.decode_groups:
        rows = decodes if group.rows is None else decodes.index_select(0, group.rows)
        keys, values = batch.pool.read(layer, group.blocks, group.num_seqs)
        attended = scaled_dot_product_attention(
            rows.reshape(group.num_seqs, keys.shape[1], -1, head_dim),
            keys,
            values,
            attn_mask=group.mask,
            scale=scaling,
        ).reshape(group.num_seqs, num_heads, head_dim)
        if group.rows is None:
            out[: batch.num_decodes] = attended
        else:
            out.index_copy_(0, group.rows, attended)


def _refuse_unsupported(
    key: torch.Tensor, value: torch.Tensor, sliding_window: int | None, kwargs: dict[str, Any]
) -> None:
    if sliding_window is not None:
        raise ConfigurationError("models with sliding-window attention are not supported")
    if key.shape != value.shape:
        raise ConfigurationError("models whose keys and values differ in shape are not supported")
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ConfigurationError(f"models that need {name} in their attention are not supported")


def register() -> None:
    """Make the function known to transformers under `ATTENTION_NAME`; calling it again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
