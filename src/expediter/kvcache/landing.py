"""Blocks that no running sequence owns: of KV that is on its way here, that has arrived, or that waits to be sent.

One primitive serves every move of KV between replicas and storage. A *landing* owns the cached prefix that its
sequence shares and blocks of its own behind it. It is

- `ARRIVING` from `reserve` on: its own blocks hold nothing yet, and who transfers may write into them;
- `LANDED` from `complete` on: its full blocks lie in the prefix cache, the partial last one waits for the sequence.
  What a sequence leaves behind to be sent elsewhere (`keep`) is landed from the beginning;
- `QUARANTINED` if it was given up while a write could still come: its own blocks belong to nobody, and nobody gets
  them before the lease of the transfer has ended (`expire`);
- `GONE` once the sequence has taken it over, or it was released.

Completing, releasing or expiring twice, or late, changes nothing: each move looks at the status first.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator

import numpy as np

from expediter.core.errors import InvariantError
from expediter.core.request import CacheHint
from expediter.kvcache.node import NO_BLOCKS
from expediter.kvcache.pool import BlockIds, BlockPool
from expediter.kvcache.radix import NO_MATCH, PrefixMatch, RadixTree


class LandingStatus(enum.Enum):
    """Where a landing is in its life; see the module."""

    ARRIVING = "arriving"
    LANDED = "landed"
    QUARANTINED = "quarantined"
    GONE = "gone"


class Landing:
    """One sequence's blocks outside the running set. Only `Landings` and the manager write to it.

    Attributes:
        landing_id: unique in its cache.
        tokens: at least the first `num_tokens` tokens, int32 bytes.
        num_tokens: tokens whose KV is here, or will be once it has landed.
        num_matched: leading blocks that were cached when it was reserved: nothing has to be sent for them.
        blocks: all of its blocks in order; of a quarantined one only those that may still be written.
        num_shared: leading blocks that lie in the prefix cache.
        owner: sequence number of the request that it is for, or was; -1 while it is for nobody here.
        until_s: end of the quarantine.
    """

    __slots__ = (
        "blocks",
        "landing_id",
        "num_matched",
        "num_shared",
        "num_tokens",
        "owner",
        "salt",
        "status",
        "tokens",
        "until_s",
    )

    def __init__(
        self, landing_id: int, tokens: bytes, salt: str, num_tokens: int, blocks: BlockIds, num_shared: int
    ) -> None:
        self.landing_id = landing_id
        self.tokens = tokens
        self.salt = salt
        self.num_tokens = num_tokens
        self.blocks = blocks
        self.num_matched = self.num_shared = num_shared
        self.status = LandingStatus.ARRIVING
        self.owner = -1
        self.until_s = 0.0


class Landings:
    """All landings of one cache. The manager adopts them into slots and makes them of slots.

    Args:
        shortage: returns how many blocks lack for so many tokens behind a match, if so many must stay available.
        take: returns so many blocks with one owner each, evicting if it must.
        prefix_caching: whether landed blocks can be reused by others.
    """

    def __init__(
        self,
        pool: BlockPool,
        tree: RadixTree,
        block_size: int,
        shortage: Callable[[PrefixMatch, int, int], int],
        take: Callable[[int], BlockIds],
        *,
        prefix_caching: bool,
    ) -> None:
        self._pool = pool
        self._tree = tree
        self._block_size = block_size
        self._shortage = shortage
        self._take = take
        self._prefix_caching = prefix_caching
        self._held: dict[int, Landing] = {}
        self._by_owner: dict[int, Landing] = {}
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Landing]:
        """Iterate over those that hold blocks, in the order in which they were made."""
        return iter(self._held.values())

    def find(self, owner: int) -> Landing | None:
        """Return the landing of a request by its sequence number, or None."""
        return self._by_owner.get(owner)

    def assign(self, landing: Landing, owner: int) -> None:
        """Say which request will take a landed one over; there is at most one for each.

        Raises:
            InvariantError: the landing has not landed or has an owner, or the request has one already.
        """
        if landing.status is not LandingStatus.LANDED or landing.owner >= 0 or owner in self._by_owner:
            raise InvariantError(f"landing {landing.landing_id} ({landing.status.value}) cannot go to request {owner}")
        landing.owner = owner
        self._by_owner[owner] = landing

    def hand_over(self, owner: int, successor: int) -> None:
        """Give what `owner` has here, if it has anything, to `successor`, which knows the same tokens."""
        landing = self._by_owner.pop(owner, None)
        if landing is not None:
            landing.owner = successor
            self._by_owner[successor] = landing

    def unassign(self, landing: Landing) -> None:
        """Let a landing be for nobody here: its request has left, and its KV waits to be sent."""
        self._by_owner.pop(landing.owner, None)
        landing.owner = -1

    @property
    def num_quarantined_blocks(self) -> int:
        return sum(len(landing.blocks) for landing in self if landing.status is LandingStatus.QUARANTINED)

    # -- a landing's life ---------------------------------------------------------------------------------------------

    def match(self, tokens: bytes, salt: str, num_tokens: int) -> PrefixMatch:
        """Return the cached prefix that a landing of so many tokens would share; it may be all of its full blocks."""
        if not self._prefix_caching:
            return NO_MATCH
        return self._tree.match(tokens, salt, num_tokens // self._block_size)

    def reserve(
        self, tokens: bytes, salt: str, num_tokens: int, *, num_reserved: int, spare_blocks: int, now_s: float
    ) -> Landing | None:
        """Take blocks for KV that is about to come.

        Args:
            tokens: at least the first `num_tokens` tokens of the sequence, int32 bytes.
            num_tokens: tokens whose KV comes, or is here already.
            num_reserved: tokens to have blocks for, at least `num_tokens`; one more lets the sequence start for
                certain.
            spare_blocks: blocks that must stay available afterwards.
            now_s: the cache's clock from here on, if there is room.
        Returns:
            None if there is no room; then nothing has changed.
        """
        match = self.match(tokens, salt, num_tokens)
        if self._shortage(match, num_reserved, spare_blocks) > 0:
            return None
        self._tree.advance(now_s)
        self._tree.own(match)  # first, so that making room for the rest cannot evict them
        missing = -(-num_reserved // self._block_size) - match.num_blocks
        own = self._take(missing) if missing > 0 else NO_BLOCKS
        blocks = np.concatenate((match.blocks, own))
        return self._hold(Landing(self._next_id, tokens, salt, num_tokens, blocks, match.num_blocks))

    def complete(self, landing: Landing, now_s: float) -> bool:
        """Record that the bytes are here: full blocks can be reused from now.

        Where the cache got equal blocks meanwhile, the landing goes over to those and gives its own up.

        Returns:
            False if it does not wait for bytes (any more); then nothing has changed.
        """
        if landing.status is not LandingStatus.ARRIVING:
            return False
        landing.status = LandingStatus.LANDED
        self._tree.advance(now_s)
        full = landing.num_tokens // self._block_size
        if self._prefix_caching and full > landing.num_shared:
            own = landing.blocks[:full].copy()
            landing.blocks[:full] = self._tree.commit(landing.tokens, landing.salt, own, landing.num_shared)
            landing.num_shared = full
        return True

    def release(
        self, landing: Landing, now_s: float, *, writes_until_s: float | None = None, hint: CacheHint | None = None
    ) -> None:
        """Give a landing up; what lies in the prefix cache stays there, the rest is free. Twice is no error.

        Args:
            writes_until_s: until when somebody may write to an arriving one; None if nobody can any more.
            hint: what its client wishes for the cached blocks.
        """
        if landing.status not in (LandingStatus.ARRIVING, LandingStatus.LANDED):
            return
        was_arriving = landing.status is LandingStatus.ARRIVING
        shared, own = landing.num_shared, landing.blocks[landing.num_shared :]
        self._tree.disown(landing.blocks[:shared], now_s, hint)
        if was_arriving and writes_until_s is not None and writes_until_s > now_s and len(own):
            landing.status, landing.until_s = LandingStatus.QUARANTINED, writes_until_s
            landing.blocks, landing.num_shared = own, 0
            return
        self._pool.push(self._pool.disown(own))
        self._forget(landing)

    def expire(self, now_s: float) -> int:
        """Free the quarantined blocks whose time is over, and return how many."""
        over = [held for held in self if held.status is LandingStatus.QUARANTINED and held.until_s <= now_s]
        for landing in over:
            self._pool.push(self._pool.disown(landing.blocks))
            self._forget(landing)
        return sum(len(landing.blocks) for landing in over)

    # -- for the manager ----------------------------------------------------------------------------------------------

    def keep(self, tokens: bytes, salt: str, num_tokens: int, blocks: BlockIds, num_shared: int) -> Landing:
        """Take over the blocks that a sequence owned; the caller owns them no more."""
        landing = Landing(self._next_id, tokens, salt, num_tokens, blocks, num_shared)
        landing.status = LandingStatus.LANDED
        return self._hold(landing)

    def hand_out(self, landing: Landing) -> None:
        """Let a landed one go to the sequence that takes over its blocks.

        Raises:
            InvariantError: it has not landed, or is gone.
        """
        if landing.status is not LandingStatus.LANDED:
            raise InvariantError(f"landing {landing.landing_id} is {landing.status.value} and cannot be adopted")
        self._forget(landing)

    def _hold(self, landing: Landing) -> Landing:
        self._next_id += 1
        self._held[landing.landing_id] = landing
        return landing

    def _forget(self, landing: Landing) -> None:
        landing.status = LandingStatus.GONE
        del self._held[landing.landing_id]
        self._by_owner.pop(landing.owner, None)

    def count_owners(self, owners: BlockIds) -> None:
        """Add the landings' blocks to a count of owners per block (for checks).

        Raises:
            InvariantError: a landing is held that should be gone.
        """
        for landing in self:
            if landing.status is LandingStatus.GONE:
                raise InvariantError(f"landing {landing.landing_id} is gone and still held")
            np.add.at(owners, landing.blocks, 1)
