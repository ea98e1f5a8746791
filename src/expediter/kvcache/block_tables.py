"""Which blocks each running sequence owns, by slot."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from expediter.kvcache.pool import BlockIds
from expediter.kvcache.radix import PrefixMatch


class BlockTables:
    """Block tables of all slots, and how much of each lies in the prefix cache.

    Args:
        max_num_seqs: slots.
        max_blocks: most blocks of a sequence.
        refs: owners per block of the pool, int32, shape [num_blocks]; read here, never written.
    Attributes:
        ids: logical block -> block id, int32, shape [max_num_seqs, max_blocks]; rows are valid up to `num_owned`.
        num_owned: blocks per slot, int32, shape [max_num_seqs].
        num_shared: leading ones of them that lie in the prefix cache, int32, shape [max_num_seqs].
    """

    def __init__(self, max_num_seqs: int, max_blocks: int, refs: npt.NDArray[np.int32]) -> None:
        self.ids: npt.NDArray[np.int32] = np.zeros((max_num_seqs, max_blocks), np.int32)
        self.num_owned: npt.NDArray[np.int32] = np.zeros(max_num_seqs, np.int32)
        self.num_shared: npt.NDArray[np.int32] = np.zeros(max_num_seqs, np.int32)
        self._refs = refs

    def owned(self, slot: int) -> BlockIds:
        """Return a slot's blocks in order, as a view."""
        return self.ids[slot, : self.num_owned[slot]]

    # -- writing ------------------------------------------------------------------------------------------------------

    def fill(self, slot: int, first: BlockIds, rest: BlockIds, num_shared: int) -> None:
        """Give an empty slot the blocks `first` and then `rest`."""
        count, total = len(first), len(first) + len(rest)
        if count:
            self.ids[slot, :count] = first
        self.ids[slot, count:total] = rest
        self.num_owned[slot] = total
        self.num_shared[slot] = num_shared

    def append(
        self, slots: npt.NDArray[np.int32], blocks: BlockIds, ordinals: npt.NDArray[np.intp] | None = None
    ) -> None:
        """Append `blocks[i]` to the table of `slots[i]`.

        Args:
            ordinals: which of its slot's new blocks each is, from 0, ascending; None if the slots are distinct.
        """
        places = self.num_owned[slots]
        if ordinals is not None:
            places += ordinals
        self.ids[slots, places] = blocks
        places += 1
        self.num_owned[slots] = places  # of a slot that comes repeatedly, the last one stays

    def put_before(self, slots: npt.NDArray[np.int32], slot: int, count: int) -> BlockIds:
        """Put the first `count` blocks of `slot` before those of `slots`, which all have the same number of them.

        Returns:
            The blocks that come behind now, shape [len(slots), that number].
        """
        num_own = int(self.num_owned[slots[0]])
        own = self.ids[slots, :num_own]
        self.ids[slots, count : count + num_own] = own
        self.ids[slots, :count] = self.ids[slot, :count]
        self.num_owned[slots] = count + num_own
        self.num_shared[slots] = self.num_shared[slot]
        return own

    def move(self, slot: int, successor: int) -> None:
        """Give the table of `slot` to `successor`; the row of `slot` stays: a step in flight may still read it."""
        self.ids[successor, : self.num_owned[slot]] = self.owned(slot)
        self.num_owned[successor], self.num_shared[successor] = self.num_owned[slot], self.num_shared[slot]
        self.clear(slot)

    def clear(self, slot: int) -> None:
        """Let a slot own nothing; its row stays as it is."""
        self.num_owned[slot] = self.num_shared[slot] = 0

    # -- who else owns them -------------------------------------------------------------------------------------------

    def num_kept(self, slot: int) -> int:
        """Return how many leading blocks stay cached for certain if the sequence in `slot` leaves: others own them."""
        return int(np.count_nonzero(self._refs[self.ids[slot, : self.num_shared[slot]]] > 1))

    def num_exclusive(self, slot: int, kept: PrefixMatch, leaving: BlockIds) -> int:
        """Return how many more blocks would become available if the sequence in `slot` left with those before it.

        Args:
            kept: cached prefix that somebody else is about to own; its blocks do not count.
            leaving: owners of each block that are about to leave, int32, shape [num_blocks]; this one's are added.
        """
        owned = self.owned(slot)
        leaving[owned] += 1
        exclusive = self._refs[owned] == leaving[owned]
        # Both are paths from a root, so what they share lies at the same places.
        both = min(len(owned), kept.num_blocks)
        exclusive[:both] &= owned[:both] != kept.blocks[:both]
        return int(np.count_nonzero(exclusive))

    def count_exclusive(self, slots: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
        """Return for each slot how many of its blocks nobody else owns, int64, shape [len(slots)]."""
        owned = self.num_owned[slots].astype(np.int64)
        if not owned.sum():
            return owned
        starts = owned.cumsum() - owned
        columns = np.arange(owned.sum()) - np.repeat(starts, owned)
        is_exclusive = self._refs[self.ids[np.repeat(slots, owned), columns]] == 1
        sums = np.concatenate(([0], is_exclusive.cumsum()))
        counts: npt.NDArray[np.int64] = sums[starts + owned] - sums[starts]
        return counts
