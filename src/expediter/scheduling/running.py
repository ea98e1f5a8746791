"""The running set: who holds a slot and blocks, decoding or still computing its prompt."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from expediter.core.errors import InvariantError
from expediter.core.plan import NO_COPIES, IntArray
from expediter.core.request import CacheHint, RequestState, Status
from expediter.kvcache.manager import KVCacheManager
from expediter.kvcache.radix import PrefixMatch
from expediter.scheduling.decoding import DecodingBatch
from expediter.scheduling.ordering.base import Ordering


class RunningSet:
    """Slots, blocks and step arrays of running sequences; they come and go together here and nowhere else.

    Attributes:
        decoding: sequences that have caught up, one token per step each.
        prefilling: sequences with more to compute, in order of admission; followers hold slots and blocks beside their
            leader and are not listed.
        decode_clock: decode steps so far; what a sequence got while it decoded is a difference of two readings.
    """

    def __init__(self, kv: KVCacheManager, max_num_seqs: int, ordering: Ordering) -> None:
        self.kv = kv
        self._ordering = ordering
        self.decoding = DecodingBatch(max_num_seqs)
        self.prefilling: list[RequestState] = []
        self.decode_clock = 0
        self._max_num_seqs = max_num_seqs
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._copies: list[IntArray] = []

    def __len__(self) -> int:
        return self._max_num_seqs - len(self._free_slots)

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def has_slot(self) -> bool:
        return bool(self._free_slots)

    def follower_blocks(self, leader: RequestState, num_tokens: int) -> int:
        """Return the blocks that each follower needs beside the full blocks of the prompt, which it will share.

        At least one: for the tokens behind the last full block, or for the first one that it computes itself.

        Args:
            num_tokens: what each sequence of the group gets blocks for.
        """
        shared = leader.num_known_tokens // self.kv.block_size
        return max(1, self.kv.blocks_for(num_tokens) - shared)

    def blocks_beside(self, leader: RequestState, num_tokens: int) -> int:
        """Return the blocks that all followers of `leader` need together, 0 if it has none; as `follower_blocks`."""
        return len(leader.followers) * self.follower_blocks(leader, num_tokens) if leader.followers else 0

    def enter(self, state: RequestState, match: PrefixMatch, num_tokens: int, spare_blocks: int, now_s: float) -> bool:
        """Give a request a slot and blocks for `num_tokens` tokens, matched ones first; its followers what they need.

        What the host holds of it beyond the match moves in with the plan, and counts as computed.

        Returns:
            False if there is no room for all of them; then nothing has changed.
        """
        if len(self._free_slots) < len(state.members):
            return False
        spare_blocks += self.blocks_beside(state, num_tokens)
        landing = self.kv.landings.find(state.sequence)
        resumes, slot = state.num_preemptions > 0, self._free_slots[-1]
        if landing is not None:
            if not self.kv.adopt(slot, landing, num_tokens, self.blocks_beside(state, num_tokens), now_s):
                return False
            state.num_computed_tokens = landing.num_tokens
        else:
            if not self.kv.admit(slot, match, num_tokens, spare_blocks, now_s, resumes=resumes):
                return False
            state.num_computed_tokens = self.kv.swaps.move_in(slot, state.sequence, match.num_blocks)
        state.slot = self._free_slots.pop()
        if landing is not None and state.output and landing.num_tokens == state.num_known_tokens - 1:
            # All its KV came along: it decodes at once.
            self.decoding.join(state, int(self.kv.tables.num_owned[slot]) * self.kv.block_size)
        else:
            self.prefilling.append(state)
        for follower in state.followers:
            follower.slot = self._free_slots.pop()
            self.kv.hold(follower.slot, self.follower_blocks(state, num_tokens))
        return True

    def shortage(self, state: RequestState, match: PrefixMatch, num_tokens: int, spare_blocks: int) -> int:
        """Return how many blocks `enter` would lack, its followers' included; at most 0 if they suffice."""
        landing = self.kv.landings.find(state.sequence)
        if landing is not None:
            missing = max(0, self.kv.blocks_for(num_tokens) - len(landing.blocks))
            return missing + self.blocks_beside(state, num_tokens) - self.kv.num_available_blocks
        return self.kv.shortage(match, num_tokens, spare_blocks + self.blocks_beside(state, num_tokens))

    def compute(self, state: RequestState, num_tokens: int) -> None:
        """Record that a prefilling sequence computed `num_tokens` more; full blocks of them can be reused from now.

        A group whose leader has caught up forks: its sequences share the prompt's full blocks and are on their own.
        """
        state.num_computed_tokens += num_tokens
        self.kv.commit(state.slot, state.token_bytes, state.request.cache_salt, state.num_computed_tokens)
        if state.followers and state.num_computed_tokens == state.num_known_tokens:
            followers = state.part()
            slots = np.array([follower.slot for follower in followers], np.int32)
            self._copies.append(self.kv.fork(state.slot, slots, state.num_computed_tokens))
            for follower in followers:
                follower.num_computed_tokens = state.num_computed_tokens
                self._ordering.admitted(follower, 0, self.decode_clock)
            self.prefilling += followers

    def take_copies(self) -> IntArray:
        """Return the block copies that are due before the next step, source and destination, shape [2, num_copies]."""
        if not self._copies:
            return NO_COPIES
        copies, self._copies = self._copies, []
        return np.concatenate(copies, axis=1)

    def catch_up(self, states: list[RequestState]) -> None:
        """Move sequences whose newest known token is their only uncomputed one over to decoding."""
        members = {state.slot for state in states}
        self.prefilling = [state for state in self.prefilling if state.slot not in members]
        for state in states:
            self.decoding.join(state, int(self.kv.tables.num_owned[state.slot]) * self.kv.block_size)
            self._ordering.joined(state, self.decode_clock)

    def advance(self, tokens: IntArray, now_s: float) -> list[RequestState]:
        """Append a token per step to every decoding sequence; return those that ended, with their blocks back.

        Args:
            tokens: int32, shape [num_steps, decoding.size].
        """
        self.decode_clock += len(tokens)
        rows = self.decoding.advance(tokens)
        if not len(rows):
            return []
        ended = self.decoding.leave(rows)
        for state in ended:
            self._ordering.left(state, self.decode_clock)
            self._end(state, now_s)
        return ended

    def leave(self, state: RequestState, now_s: float) -> RequestState | None:
        """Take a sequence out that ends; its known tokens are complete then, its blocks as its client wished.

        Returns:
            Who goes on with the prompt if the sequence led a group.
        """
        if state.leader is not None:
            state.fall_out()
            self._give_back(state, now_s, None)
            return None
        successor = state.fall_out()
        if successor is not None:
            self._ordering.left(state, self.decode_clock)
            self._put_in_place(successor, state)
            return successor
        self._withdraw(state)
        self._end(state, now_s)
        return None

    def depart(self, state: RequestState, now_s: float) -> None:
        """Take a sequence out that goes on elsewhere, with its followers; its KV is kept if it is marked so."""
        for follower in reversed(state.followers):
            self._give_back(follower, now_s, None)
        self._withdraw(state)
        if state.is_kept:
            self._end(state, now_s)
        else:
            self._give_back(state, now_s, None)

    def _withdraw(self, state: RequestState) -> None:
        if state in self.prefilling:
            self.prefilling.remove(state)
        else:
            self.decoding.leave(np.array([self.decoding.row_of(state)]))
        self._ordering.left(state, self.decode_clock)

    def _put_in_place(self, successor: RequestState, state: RequestState) -> None:
        self._ordering.admitted(successor, 0, self.decode_clock)
        self.kv.hand_over(state.slot, successor.slot)
        successor.num_computed_tokens = state.num_computed_tokens
        self.prefilling[self.prefilling.index(state)] = successor
        self._free(state)

    def suspend(self, state: RequestState, now_s: float, swaps: Callable[[int], bool]) -> int:
        """Take a sequence out with its followers; they stay with it and come back with it.

        Args:
            swaps: whether its KV should go to the host, given the leading tokens that stay cached for certain.
        Returns:
            Tokens whose KV goes there.
        """
        for follower in reversed(state.followers):
            self._give_back(follower, now_s, None)
        self._withdraw(state)
        num_swapped = 0
        if self.kv.host.num_free:
            num_kept = self.kv.tables.num_kept(state.slot) * self.kv.block_size
            if num_kept < state.num_computed_tokens and swaps(num_kept):
                num_swapped = self.kv.swaps.move_out(state.slot, state.sequence, state.num_computed_tokens)
        self._give_back(state, now_s, None)
        return num_swapped

    def _end(self, state: RequestState, now_s: float) -> None:
        """Take the blocks back of one that ended, as its client wished, or keep them for a transfer."""
        if not state.is_kept:
            self._give_back(state, now_s, state.request.cache_hint)
            return
        self.kv.commit(state.slot, state.token_bytes, state.request.cache_salt, state.num_computed_tokens)
        kept = self.kv.keep(state.slot, state.token_bytes, state.request.cache_salt, state.num_computed_tokens)
        self.kv.landings.assign(kept, state.sequence)
        self._free(state)

    def _give_back(self, state: RequestState, now_s: float, hint: CacheHint | None) -> None:
        """What was computed stays in the prefix cache for who comes with the same tokens."""
        self.kv.commit(state.slot, state.token_bytes, state.request.cache_salt, state.num_computed_tokens)
        self.kv.release(state.slot, now_s, hint)
        self._free(state)

    def _free(self, state: RequestState) -> None:
        self._free_slots.append(state.slot)
        state.slot = -1

    def is_decoding(self, state: RequestState) -> bool:
        return state not in self.prefilling

    def grow(self, make_room: Callable[[], None]) -> None:
        """Give every decoding sequence at a block edge a block for its next token.

        Args:
            make_room: takes one running sequence out; called until the others' needs are met.
        """
        decoding, kv = self.decoding, self.kv
        rows = decoding.at_edge()
        while len(rows) > kv.num_available_blocks:
            make_room()
            rows = decoding.at_edge()
        if len(rows):
            kv.tables.append(decoding.slots[rows], kv.take(len(rows)))
            decoding.add_room(rows, kv.block_size)

    def grow_for_run(self, num_steps: int) -> None:
        """Give the decoding sequences the blocks of `num_steps` steps, the first of which has its blocks already."""
        decoding = self.decoding
        rows, ordinals = decoding.edges_in_run(num_steps, self.kv.block_size)
        if len(rows):
            self.kv.tables.append(decoding.slots[rows], self.kv.take(len(rows)), ordinals)
            decoding.add_room(rows, (ordinals + 1) * self.kv.block_size)

    def check(self) -> None:
        """Verify slots and blocks against each other.

        Raises:
            InvariantError: they disagree (a bug of ours).
        """
        self.kv.check()
        leading = [member for state in self.prefilling for member in state.members]
        running = [*leading, *self.decoding.states[: self.decoding.size]]
        slots = sorted([state.slot for state in running] + self._free_slots)
        if slots != list(range(len(self.kv.tables.num_owned))):
            raise InvariantError(f"slots are lost or held twice: {slots}")
        if {state.slot for state in running} != set(np.flatnonzero(self.kv.tables.num_owned).tolist()):
            raise InvariantError("blocks are owned by a slot that does not run")
        if any(state.status is not Status.RUNNING for state in running):
            raise InvariantError("a request that does not run is in a batch")
