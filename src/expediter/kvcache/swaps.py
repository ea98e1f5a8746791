"""KV of preempted requests on its way to the host tier and back: what moves with the plan that is being made."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from expediter.core.errors import InvariantError
from expediter.core.plan import NO_MOVES, BlockMoves
from expediter.kvcache.block_tables import BlockTables
from expediter.kvcache.pool import BlockIds
from expediter.kvcache.tiers import HostTier


class _Arrival(NamedTuple):
    """A sequence whose KV is on its way from `host_blocks`; until it is there, only `num_matched_tokens` are real."""

    num_matched_tokens: int
    host_blocks: BlockIds


class Swaps:
    """Moves KV between the slots and the host tier, as a part of steps.

    A request is known to the tier by its sequence number, `owner`.

    Args:
        host: the tier.
        tables: where the blocks of the slots are.
        block_size: tokens per block.
    """

    def __init__(self, host: HostTier, tables: BlockTables, block_size: int) -> None:
        self._host = host
        self._tables = tables
        self._block_size = block_size
        self._out: list[BlockMoves] = []
        self._into: list[BlockMoves] = []
        self._arriving: dict[int, _Arrival] = {}

    # -- out and in ---------------------------------------------------------------------------------------------------

    def num_reusable_tokens(self, owner: int, num_matched_blocks: int) -> int:
        """Return how many leading tokens of a waiting request need no computing: matched, or held by the host."""
        copy = self._host.find(owner)
        num_matched = num_matched_blocks * self._block_size
        # A copy begins behind blocks that others owned; if they are gone, there is a gap, and it is of no use.
        if copy is None or copy.first_block > num_matched_blocks:
            return num_matched
        return max(num_matched, copy.num_tokens)

    def move_out(self, slot: int, owner: int, num_tokens: int) -> int:
        """Copy the KV of a sequence that is about to leave `slot` to the host, but for the blocks that are kept.

        The contents move with the next plan, before anything is written; the device blocks need not be held for that.

        Args:
            num_tokens: its computed tokens.
        Returns:
            Tokens that move; 0 if the host has no room.
        """
        first = self._tables.num_kept(slot)
        blocks = self._tables.ids[slot, first : -(-num_tokens // self._block_size)].copy()
        targets = self._host.put(owner, first, len(blocks), num_tokens) if len(blocks) else None
        if targets is None:
            return 0
        self._out.append(BlockMoves(blocks, targets))
        return num_tokens - first * self._block_size

    def move_in(self, slot: int, owner: int, num_matched_blocks: int) -> int:
        """Bring back what the host holds of a request that was just admitted to `slot`, but for what was matched.

        Host blocks are free once the step has been settled; a copy that is of no use is given up at once.

        Returns:
            Tokens that are computed, matched ones included, as of the next plan.
        """
        num_matched = num_matched_blocks * self._block_size
        num_tokens = self.num_reusable_tokens(owner, num_matched_blocks)
        if num_tokens == num_matched:
            self._host.drop(owner)
            return num_matched
        copy = self._host.take(owner)
        sources = copy.blocks[num_matched_blocks - copy.first_block :]
        targets = self._tables.ids[slot, num_matched_blocks : num_matched_blocks + len(sources)].copy()
        self._into.append(BlockMoves(sources, targets))
        self._arriving[slot] = _Arrival(num_matched, sources)
        return num_tokens

    # -- slots whose KV is on its way ---------------------------------------------------------------------------------

    def num_there(self, slot: int, num_computed: int) -> int:
        """Return how many of the computed tokens of a sequence hold KV already."""
        arrival = self._arriving.get(slot)
        return num_computed if arrival is None else arrival.num_matched_tokens

    def move(self, slot: int, successor: int) -> None:
        """Note that what comes to `slot` is for `successor` from now on."""
        if slot in self._arriving:
            self._arriving[successor] = self._arriving.pop(slot)

    def forget(self, slot: int) -> None:
        """Note that nobody is in `slot` any more."""
        self._arriving.pop(slot, None)

    # -- steps --------------------------------------------------------------------------------------------------------

    def take(self, *, is_carried: bool) -> tuple[BlockMoves, BlockMoves]:
        """Return the moves out and in since the last call, for the plan that is being made.

        Args:
            is_carried: the plan runs something; moves never go alone.
        Raises:
            InvariantError: it does not, and there are moves.
        """
        if not (self._out or self._into):
            return NO_MOVES, NO_MOVES
        if not is_carried:
            raise InvariantError("blocks are to move, and nothing runs with them")
        out, into = _joined(self._out), _joined(self._into)
        self._out, self._into = [], []
        return out, into

    def settle(self, failed_host_blocks: tuple[int, ...]) -> list[int]:
        """Record that the moves of the last plan are done.

        Returns:
            Slots whose KV did not arrive: their sequences must leave, which commits none of it.
        """
        failed = np.array(failed_host_blocks, np.int32)
        self._host.settle(failed)
        self._arriving = {s: a for s, a in self._arriving.items() if np.isin(a.host_blocks, failed).any()}
        return list(self._arriving)


def _joined(moves: list[BlockMoves]) -> BlockMoves:
    if len(moves) <= 1:
        return moves[0] if moves else NO_MOVES
    return BlockMoves(np.concatenate([m.sources for m in moves]), np.concatenate([m.targets for m in moves]))
