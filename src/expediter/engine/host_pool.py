"""The host tier's storage: KV blocks of preempted requests, outside the device's memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

import numpy as np
import torch

from expediter.core.plan import BlockMoves, IntArray
from expediter.engine.kv_pool import KVPool

_STAGING_BYTES: Final = 1 << 28
"""Most that is moved in one piece: a bound on the device memory that moving takes."""
_NUM_TIMED_BLOCKS: Final = 64


class HostPool:
    """Storage of `num_blocks` blocks beside a `KVPool`; pinned if that is on a CUDA device.

    Moves are queued on the device's stream like any other work, so a forward pass that is queued later sees them done.

    Attributes:
        data: shape [num_blocks, num_layers, block_size, 2, num_kv_heads, head_dim]: all layers of a block are one
            contiguous piece, and blocks of successive ids move in one copy.
    """

    def __init__(self, pool: KVPool, num_blocks: int) -> None:
        self._pool = pool
        layers, _, *block = pool.data.shape
        self._is_cuda = pool.data.is_cuda
        self._blocks_at_once = max(1, _STAGING_BYTES // pool.shape.bytes_per_block(pool.block_size))
        self.data = torch.empty((num_blocks, layers, *block), dtype=pool.data.dtype, pin_memory=self._is_cuda)

    def swap_out(self, moves: BlockMoves) -> None:
        """Copy blocks of the pool to the host."""
        for device_blocks, host_blocks in self._pieces(moves.sources, moves.targets):
            staged = self._pool.data.index_select(1, device_blocks).transpose(0, 1)
            if self._is_cuda:  # one straight copy per run, instead of one that rearranges across the bus
                staged = staged.contiguous()
            for begin, end, first in _runs(host_blocks):
                self.data[first : first + end - begin].copy_(staged[begin:end], non_blocking=True)

    def swap_in(self, moves: BlockMoves) -> None:
        """Copy blocks of the host to the pool."""
        for device_blocks, host_blocks in self._pieces(moves.targets, moves.sources):
            staged = torch.empty(
                (len(host_blocks), *self.data.shape[1:]), dtype=self.data.dtype, device=device_blocks.device
            )
            for begin, end, first in _runs(host_blocks):
                staged[begin:end].copy_(self.data[first : first + end - begin], non_blocking=True)
            self._pool.data.index_copy_(1, device_blocks, staged.transpose(0, 1))

    def measure_block_swap_s(self) -> float:
        """Return how long a block takes one way, in seconds, by moving some; the pool must be empty still."""
        count = min(_NUM_TIMED_BLOCKS, self._pool.num_blocks, len(self.data))
        moves = BlockMoves(np.arange(count, dtype=np.int32), np.arange(count, dtype=np.int32))
        elapsed_s = 0.0
        for _ in range(2):  # the first touches the memory and is not typical
            started_s = time.perf_counter()
            self.swap_out(moves)
            self.swap_in(moves)
            if self._is_cuda:
                torch.cuda.synchronize(self._pool.data.device)
            elapsed_s = time.perf_counter() - started_s
        return elapsed_s / (2 * count)

    def _pieces(self, device: IntArray, host: IntArray) -> Iterator[tuple[torch.Tensor, IntArray]]:
        for begin in range(0, len(host), self._blocks_at_once):
            piece = slice(begin, begin + self._blocks_at_once)
            blocks = torch.from_numpy(device[piece].astype(np.int64))
            yield blocks.to(self._pool.data.device, non_blocking=True), host[piece]


def _runs(blocks: IntArray) -> Iterator[tuple[int, int, int]]:
    """Return the runs of successive ids: where each begins and ends in `blocks`, and its first id."""
    begins = np.flatnonzero(np.diff(blocks, prepend=blocks[0] - 2) != 1).tolist()
    for begin, end in zip(begins, [*begins[1:], len(blocks)], strict=True):
        yield begin, end, int(blocks[begin])
