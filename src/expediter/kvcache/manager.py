"""KV blocks of running sequences: who gets which from the pool and the prefix cache, and gives them back."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from expediter.core.errors import ConfigurationError, InvariantError
from expediter.core.request import CacheHint
from expediter.kvcache.block_tables import BlockTables
from expediter.kvcache.eviction import EvictionPolicy
from expediter.kvcache.landing import Landing, Landings
from expediter.kvcache.node import NO_BLOCKS
from expediter.kvcache.pool import BlockIds, BlockPool
from expediter.kvcache.radix import NO_MATCH, PrefixMatch, RadixTree
from expediter.kvcache.swaps import Swaps
from expediter.kvcache.tiers import HostTier


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
        tables: which blocks the sequence in each slot owns.
        landings: blocks outside the slots, for KV that comes from elsewhere or goes there.
        host: blocks in host memory, of preempted requests.
        swaps: their way there and back.
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
        self.tables = BlockTables(max_num_seqs, max_blocks, self.pool.refs)
        self.swaps = Swaps(self.host, self.tables, block_size)
        self.landings = Landings(
            self.pool, self.tree, block_size, self.shortage, self.take, prefix_caching=prefix_caching
        )

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
        """Return how many blocks lack for `num_tokens` tokens behind a match; at most 0 if there are enough.

        Args:
            spare_blocks: blocks that must stay available afterwards.
        """
        missing = self.blocks_for(num_tokens) - match.num_blocks
        return missing + spare_blocks - (self.num_available_blocks - self.tree.num_ownerless(match))

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
        self.tree.own(match, resumes=resumes)  # first, so that making room for the rest cannot evict them
        self.tables.fill(slot, match.blocks, self.take(missing), match.num_blocks)
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

    def commit(self, slot: int, tokens: bytes, salt: str, num_computed: int) -> None:
        """Make the full blocks of the first `num_computed` tokens reusable.

        Where the cache already holds equal blocks, the sequence goes over to those and gives its own up.

        Args:
            tokens: the sequence's tokens as int32 bytes, at least `num_computed`.
        """
        full = self.swaps.num_there(slot, num_computed) // self.block_size
        shared = int(self.tables.num_shared[slot])
        if not self.prefix_caching or full <= shared:
            return
        own = self.tables.ids[slot, :full].copy()
        blocks = self.tree.commit(tokens, salt, own, shared)
        self.tables.num_shared[slot] = full
        if blocks is not own:
            self.tables.ids[slot, :full] = blocks

    # -- groups -------------------------------------------------------------------------------------------------------

    def hold(self, slot: int, count: int) -> None:
        """Give `slot` blocks of its own ahead of the prefix that it will share: `fork` or `hand_over` comes next.

        Raises:
            InvariantError: fewer are available; `admit` of the leader has looked.
        """
        self.tables.fill(slot, NO_BLOCKS, self.take(count), 0)

    def fork(self, slot: int, followers: npt.NDArray[np.int32], num_computed: int) -> npt.NDArray[np.int32]:
        """Share the full blocks of the first `num_computed` tokens of `slot` with `followers`.

        They go on with the blocks that they held, all the same number.

        Returns:
            Blocks to copy before anybody computes on, source and destination, int32, shape [2, num_copies]: the partial
            last block to each follower's first own one; none at a block edge.
        """
        full = num_computed // self.block_size
        own = self.tables.put_before(followers, slot, full)
        self.pool.refs[self.tables.ids[slot, :full]] += len(followers)
        if num_computed == full * self.block_size:
            return np.empty((2, 0), np.int32)
        return np.stack((np.full(len(followers), self.tables.ids[slot, full]), own[:, 0]))

    def hand_over(self, slot: int, successor: int) -> None:
        """Give the blocks of `slot` to `successor`, which gives up those that it held."""
        self.pool.push(self.pool.disown(self.tables.owned(successor)))
        self.tables.move(slot, successor)
        self.swaps.move(slot, successor)

    def release(self, slot: int, now_s: float, hint: CacheHint | None = None) -> None:
        """Take all blocks of `slot` back; committed ones stay cached, the others are free.

        Args:
            now_s: the cache's clock from here on.
            hint: what its client wishes for the committed ones.
        """
        owned = self.tables.owned(slot)
        if not len(owned):
            raise InvariantError(f"slot {slot} owns no blocks")
        shared = int(self.tables.num_shared[slot])
        self.pool.push(self.pool.disown(owned[shared:]))
        self.tree.disown(owned[:shared], now_s, hint)
        self.tables.clear(slot)
        self.swaps.forget(slot)

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
        self.tables.fill(slot, landing.blocks, self.take(missing), landing.num_shared)
        return True

    def keep(self, slot: int, tokens: bytes, salt: str, num_computed: int) -> Landing:
        """Make a landing of what a sequence in `slot` owns, committed already; the slot owns nothing afterwards.

        Blocks behind its computed tokens are free.

        Args:
            tokens: the sequence's tokens as int32 bytes, at least `num_computed`.
        """
        num_there = self.swaps.num_there(slot, num_computed)
        owned, count = self.tables.owned(slot), self.blocks_for(num_there)
        self.pool.push(self.pool.disown(owned[count:]))
        kept, shared = owned[:count].copy(), int(self.tables.num_shared[slot])
        self.tables.clear(slot)
        self.swaps.forget(slot)
        return self.landings.keep(tokens, salt, num_there, kept, shared)

    def num_reusable_tokens(self, owner: int, match: PrefixMatch) -> int:
        """Return how many leading tokens of a waiting request need no computing: matched, landed, or held by the host.

        Args:
            owner: its sequence number.
        """
        landing = self.landings.find(owner)
        return self.swaps.num_reusable_tokens(owner, match.num_blocks) if landing is None else landing.num_tokens

    # -- integrity ----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Verify that every block is free, cached or used, exactly once, and has as many owners as it counts.

        Raises:
            InvariantError: it does not hold (a bug of ours).
        """
        self.tree.check()
        self.host.check()
        owners = np.zeros(self.num_blocks, np.int32)
        for slot in np.flatnonzero(self.tables.num_owned):
            np.add.at(owners, self.tables.owned(int(slot)), 1)
        self.landings.count_owners(owners)
        if (owners != self.pool.refs).any():
            raise InvariantError(f"owners of blocks {np.flatnonzero(owners != self.pool.refs).tolist()} are miscounted")
        state = (owners > 0).astype(np.int32)
        state += (owners == 0) & self.tree.nodes.holds(np.arange(self.num_blocks, dtype=np.int32))
        np.add.at(state, self.pool.free_ids(), 1)
        if (state != 1).any():
            raise InvariantError(f"blocks {np.flatnonzero(state != 1).tolist()} are lost or in two places")
