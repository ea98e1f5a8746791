"""From a plan to the tensors of one forward pass, with numpy: no Python loop over decodes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from expediter.core.plan import StepPlan
from expediter.engine.kv_pool import KVPool

_Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decodes that attend in one call, their contexts padded to whole blocks of the longest.

    Attributes:
        rows: their places in the packed batch, int64, shape [num_seqs]; None when they are all decodes, in order.
        blocks: block ids, int64, shape [num_seqs * blocks_per_seq], padded with block 0.
        mask: added to the scores, shape [num_seqs, 1, 1, blocks_per_seq * block_size].
    """

    num_seqs: int
    rows: torch.Tensor | None
    blocks: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """One sequence's run of new tokens, packed at [begin, end).

    Attributes:
        blocks: block ids of prefix and chunk, int64; None without a prefix: then all keys are in the batch itself.
        mask: added to the scores, shape [end - begin, num_context]; None without a prefix (plain causal).
    """

    begin: int
    end: int
    num_context: int
    blocks: torch.Tensor | None
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """What the model and the attention function need for one step; built once, shared by all layers.

    Attributes:
        input_ids, position_ids: int64, shape [1, num_tokens].
        kv_slots: where each new token's KV goes, int64, shape [num_tokens].
        last_tokens: packed index of each sampled entry's last token, int64, shape [num_sampled].
    """

    pool: KVPool
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    kv_slots: torch.Tensor
    last_tokens: torch.Tensor
    num_decodes: int
    decode_groups: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]


def pack(plan: StepPlan, pool: KVPool) -> PackedBatch:
    """Build the batch of a plan on the pool's device. Keeps nothing of the plan's arrays."""
    block_size = pool.block_size
    lengths = plan.lengths.astype(np.int64)
    starts = plan.starts.astype(np.int64)
    ends_packed = np.cumsum(lengths)
    begins_packed = ends_packed - lengths
    rows = np.repeat(np.arange(plan.num_seqs), lengths)
    positions = np.arange(len(rows)) + (starts - begins_packed)[rows]
    blocks = plan.block_tables[plan.slots[rows], positions // block_size].astype(np.int64)
    device = pool.data.device
    return PackedBatch(
        pool=pool,
        input_ids=_to(plan.tokens.astype(np.int64)[None], device),
        position_ids=_to(positions[None], device),
        kv_slots=_to(blocks * block_size + positions % block_size, device),
        last_tokens=_to(ends_packed[plan.sampled] - 1, device),
        num_decodes=plan.num_decodes,
        decode_groups=_decode_groups(plan, pool, starts[: plan.num_decodes] + 1) if plan.num_decodes else (),
        chunks=tuple(
            _chunk(plan, pool, entry, int(begins_packed[entry])) for entry in range(plan.num_decodes, plan.num_seqs)
        ),
    )


def _to(array: _Int64Array, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)


def _decode_groups(plan: StepPlan, pool: KVPool, contexts: _Int64Array) -> tuple[DecodeGroup, ...]:
    """Split decodes by context length where padding them all to the longest would more than double the reads."""
    num_blocks = -(-contexts // pool.block_size)
    if len(contexts) * num_blocks.max() <= 2 * num_blocks.sum():
        return (_decode_group(plan, pool, contexts, None),)
    buckets = np.ceil(np.log2(num_blocks)).astype(np.int64)
    return tuple(
        _decode_group(plan, pool, contexts, np.flatnonzero(buckets == bucket)) for bucket in np.unique(buckets)
    )


def _decode_group(plan: StepPlan, pool: KVPool, contexts: _Int64Array, rows: _Int64Array | None) -> DecodeGroup:
    slots = plan.slots[: plan.num_decodes]
    if rows is not None:
        slots, contexts = slots[rows], contexts[rows]
    columns = int(-(-contexts.max() // pool.block_size))
    used = np.arange(columns) < -(-contexts // pool.block_size)[:, None]
    # The table holds anything beyond a sequence's own blocks; block 0 always exists, and the mask hides it.
    blocks = np.where(used, plan.block_tables[slots, :columns], 0).astype(np.int64)
    hidden = np.arange(columns * pool.block_size) >= contexts[:, None]
    mask = np.where(hidden, np.float32(-np.inf), np.float32(0.0))[:, None, None, :]
    device = pool.data.device
    return DecodeGroup(
        num_seqs=len(slots),
        rows=None if rows is None else _to(rows, device),
        blocks=_to(blocks.reshape(-1), device),
        mask=torch.from_numpy(mask).to(device, pool.shape.dtype, non_blocking=True),
    )


def _chunk(plan: StepPlan, pool: KVPool, entry: int, begin: int) -> Chunk:
    start, length = int(plan.starts[entry]), int(plan.lengths[entry])
    context = start + length
    if not start:
        return Chunk(begin, begin + length, context, None, None)
    device = pool.data.device
    columns = -(-context // pool.block_size)
    blocks = plan.block_tables[plan.slots[entry], :columns].astype(np.int64)
    mask = torch.full((length, context), -torch.inf, dtype=pool.shape.dtype, device=device).triu_(start + 1)
    return Chunk(begin, begin + length, context, _to(blocks, device), mask)
