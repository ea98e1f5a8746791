"""The prefix index against a naive one that keeps whole prompts."""

import tracemalloc
from collections import OrderedDict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expediter.control.prefix_index import PrefixIndex, cached_tokens, prefix_keys
from expediter.core.errors import ConfigurationError

BLOCK = 4


class NaiveIndex:
    """Each replica's blocks as (salt, tokens up to their end) in the order of their last use, oldest first."""

    def __init__(self, max_blocks):
        self.max_blocks = max_blocks
        self.held = {}

    def prefixes(self, tokens, salt):
        return [(salt, tuple(tokens[:end].tolist())) for end in range(BLOCK, len(tokens) + 1, BLOCK)]

    def record(self, slot, tokens, salt):
        held = self.held.setdefault(slot, OrderedDict())
        for prefix in reversed(self.prefixes(tokens, salt)):
            held.pop(prefix, None)
            held[prefix] = None
        while len(held) > self.max_blocks:
            held.popitem(last=False)

    def match(self, slot, tokens, salt):
        held = self.held.get(slot, ())
        return BLOCK * sum(prefix in held for prefix in self.prefixes(tokens, salt))


prompts = st.tuples(
    st.lists(st.integers(0, 1), max_size=22).map(lambda tokens: np.array(tokens, np.int32)), st.sampled_from(["", "s"])
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["record", "record", "record", "remove"]), st.integers(0, 70), prompts)))
def test_as_the_naive_one(calls):
    index, naive = PrefixIndex(block_tokens=BLOCK), NaiveIndex(max_blocks=5)
    for call, slot, (tokens, salt) in calls:
        if call == "remove":
            index.remove(slot)
            naive.held.pop(slot, None)
        else:
            index.limit(slot, 5 * BLOCK)
            index.record(slot, index.keys(tokens, salt))
            naive.record(slot, tokens, salt)
        index.check()
        found = cached_tokens(index.match(index.keys(tokens, salt)))
        assert [found.get(each, 0) for each in range(71)] == [naive.match(each, tokens, salt) for each in range(71)]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40), st.integers(1, 30)), max_size=300))
def test_memory_stays_below_its_bound(calls):
    """Whatever comes, and a path is never longer than its beginning: who holds a block holds all before it."""
    index = PrefixIndex(block_tokens=1, max_bytes=1 << 16)
    for slot, first, length in calls:
        index.record(slot, index.keys(np.arange(first, first + length, dtype=np.int32)))
        assert index.num_bytes <= 1 << 16
        holders = [holders for _, holders in index.match(index.keys(np.arange(first, first + 31, dtype=np.int32)))]
        assert all(later & ~earlier == 0 for earlier, later in pairwise(holders))
    index.check()
    assert sum(index.num_held_tokens(slot) for slot in range(10)) >= index.num_nodes


@pytest.mark.parametrize(("num_slots", "num_prompts"), [(1, 700), (4, 900), (64, 1500), (1000, 1500)])
def test_the_account_is_honest(num_slots, num_prompts):
    """What it says it takes is not below what is allocated, and not more than two and a half times as much."""
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 1000, 64 * 20, np.int32)
    index = PrefixIndex()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(num_prompts):
        prompt = np.concatenate((shared, rng.integers(0, 1000, 64 * 10, np.int32)))
        index.record(int(rng.integers(num_slots)), index.keys(prompt))
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert 1.0 <= index.num_bytes / taken <= 2.5


def test_replica_that_leaves_leaves_nothing():
    index = PrefixIndex(block_tokens=BLOCK)
    for slot in range(3):
        index.record(slot, index.keys(np.arange(40 + slot, dtype=np.int32)))
    for slot in range(3):
        index.remove(slot)
    assert (index.num_nodes, index.num_bytes) == (0, 0)


def test_salts_share_nothing_and_keys_depend_on_every_token_and_its_place():
    tokens = np.arange(256, dtype=np.int32)
    keys = prefix_keys(tokens, "", 64)
    assert len(keys) == 4
    assert not set(keys) & set(prefix_keys(tokens, "a", 64))
    assert prefix_keys(tokens, "a", 64) == prefix_keys(tokens.copy(), "a", 64)
    for place in range(256):
        other = tokens.copy()
        other[place] += 1
        changed = [a != b for a, b in zip(keys, prefix_keys(other, "", 64), strict=True)]
        assert changed == [block >= place // 64 for block in range(4)]
    swapped = np.concatenate((tokens[64:128], tokens[:64], tokens[128:]))
    assert prefix_keys(swapped, "", 64)[1] != keys[1]


def test_a_nonsense_size_is_refused():
    for wrong in ({"block_tokens": 0}, {"max_bytes": 100}):
        with pytest.raises(ConfigurationError):
            PrefixIndex(**wrong)
