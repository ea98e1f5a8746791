"""KV blocks of running sequences: block tables by slot, over the pool and the prefix cache."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from expediter.core.errors import ConfigurationError, InvariantError
from expediter.core.plan import NO_MOVES, BlockMoves
from expediter.core.request import CacheHint
from expediter.kvcache.eviction import EvictionPolicy
from expediter.kvcache.landing import Landing, Landings
from expediter.kvcache.pool import BlockIds, BlockPool
from expediter.kvcache.radix import NO_MATCH, PrefixMatch, RadixTree
from expediter.kvcache.tiers import HostTier


class _Arrival(NamedTuple):
    """A sequence whose KV is on its way from `host_blocks`; until it is there, only `num_matched_tokens` are real."""

    num_matched_tokens: int
    host_blocks: BlockIds


class KVCacheManager:
    """Gives running sequences their blocks and takes them back exactly once.

    Args:
        num_blocks: size of the pool.
        block_size: tokens per block.
        max_num_seqs: slots.
        max_model_len: longest sequence, in tokens.
        prefix_caching: keep the blocks of ended sequences for reuse.
        num_host_blocks: size of the host tier.
        eviction: which cached blocks go first; it serves this cache only. None for least recently used.
        max_pinned_share: most of the pool that clients' pins may hold, in [0, 1].
    Attributes:
        tables: logical block -> block id, int32, shape [max_num_seqs, max_blocks]; rows are valid up to `num_owned`.
        num_owned: blocks per slot, int32, shape [max_num_seqs].
        landings: blocks outside the slots, for KV that comes from elsewhere or goes there.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        prefix_caching: bool = True,
        num_host_blocks: int = 0,
        eviction: EvictionPolicy | None = None,
        max_pinned_share: float = 0.25,
    ) -> None:
        if block_size < 1:
            raise ConfigurationError(f"block_size must be at least 1, not {block_size}")
        if not 0 <= max_pinned_share <= 1:
            raise ConfigurationError(f"max_pinned_share must lie between 0 and 1, not {max_pinned_share}")
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.host = HostTier(num_host_blocks)
        self.tree = RadixTree(self.pool, block_size, eviction, max_pinned_share)
        self.prefix_caching = prefix_caching
        # A sequence never owns more than the pool, however long the model would let it grow.
        max_blocks = min(self.blocks_for(max_model_len), num_blocks)
        self.tables: npt.NDArray[np.int32] = np.zeros((max_num_seqs, max_blocks), np.int32)
        self.num_owned: npt.NDArray[np.int32] = np.zeros(max_num_seqs, np.int32)
        self._num_shared: npt.NDArray[np.int32] = np.zeros(max_num_seqs, np.int32)
        self._swaps_out: list[BlockMoves] = []
        self._swaps_in: list[BlockMoves] = []
        self._arriving: dict[int, _Arrival] = {}
        self.landings = Landings(self.pool, self.tree, block_size, self.take, prefix_caching=prefix_caching)

    # -- sizes --------------------------------------------------------------------------------------------------------

    def blocks_for(self, num_tokens: int) -> int:
        """Return the blocks that `num_tokens` tokens fill."""
        return -(-num_tokens // self.block_size)

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that hold nothing."""
        return self.pool.num_free

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that only the prefix cache holds; they can be evicted."""
        return self.tree.num_evictable

    @property
    def num_available_blocks(self) -> int:
        """Blocks that can be handed out now: free ones and cached ones."""
        return self.pool.num_free + self.tree.num_evictable

    @property
    def num_used_blocks(self) -> int:
        """Blocks that running sequences and landings own; shared ones count once."""
        return self.pool.num_blocks - self.num_available_blocks

    def num_exclusive_blocks(self, slot: int, kept: PrefixMatch, leaving: BlockIds) -> int:
        """Return how many more blocks would become available if the sequence in `slot` left with those before it.

        Args:
            kept: cached prefix that somebody else is about to own; its blocks do not count.
            leaving: owners of each block that are about to leave, int32, shape [num_blocks]; this one's are added.
        """
        owned = self._owned(slot)
        leaving[owned] += 1
        exclusive = self.pool.refs[owned] == leaving[owned]
        # Both are paths from a root, so what they share lies at the same places.
        both = min(len(owned), kept.num_blocks)
        exclusive[:both] &= owned[:both] != kept.blocks[:both]
        return int(np.count_nonzero(exclusive))

    def count_exclusive_blocks(self, slots: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
        """Return for each slot how many of its blocks nobody else owns, int64, shape [len(slots)]."""
        owned = self.num_owned[slots].astype(np.int64)
        if not owned.sum():
            return owned
        starts = owned.cumsum() - owned
        columns = np.arange(owned.sum()) - np.repeat(starts, owned)
        is_exclusive = self.pool.refs[self.tables[np.repeat(slots, owned), columns]] == 1
        sums = np.concatenate(([0], is_exclusive.cumsum()))
        counts: npt.NDArray[np.int64] = sums[starts + owned] - sums[starts]
        return counts

    # -- a sequence's life --------------------------------------------------------------------------------------------

    def match(self, tokens: bytes, salt: str) -> PrefixMatch:
        """Return the cached prefix of a sequence, leaving at least its last token to compute.

        A step must compute one token to have something to sample from, even if every block is cached.

        Args:
            tokens: all known tokens as int32 bytes.
        """
        if not self.prefix_caching:
            return NO_MATCH
        return self.tree.match(tokens, salt, (len(tokens) // 4 - 1) // self.block_size)

    def shortage(self, match: PrefixMatch, num_tokens: int, spare_blocks: int) -> int:
        """Return how many blocks `admit` would lack with the same arguments; at most 0 if it would succeed."""
        ownerless = match.num_blocks - int(np.count_nonzero(self.pool.refs[match.blocks]))
        missing = self.blocks_for(num_tokens) - match.num_blocks
        return missing + spare_blocks - (self.num_available_blocks - ownerless)

    def admit(
        self,
        slot: int,
        match: PrefixMatch,
        num_tokens: int,
        spare_blocks: int,
        now_s: float,
        *,
        resumes: bool = False,
    ) -> bool:
        """Give `slot` the matched blocks and new ones up to `num_tokens` tokens.

        Args:
            spare_blocks: blocks that must stay available afterwards.
            now_s: the cache's clock from here on, if there is room. It moves when a sequence comes or goes and not in
                between, so what steps without either evict does not depend on when they are made.
            resumes: the sequence was here before; what it finds again is no reuse by another.
        Returns:
            False if there is no room; then nothing has changed.
        """
        if self.shortage(match, num_tokens, spare_blocks) > 0:
            return False
        missing = self.blocks_for(num_tokens) - match.num_blocks
        self.tree.advance(now_s)
        if match.num_blocks:
            # Owned first, so that making room for the rest cannot evict them.
            self.tree.num_evictable -= self.pool.acquire(match.blocks)
            (self.tree.touch if resumes else self.tree.hit)(int(match.blocks[-1]))
            self.tables[slot, : match.num_blocks] = match.blocks
        self.tables[slot, match.num_blocks : match.num_blocks + missing] = self.take(missing)
        self.num_owned[slot] = match.num_blocks + missing
        self._num_shared[slot] = match.num_blocks
        return True

    def take(self, count: int) -> BlockIds:
        """Return `count` blocks with one owner each, evicting where free ones run out.

        Free blocks go first: cached contents are worth more than none.

        Raises:
            InvariantError: fewer are available; callers look first.
        """
        num_free = self.pool.num_free
        if count <= num_free:
            return self.pool.pop(count)
        evicted = self.tree.evict(count - num_free)
        self.pool.refs[evicted] = 1
        return np.concatenate((self.pool.pop(num_free), evicted)) if num_free else evicted

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
        self.tables[slots, places] = blocks
        places += 1
        self.num_owned[slots] = places  # of a slot that comes repeatedly, the last one stays

    def commit(self, slot: int, tokens: bytes, salt: str, num_computed: int) -> None:
        """Make the full blocks of the first `num_computed` tokens reusable.

        Where the cache already holds equal blocks, the sequence goes over to those and gives its own up.

        Args:
            tokens: the sequence's tokens as int32 bytes, at least `num_computed`.
        """
        if slot in self._arriving:
            num_computed = self._arriving[slot].num_matched_tokens
        full = num_computed // self.block_size
        shared = int(self._num_shared[slot])
        if not self.prefix_caching or full <= shared:
            return
        own = self.tables[slot, :full].copy()
        blocks = self.tree.commit(tokens, salt, own, shared)
        self._num_shared[slot] = full
        if blocks is not own:
            self.tables[slot, :full] = blocks

    # -- groups -------------------------------------------------------------------------------------------------------

    def hold(self, slot: int, count: int) -> None:
        """Give `slot` blocks of its own ahead of the prefix that it will share: `fork` or `hand_over` comes next.

        Raises:
            InvariantError: fewer are available; `admit` of the leader has looked.
        """
        self.tables[slot, :count] = self.take(count)
        self.num_owned[slot] = count

    def fork(self, slot: int, followers: npt.NDArray[np.int32], num_computed: int) -> npt.NDArray[np.int32]:
        """Share the full blocks of the first `num_computed` tokens of `slot` with `followers`.

        They go on with the blocks that they held, all the same number.

        Returns:
            Blocks to copy before anybody computes on, source and destination, int32, shape [2, num_copies]: the partial
            last block to each follower's first own one; none at a block edge.
        """
        full = num_computed // self.block_size
        count = int(self.num_owned[followers[0]])
        shared, own = self.tables[slot, :full], self.tables[followers, :count]
        self.tables[followers, full : full + count] = own
        self.tables[followers, :full] = shared
        self.pool.refs[shared] += len(followers)
        self.num_owned[followers] = full + count
        self._num_shared[followers] = self._num_shared[slot]
        if num_computed == full * self.block_size:
            return np.empty((2, 0), np.int32)
        return np.stack((np.full(len(followers), self.tables[slot, full]), own[:, 0]))

    def hand_over(self, slot: int, successor: int) -> None:
        """Give the blocks of `slot` to `successor`, which gives up those that it held.

        The row of `slot` stays as it is: a step in flight may still read it.
        """
        self.pool.push(self.pool.disown(self._owned(successor)))
        count = int(self.num_owned[slot])
        self.tables[successor, :count] = self._owned(slot)
        for per_slot in (self.num_owned, self._num_shared):
            per_slot[successor], per_slot[slot] = per_slot[slot], 0
        if slot in self._arriving:
            self._arriving[successor] = self._arriving.pop(slot)

    def release(self, slot: int, now_s: float, hint: CacheHint | None = None) -> None:
        """Take all blocks of `slot` back; committed ones stay cached, the others are free.

        Args:
            now_s: the cache's clock from here on.
            hint: what its client wishes for the committed ones.
        """
        owned = self._owned(slot)
        if not len(owned):
            raise InvariantError(f"slot {slot} owns no blocks")
        shared = int(self._num_shared[slot])
        cached = self.pool.disown(owned[:shared])
        self.pool.push(self.pool.disown(owned[shared:]))
        self.tree.num_evictable += len(cached)
        self.tree.advance(now_s)
        if shared:
            last = int(owned[shared - 1])
            self.tree.touch(last)
            if hint is not None and hint.drop:
                self.pool.push(self.tree.drop(last))
            elif hint is not None:
                self.tree.pin(last, now_s + hint.pin_s)
        self.num_owned[slot] = 0
        self._num_shared[slot] = 0
        self._arriving.pop(slot, None)

    # -- landings -----------------------------------------------------------------------------------------------------

    def adopt(self, slot: int, landing: Landing, num_tokens: int, spare_blocks: int, now_s: float) -> bool:
        """Give `slot` the blocks of a landing, which is gone then, and new ones up to `num_tokens` tokens.

        Args:
            spare_blocks: blocks that must stay available afterwards.
        Returns:
            False if there is no room for what it does not hold; then nothing has changed.
        """
        missing = max(0, self.blocks_for(num_tokens) - len(landing.blocks))
        if missing + spare_blocks > self.num_available_blocks:
            return False
        self.landings.hand_out(landing)
        self.tree.advance(now_s)
        count = len(landing.blocks)
        self.tables[slot, :count] = landing.blocks
        if missing:
            self.tables[slot, count : count + missing] = self.take(missing)
        self.num_owned[slot] = count + missing
        self._num_shared[slot] = landing.num_shared
        return True

    def keep(self, slot: int, tokens: bytes, salt: str, num_computed: int) -> Landing:
        """Make a landing of what a sequence in `slot` owns, committed already; the slot owns nothing afterwards.

        Blocks behind its computed tokens are free.

        Args:
            tokens: the sequence's tokens as int32 bytes, at least `num_computed`.
        """
        if slot in self._arriving:
            num_computed = self._arriving.pop(slot).num_matched_tokens
        owned, count = self._owned(slot), self.blocks_for(num_computed)
        self.pool.push(self.pool.disown(owned[count:]))
        kept = owned[:count].copy()
        shared = int(self._num_shared[slot])
        self.num_owned[slot] = 0
        self._num_shared[slot] = 0
        return self.landings.keep(tokens, salt, num_computed, kept, shared)

    def _owned(self, slot: int) -> BlockIds:
        return self.tables[slot, : self.num_owned[slot]]

    # -- the host tier ------------------------------------------------------------------------------------------------

    def num_kept_blocks(self, slot: int) -> int:
        """Return how many leading blocks stay cached for certain if the sequence in `slot` leaves: others own them."""
        return int(np.count_nonzero(self.pool.refs[self.tables[slot, : self._num_shared[slot]]] > 1))

    def num_reusable_tokens(self, owner: int, match: PrefixMatch) -> int:
        """Return how many leading tokens of a waiting request need no computing: matched, landed, or held by the host.

        Args:
            owner: its sequence number.
        """
        landing = self.landings.find(owner)
        if landing is not None:
            return landing.num_tokens
        copy = self.host.find(owner)
        num_matched = match.num_blocks * self.block_size
        # A copy begins behind blocks that others owned; if they are gone, there is a gap, and it is of no use.
        if copy is None or copy.first_block > match.num_blocks:
            return num_matched
        return max(num_matched, copy.num_tokens)

    def swap_out(self, slot: int, owner: int, num_tokens: int) -> int:
        """Copy the KV of a sequence that is about to leave `slot` to the host, but for the blocks that are kept.

        The contents move with the next plan, before anything is written; the device blocks need not be held for that.

        Args:
            owner: sequence number of the request.
            num_tokens: its computed tokens.
        Returns:
            Tokens that move; 0 if the host has no room.
        """
        first = self.num_kept_blocks(slot)
        blocks = self.tables[slot, first : self.blocks_for(num_tokens)].copy()
        targets = self.host.put(owner, first, len(blocks), num_tokens) if len(blocks) else None
        if targets is None:
            return 0
        self._swaps_out.append(BlockMoves(blocks, targets))
        return num_tokens - first * self.block_size

    def swap_in(self, slot: int, owner: int, match: PrefixMatch) -> int:
        """Bring back what the host holds of a request that was just admitted to `slot`, but for what was matched.

        Host blocks are free once the step has been settled; a copy that is of no use is given up at once.

        Returns:
            Tokens that are computed, matched ones included, as of the next plan.
        """
        num_matched = match.num_blocks * self.block_size
        num_tokens = self.num_reusable_tokens(owner, match)
        if num_tokens == num_matched:
            self.host.drop(owner)
            return num_matched
        copy = self.host.take(owner)
        sources = copy.blocks[match.num_blocks - copy.first_block :]
        targets = self.tables[slot, match.num_blocks : match.num_blocks + len(sources)].copy()
        self._swaps_in.append(BlockMoves(sources, targets))
        self._arriving[slot] = _Arrival(num_matched, sources)
        return num_tokens

    def take_swaps(self) -> tuple[BlockMoves, BlockMoves]:
        """Return the moves out and in since the last call, for the plan that is being made."""
        if not (self._swaps_out or self._swaps_in):
            return NO_MOVES, NO_MOVES
        out, into = _joined(self._swaps_out), _joined(self._swaps_in)
        self._swaps_out, self._swaps_in = [], []
        return out, into

    def settle_swaps(self, failed_host_blocks: tuple[int, ...]) -> list[int]:
        """Record that the moves of the last plan are done.

        Returns:
            Slots whose KV did not arrive: their sequences must leave, which commits none of it.
        """
        failed = np.array(failed_host_blocks, np.int32)
        self.host.settle(failed)
        self._arriving = {s: a for s, a in self._arriving.items() if np.isin(a.host_blocks, failed).any()}
        return list(self._arriving)

    # -- integrity ----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Verify that every block is free, cached or used, exactly once, and has as many owners as it counts.

        Raises:
            InvariantError: it does not hold (a bug of ours).
        """
        self.tree.check()
        self.host.check()
        owners = np.zeros(self.num_blocks, np.int32)
        for slot in np.flatnonzero(self.num_owned):
            np.add.at(owners, self._owned(int(slot)), 1)
        self.landings.count_owners(owners)
        if (owners != self.pool.refs).any():
            raise InvariantError(f"owners of blocks {np.flatnonzero(owners != self.pool.refs).tolist()} are miscounted")
        state = (owners > 0).astype(np.int32)
        state += (owners == 0) & self.tree.holds(np.arange(self.num_blocks, dtype=np.int32))
        np.add.at(state, self.pool.free_ids(), 1)
        if (state != 1).any():
            raise InvariantError(f"blocks {np.flatnonzero(state != 1).tolist()} are lost or in two places")


def _joined(moves: list[BlockMoves]) -> BlockMoves:
    if len(moves) <= 1:
        return moves[0] if moves else NO_MOVES
    return BlockMoves(np.concatenate([m.sources for m in moves]), np.concatenate([m.targets for m in moves]))
