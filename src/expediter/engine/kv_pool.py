"""The KV cache of one model on one device: blocks that the scheduler's block tables point into."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedConfig

from expediter.core.errors import ConfigurationError
from expediter.core.plan import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """What one token's KV is made of.

    Args:
        num_layers: layers that keep KV.
        num_kv_heads: key (and value) heads per layer; fewer than query heads under grouped-query attention.
        head_dim: elements per head.
        dtype: of the cache; the model's own.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of_config(cls, config: PreTrainedConfig, dtype: torch.dtype) -> KVShape:
        """Read the shape from a transformers config.

        Raises:
            ConfigurationError: the config does not describe an attention decoder.
        """
        config = config.get_text_config(decoder=True)
        num_heads = getattr(config, "num_attention_heads", None)
        num_layers = getattr(config, "num_hidden_layers", None)
        if not num_heads or not num_layers:
            raise ConfigurationError(f"models of type {config.model_type!r} have no attention layers that can be paged")
        return cls(
            num_layers=num_layers,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
            dtype=dtype,
        )

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def bytes_per_block(self, block_size: int) -> int:
        """Return the bytes of one block of `block_size` tokens over all layers, keys and values."""
        return self.bytes_per_token * block_size

    def num_blocks(self, kv_cache_bytes: int, block_size: int) -> int:
        """Return how many blocks fit into `kv_cache_bytes`.

        Raises:
            ConfigurationError: not even one.
        """
        num_blocks = kv_cache_bytes // self.bytes_per_block(block_size)
        if num_blocks < 1:
            raise ConfigurationError(
                f"{kv_cache_bytes} bytes of KV cache hold no block; one takes {self.bytes_per_block(block_size)} bytes"
            )
        return num_blocks


class KVPool:
    """Storage of `num_blocks` blocks. Who owns a block is the scheduler's business; contents stay until overwritten.

    Attributes:
        data: shape [num_layers, num_blocks, block_size, 2, num_kv_heads, head_dim]; keys at index 0 of the fourth axis,
            values at 1. A block of a layer is one contiguous piece, so one gather fetches both.
    """

    def __init__(self, shape: KVShape, *, num_blocks: int, block_size: int, device: torch.device) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Zeros, not empty memory: a masked position weighs 0, and 0 times a NaN would still be NaN.
        self.data = torch.zeros(
            (shape.num_layers, num_blocks, block_size, 2, shape.num_kv_heads, shape.head_dim),
            dtype=shape.dtype,
            device=device,
        )
        token_shape = (num_blocks * block_size, 2, shape.num_kv_heads, shape.head_dim)
        layers = [layer.view(token_shape) for layer in self.data]
        self._keys = [layer[:, 0] for layer in layers]
        self._values = [layer[:, 1] for layer in layers]

    def write(self, layer: int, kv_slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store new tokens.

        Args:
            kv_slots: block id * block_size + offset of each token, int64, shape [num_tokens].
            keys, values: shape [num_tokens, num_kv_heads, head_dim].
        """
        self._keys[layer].index_copy_(0, kv_slots, keys)
        self._values[layer].index_copy_(0, kv_slots, values)

    def copy(self, copies: IntArray) -> None:
        """Copy whole blocks in every layer.

        Args:
            copies: source and destination ids, shape [2, num_copies]; no destination is a source.
        """
        if not copies.shape[1]:
            return
        sources, destinations = torch.from_numpy(copies.astype(np.int64)).to(self.data.device)
        for layer in self.data:
            layer.index_copy_(0, destinations, layer.index_select(0, sources))

    def read(self, layer: int, blocks: torch.Tensor, num_seqs: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather whole blocks.

        Args:
            blocks: block ids, int64, shape [num_seqs * blocks_per_seq].
        Returns:
            Keys and values, each shape [num_seqs, num_kv_heads, blocks_per_seq * block_size, head_dim]; strided views
            of one fresh tensor.
        """
        shape = self.shape
        gathered = self.data[layer].index_select(0, blocks).view(num_seqs, -1, 2, shape.num_kv_heads, shape.head_dim)
        return gathered[:, :, 0].transpose(1, 2), gathered[:, :, 1].transpose(1, 2)
