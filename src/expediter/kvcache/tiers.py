"""The host tier: blocks in host memory that keep the KV of preempted requests. Only ids live here, never contents."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from expediter.core.errors import ConfigurationError, InvariantError
from expediter.kvcache.pool import BlockIds


class HostCopy(NamedTuple):
    """KV of a preempted request: `blocks[i]` holds its logical block `first_block + i`.

    Attributes:
        first_block: leading blocks that were not copied, because others owned them too.
        num_tokens: computed tokens that prefix and copy hold together; the last block may be partial.
    """

    first_block: int
    blocks: BlockIds
    num_tokens: int


class HostTier:
    """Free host blocks, and who holds the others.

    A block is free, *held* by one preempted request (`put`), or *being read* by the step that brings it back (`take`);
    that step's end (`settle`) frees it. Whoever ends before that gives it back with `drop`.

    Args:
        num_blocks: size of the tier; 0 for none.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 0:
            raise ConfigurationError(f"the host tier cannot have {num_blocks} blocks")
        self.num_blocks = num_blocks
        # A stack, lowest id on top, so that a request mostly gets a run of ids, which moves in one piece.
        self._free: BlockIds = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._num_free = num_blocks
        self._copies: dict[int, HostCopy] = {}
        self._in_transit: list[BlockIds] = []

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_held(self) -> int:
        """Blocks that preempted requests hold."""
        return sum(len(copy.blocks) for copy in self._copies.values())

    @property
    def num_in_transit(self) -> int:
        """Blocks that the step in flight reads."""
        return sum(len(blocks) for blocks in self._in_transit)

    def find(self, owner: int) -> HostCopy | None:
        """Return what `owner` (a request's sequence number) holds here, or None."""
        return self._copies.get(owner)

    def put(self, owner: int, first_block: int, num_blocks: int, num_tokens: int) -> BlockIds | None:
        """Give `owner` `num_blocks` blocks; None if fewer are free, and nothing has changed then.

        Raises:
            InvariantError: it holds some already.
        """
        if owner in self._copies:
            raise InvariantError(f"request {owner} is swapped out twice")
        if num_blocks > self._num_free:
            return None
        self._num_free -= num_blocks
        blocks = self._free[self._num_free : self._num_free + num_blocks][::-1].copy()
        self._copies[owner] = HostCopy(first_block, blocks, num_tokens)
        return blocks

    def take(self, owner: int) -> HostCopy:
        """Take the owner's copy to be read by the next step; its blocks are free once that has been settled.

        Raises:
            InvariantError: it holds none.
        """
        if owner not in self._copies:
            raise InvariantError(f"request {owner} holds no host blocks")
        copy = self._copies.pop(owner)
        self._in_transit.append(copy.blocks)
        return copy

    def drop(self, owner: int) -> None:
        """Free what `owner` holds, if it holds anything."""
        copy = self._copies.pop(owner, None)
        if copy is not None:
            self._give_back(copy.blocks)

    def hand_over(self, owner: int, successor: int) -> None:
        """Give what `owner` holds, if it holds anything, to `successor`, which knows the same tokens."""
        copy = self._copies.pop(owner, None)
        if copy is not None:
            self._copies[successor] = copy

    def settle(self, failed: npt.NDArray[np.int32]) -> None:
        """Free the blocks that the step has read, and the copies that it failed to write.

        Args:
            failed: host blocks whose moves failed.
        """
        for blocks in self._in_transit:
            self._give_back(blocks)
        self._in_transit.clear()
        if len(failed):
            for owner in [owner for owner, copy in self._copies.items() if np.isin(copy.blocks, failed).any()]:
                self.drop(owner)

    def _give_back(self, blocks: BlockIds) -> None:
        count = len(blocks)
        if self._num_free + count > self.num_blocks:
            raise InvariantError(f"{count} host blocks freed onto {self._num_free} of {self.num_blocks} free ones")
        self._free[self._num_free : self._num_free + count] = blocks[::-1]
        self._num_free += count

    def check(self) -> None:
        """Verify that every block is free, held or being read, exactly once.

        Raises:
            InvariantError: it does not hold (a bug of ours).
        """
        held = [copy.blocks for copy in self._copies.values()]
        everywhere = np.concatenate((self._free[: self._num_free], *held, *self._in_transit))
        if len(everywhere) != self.num_blocks or (np.sort(everywhere) != np.arange(self.num_blocks)).any():
            raise InvariantError(f"host blocks are lost or in two places: {np.sort(everywhere).tolist()}")
