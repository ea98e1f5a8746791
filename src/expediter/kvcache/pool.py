"""Block ids and who owns them, as plain arrays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from expediter.core.errors import ConfigurationError, InvariantError

BlockIds = npt.NDArray[np.int32]
"""Block ids, int32, shape [num_blocks]."""


class BlockPool:
    """A stack of free blocks and a count of owners per block.

    A block is *used* while running sequences own it (`refs` > 0), *cached* while only the radix tree holds it, and
    *free* otherwise. The pool knows the first and the last; the tree knows the middle.

    Attributes:
        refs: running sequences that own each block, int32, shape [num_blocks].
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ConfigurationError(f"the KV cache needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self.refs: npt.NDArray[np.int32] = np.zeros(num_blocks, np.int32)
        # A stack, lowest id on top: what was freed last is used first, and equal histories give equal ids.
        self._free: BlockIds = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self.num_free = num_blocks

    def pop(self, count: int) -> BlockIds:
        """Take `count` free blocks, each with one owner; the order is that of popping one by one.

        Raises:
            InvariantError: fewer are free.
        """
        if count > self.num_free:
            raise InvariantError(f"{count} blocks asked of {self.num_free} free ones")
        self.num_free -= count
        taken = self._free[self.num_free : self.num_free + count][::-1].copy()
        self.refs[taken] = 1
        return taken

    def acquire(self, blocks: BlockIds) -> int:
        """Add an owner to each of `blocks` (distinct); return how many had none."""
        owners = self.refs[blocks]
        self.refs[blocks] = owners + 1
        return len(blocks) - int(np.count_nonzero(owners))

    def disown(self, blocks: BlockIds) -> BlockIds:
        """Remove an owner from each of `blocks` (distinct); return those left with none, in order.

        Raises:
            InvariantError: a block has no owner (a double free).
        """
        if not len(blocks):
            return blocks
        owners = self.refs[blocks]
        owners -= 1
        if owners.min() < 0:
            raise InvariantError(f"blocks {blocks[owners < 0].tolist()} freed twice")
        self.refs[blocks] = owners
        left: BlockIds = blocks[owners == 0]
        return left

    def push(self, blocks: BlockIds) -> None:
        """Put blocks without owners back; the first of `blocks` is the next to be popped."""
        count = len(blocks)
        if not count:
            return
        if self.num_free + count > self.num_blocks:
            raise InvariantError(f"{count} blocks freed onto {self.num_free} of {self.num_blocks} free ones")
        self._free[self.num_free : self.num_free + count] = blocks[::-1]
        self.num_free += count

    def free_ids(self) -> BlockIds:
        """Return the free blocks, bottom of the stack first (for checks)."""
        return self._free[: self.num_free].copy()
