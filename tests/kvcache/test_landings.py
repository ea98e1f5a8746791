"""Landings: blocks reserved for KV that comes from elsewhere, whatever comes late, twice or never."""

import copy
from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from expediter.core.errors import InvariantError
from expediter.core.request import CacheHint
from expediter.kvcache.landing import LandingStatus
from expediter.kvcache.manager import KVCacheManager

STEMS = ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [3, 1, 4, 1, 5, 9, 7, 1, 8, 2, 8, 1])
LEASE_S = 5.0


def as_bytes(tokens):
    return np.array(tokens, np.int32).tobytes()


def manager(num_blocks=8, block_size=2, prefix_caching=True):
    return KVCacheManager(
        num_blocks=num_blocks, block_size=block_size, max_num_seqs=3, max_model_len=40, prefix_caching=prefix_caching
    )


def reserve(kv, tokens, num_tokens, now_s=0.0, num_reserved=None, spare=0):
    return kv.landings.reserve(
        as_bytes(tokens), "", num_tokens, num_reserved=num_reserved or num_tokens + 1, spare_blocks=spare, now_s=now_s
    )


def test_a_landing_takes_the_cached_prefix_and_room_to_start():
    kv = manager()
    first = reserve(kv, [1, 2, 3, 4, 5], 5)
    assert (len(first.blocks), first.num_matched, kv.num_used_blocks) == (3, 0, 3)
    assert kv.landings.complete(first, 1.0)
    assert first.num_shared == 2  # the partial last block is the owner's alone
    second = reserve(kv, [1, 2, 3, 4, 6, 7], 6)
    assert (second.num_matched, kv.num_used_blocks) == (2, 5)  # and room for a seventh token
    kv.check()
    assert reserve(kv, [9] * 9, 9) is None
    assert reserve(kv, [9, 9, 9], 3, spare=2) is None
    kv.landings.release(first, 2.0)
    kv.landings.release(second, 2.0)
    assert (kv.num_used_blocks, kv.num_cached_blocks) == (0, 2)
    kv.check()


def test_of_equal_blocks_that_came_meanwhile_the_caches_are_used():
    kv = manager(num_blocks=12)
    one, two = reserve(kv, [1, 2, 3, 4, 5], 5), reserve(kv, [1, 2, 3, 4, 5], 5)
    kv.landings.complete(one, 1.0)
    kv.landings.complete(two, 1.0)
    assert two.blocks[:2].tolist() == one.blocks[:2].tolist()
    assert two.blocks[2] != one.blocks[2]
    assert kv.num_used_blocks == 4
    kv.check()


def test_adopted_blocks_are_the_sequences_own():
    kv = manager()
    landing = reserve(kv, [1, 2, 3, 4, 5], 5)
    with pytest.raises(InvariantError, match="cannot be adopted"):
        kv.adopt(0, landing, 6, 0, 1.0)
    kv.landings.complete(landing, 1.0)
    assert not kv.adopt(0, landing, 6, 6, 1.0)  # others need what is left
    assert kv.adopt(0, landing, 8, 0, 1.0)
    assert kv.tables.num_owned[0] == 4
    assert landing.status is LandingStatus.GONE
    kv.landings.release(landing, 1.0)  # too late to matter
    kv.check()
    kept = kv.keep(0, as_bytes([1, 2, 3, 4, 5, 6]), "", 5)
    assert (len(kept.blocks), kv.num_used_blocks) == (3, 3)
    kv.check()
    kv.landings.release(kept, 2.0, hint=CacheHint(drop=True))
    assert kv.num_free_blocks == kv.num_blocks


def test_completed_twice_late_or_after_its_end_nothing_happens():
    kv = manager()
    landing = reserve(kv, [1, 2, 3], 3)
    assert kv.landings.complete(landing, 1.0)
    assert not kv.landings.complete(landing, 1.0)
    kv.landings.release(landing, 1.0)
    assert not kv.landings.complete(landing, 2.0)
    kv.landings.release(landing, 2.0)
    assert (kv.num_used_blocks, kv.num_cached_blocks) == (0, 1)
    kv.check()


def test_who_gives_up_while_bytes_may_come_leaves_blocks_to_nobody():
    """CASES: an abort on the target while a silent source may still write."""
    kv = manager(num_blocks=4)
    landing = reserve(kv, [1, 2, 3], 3)
    kv.landings.release(landing, 1.0, writes_until_s=6.0)
    assert (kv.landings.num_quarantined_blocks, kv.num_available_blocks) == (2, 2)
    kv.landings.release(landing, 2.0, writes_until_s=9.0)
    assert not kv.landings.complete(landing, 3.0)
    assert kv.landings.expire(5.9) == 0
    assert reserve(kv, [7] * 5, 5) is None
    assert kv.landings.expire(6.0) == 2
    assert reserve(kv, [7] * 5, 5) is not None
    kv.check()


def test_one_request_has_one_landing():
    kv = manager()
    one, two = reserve(kv, [1, 2], 2), reserve(kv, [5, 6], 2)
    with pytest.raises(InvariantError, match="arriving"):
        kv.landings.assign(one, 7)
    kv.landings.complete(one, 1.0)
    kv.landings.complete(two, 1.0)
    kv.landings.assign(one, 7)
    for landing, owner in ((one, 8), (two, 7)):
        with pytest.raises(InvariantError, match="cannot go to request"):
            kv.landings.assign(landing, owner)
    kv.landings.hand_over(7, 9)
    assert kv.landings.find(7) is None
    assert kv.landings.find(9) is one
    kv.landings.release(one, 2.0)
    assert kv.landings.find(9) is None


class LandingMachine(RuleBasedStateMachine):
    """Blocks have contents here. Who sends writes until the lease of its transfer ends, told or not that it is over."""

    @initialize(num_blocks=st.integers(3, 12), block_size=st.integers(1, 3), prefix_caching=st.booleans())
    def begin(self, num_blocks, block_size, prefix_caching):
        self.kv = manager(num_blocks, block_size, prefix_caching)
        self.now_s = 0.0
        self.contents = [None] * num_blocks
        self.writers = []  # (landing, its own blocks, tokens, until)
        self.landings = []
        self.slots = {}

    def _chain(self, tokens, block):
        """The content of a sequence's block: its tokens and all before them."""
        size = self.kv.block_size
        return tuple(tokens[: (block + 1) * size])

    @rule(stem=st.sampled_from(STEMS), length=st.integers(1, 12), tail=st.integers(0, 2), spare=st.integers(0, 2))
    def reserve(self, stem, length, tail, spare):
        tokens = [*stem[:length], *([tail] * tail)]
        before = copy.deepcopy((self.kv.pool.refs, self.kv.pool.free_ids()))
        landing = reserve(self.kv, tokens, len(tokens), self.now_s, spare=spare)
        if landing is None:
            assert [a.tolist() for a in before] == [self.kv.pool.refs.tolist(), self.kv.pool.free_ids().tolist()]
            return
        self.landings.append((landing, tokens))
        own = landing.blocks[landing.num_matched :].tolist()
        self.writers.append((landing, own, tokens, self.now_s + LEASE_S))

    @precondition(lambda self: self.writers)
    @rule(data=st.data())
    def write(self, data):
        """Some bytes come: in time, or after the target gave up. They may only meet blocks that wait for them."""
        landing, own, tokens, until_s = data.draw(st.sampled_from(self.writers))
        if self.now_s >= until_s or landing.status in (LandingStatus.LANDED, LandingStatus.GONE):
            return
        place = data.draw(st.integers(0, max(0, len(own) - 1)))
        if not own:
            return
        block = own[place]
        assert block not in self.kv.pool.free_ids().tolist()
        assert not self.kv.tree.nodes.holds(np.array([block], np.int32))[0]
        assert self.kv.pool.refs[block] == 1
        self.contents[block] = self._chain(tokens, landing.num_matched + place)

    @precondition(lambda self: self.landings)
    @rule(data=st.data())
    def complete(self, data):
        landing, tokens = data.draw(st.sampled_from(self.landings))
        was_arriving = landing.status is LandingStatus.ARRIVING
        if was_arriving:
            for place in range(landing.num_matched, len(landing.blocks)):
                self.contents[landing.blocks[place]] = self._chain(tokens, place)
        assert self.kv.landings.complete(landing, self.now_s) == was_arriving

    @precondition(lambda self: self.landings)
    @rule(data=st.data(), is_silent=st.booleans())
    def give_up(self, data, is_silent):
        """The request was aborted, or its source is lost; a silent one may write until its lease ends."""
        landing, _ = data.draw(st.sampled_from(self.landings))
        until_s = next(until for one, _, _, until in self.writers if one is landing)
        self.kv.landings.release(landing, self.now_s, writes_until_s=until_s if is_silent else None)
        if not is_silent:
            self.writers = [writer for writer in self.writers if writer[0] is not landing]
            self.landings = [entry for entry in self.landings if entry[0] is not landing]

    @rule(seconds=st.sampled_from([0.5, 2.0, 6.0]))
    def wait(self, seconds):
        self.now_s += seconds
        self.kv.landings.expire(self.now_s)

    @precondition(lambda self: len(self.slots) < 3)
    @rule(data=st.data(), room=st.integers(1, 4))
    def adopt(self, data, room):
        landed = [entry for entry in self.landings if entry[0].status is LandingStatus.LANDED]
        if not landed:
            return
        landing, tokens = data.draw(st.sampled_from(landed))
        slot = next(slot for slot in range(3) if slot not in self.slots)
        if self.kv.adopt(slot, landing, len(tokens) + room, 0, self.now_s):
            self.slots[slot] = tokens

    @precondition(lambda self: len(self.slots) < 3)
    @rule(stem=st.sampled_from(STEMS), length=st.integers(1, 12))
    def compute(self, stem, length):
        """A sequence of the replica itself, computed to its end."""
        tokens, slot = stem[:length], next(slot for slot in range(3) if slot not in self.slots)
        match = self.kv.match(as_bytes(tokens), "")
        if not self.kv.admit(slot, match, len(tokens), 0, self.now_s):
            return
        for place in range(match.num_blocks, int(self.kv.tables.num_owned[slot])):
            self.contents[self.kv.tables.ids[slot, place]] = self._chain(tokens, place)
        self.kv.commit(slot, as_bytes(tokens), "", len(tokens))
        self.slots[slot] = tokens

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), keeps=st.booleans())
    def end(self, data, keeps):
        slot = data.draw(st.sampled_from(sorted(self.slots)))
        tokens = self.slots.pop(slot)
        self.kv.commit(slot, as_bytes(tokens), "", len(tokens))
        if keeps:
            kept = self.kv.keep(slot, as_bytes(tokens), "", len(tokens))
            self.landings.append((kept, tokens))
            self.writers.append((kept, [], tokens, self.now_s))
        else:
            self.kv.release(slot, self.now_s)

    @invariant()
    def every_block_is_somewhere_once(self):
        kv = self.kv
        kv.check()
        owners = Counter(b for slot in self.slots for b in kv.tables.owned(slot).tolist())
        owners.update(block for landing in kv.landings for block in landing.blocks.tolist())
        free = kv.pool.free_ids().tolist()
        cached = {b for b in range(kv.num_blocks) if kv.tree.nodes.holds(np.array([b], np.int32))[0]} - set(owners)
        assert sorted([*free, *cached, *owners]) == list(range(kv.num_blocks))
        assert [owners[b] for b in range(kv.num_blocks)] == kv.pool.refs.tolist()

    @invariant()
    def what_can_be_reused_holds_what_it_says(self):
        for node in self.kv.tree.nodes:
            path, step = [], node
            while step is not None:
                path = np.frombuffer(step.tokens, np.int32).tolist() + path
                step = step.parent
            first = len(path) // self.kv.block_size - len(node.blocks)
            for place, block in enumerate(node.blocks.tolist(), start=first):
                assert self.contents[block] == self._chain(path, place)

    def teardown(self):
        if not hasattr(self, "kv"):
            return
        for landing, _ in self.landings:
            self.kv.landings.release(landing, self.now_s)
        for slot in self.slots:
            self.kv.release(slot, self.now_s)
        self.kv.landings.expire(self.now_s + LEASE_S)
        assert self.kv.num_used_blocks == 0
        self.kv.check()


TestLandingMachine = LandingMachine.TestCase
TestLandingMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
