"""Block tables of sequences: who shares, who pays, and that everything comes back."""

import numpy as np
import pytest

from expediter.core.errors import ConfigurationError, InvariantError
from expediter.kvcache.manager import KVCacheManager
from expediter.kvcache.radix import NO_MATCH


def raw(tokens) -> bytes:
    return np.array(list(tokens), np.int32).tobytes()


def make(num_blocks=8, block_size=2, prefix_caching=True) -> KVCacheManager:
    return KVCacheManager(
        num_blocks=num_blocks, block_size=block_size, max_num_seqs=4, max_model_len=64, prefix_caching=prefix_caching
    )


def table(kv, slot) -> list[int]:
    return kv.tables.owned(slot).tolist()


def test_a_table_never_needs_more_columns_than_the_pool_has_blocks():
    assert make(num_blocks=8).tables.ids.shape == (4, 8)
    assert make(num_blocks=80).tables.ids.shape == (4, 32)
    with pytest.raises(ConfigurationError, match="block_size"):
        make(block_size=0)


def test_an_ended_sequence_leaves_its_full_blocks_and_frees_the_rest():
    kv = make()
    tokens = raw(range(5))
    assert kv.admit(0, kv.match(tokens, ""), 5, 0, 0.0)
    kv.commit(0, tokens, "", 5)
    assert (kv.num_free_blocks, kv.num_cached_blocks, kv.num_used_blocks) == (5, 0, 3)
    kv.release(0, 0.0)
    kv.check()
    assert (kv.num_free_blocks, kv.num_cached_blocks, kv.num_used_blocks) == (6, 2, 0)
    assert kv.match(tokens, "").num_blocks == 2


def test_a_match_leaves_a_token_to_compute():
    kv = make()
    tokens = raw(range(4))
    kv.admit(0, NO_MATCH, 4, 0, 0.0)
    kv.commit(0, tokens, "", 4)
    assert kv.match(tokens, "").num_blocks == 1
    assert kv.match(raw(range(5)), "").num_blocks == 2


def test_sequences_that_computed_the_same_end_up_on_one_set_of_blocks():
    kv = make()
    tokens = raw(range(5))
    for slot in (0, 1):
        kv.admit(slot, kv.match(tokens, ""), 5, 0, 0.0)
    assert not set(table(kv, 0)) & set(table(kv, 1))
    kv.commit(0, tokens, "", 4)
    kv.commit(1, tokens, "", 4)
    kv.check()
    assert table(kv, 0)[:2] == table(kv, 1)[:2]
    assert table(kv, 0)[2] != table(kv, 1)[2]
    assert (kv.num_free_blocks, kv.num_used_blocks) == (4, 4)
    kv.commit(1, tokens, "", 4)  # again: nothing to do
    for slot in (0, 1):
        kv.release(slot, 0.0)
        kv.check()
    assert (kv.num_free_blocks, kv.num_cached_blocks) == (6, 2)


def test_a_sequence_goes_over_to_cached_blocks_that_have_no_owner():
    kv = make()
    tokens = raw(range(4))
    kv.admit(0, NO_MATCH, 4, 0, 0.0)
    kv.admit(1, NO_MATCH, 4, 0, 0.0)
    kv.commit(0, tokens, "", 4)
    kv.release(0, 0.0)
    kv.commit(1, tokens, "", 4)
    kv.check()
    assert (kv.num_free_blocks, kv.num_cached_blocks, kv.num_used_blocks) == (6, 0, 2)


def test_without_room_nothing_changes():
    kv = make(num_blocks=4)
    kv.admit(0, NO_MATCH, 4, 0, 0.0)
    kv.commit(0, raw(range(4)), "", 4)
    kv.release(0, 0.0)
    tokens = raw([*range(4), *[9] * 6])
    match = kv.match(tokens, "")
    assert match.num_blocks == 2
    assert kv.shortage(match, 10, 0) == 1
    before = (kv.pool.refs.tolist(), kv.pool.free_ids().tolist(), kv.tables.num_owned.tolist())
    assert not kv.admit(1, match, 10, 0, 0.0)
    assert (kv.pool.refs.tolist(), kv.pool.free_ids().tolist(), kv.tables.num_owned.tolist()) == before
    assert kv.shortage(match, 8, 0) == 0
    assert kv.shortage(match, 8, 1) == 1
    assert not kv.admit(1, match, 8, 1, 0.0)
    assert kv.admit(1, match, 8, 0, 0.0)
    kv.check()


def test_making_room_never_evicts_the_matched_blocks():
    kv = make(num_blocks=4)
    kv.admit(0, NO_MATCH, 4, 0, 0.0)
    kv.commit(0, raw([1, 1, 2, 2]), "", 4)
    kv.release(0, 0.0)
    kv.admit(0, NO_MATCH, 4, 0, 0.0)
    kv.commit(0, raw([3, 3, 4, 4]), "", 4)
    kv.release(0, 0.0)
    tokens = raw([1, 1, 2, 2, 5, 5, 6])  # hits the older pair, evicts the newer
    match = kv.match(tokens, "")
    assert kv.admit(1, match, 7, 0, 0.0)
    kv.check()
    assert table(kv, 1)[:2] == match.blocks.tolist()
    assert kv.match(raw([3, 3, 4, 4, 5]), "").num_blocks == 0


def test_exclusive_blocks_are_those_that_would_come_back():
    kv = make(num_blocks=12)
    tokens = raw(range(6))
    kv.admit(0, NO_MATCH, 7, 0, 0.0)
    kv.commit(0, tokens, "", 6)

    def exclusive(slots, kept=NO_MATCH):
        leaving = np.zeros(12, np.int32)
        return [kv.tables.num_exclusive(slot, kept, leaving) for slot in slots]

    assert exclusive([0]) == [4]
    match = kv.match(raw(range(5)), "")
    assert exclusive([0], match) == [2]
    kv.admit(1, match, 5, 0, 0.0)
    assert exclusive([0]) == [2]
    assert exclusive([1]) == [1]
    assert exclusive([0, 1]) == [2, 3]  # what both own comes back with the second
    assert exclusive([1, 0]) == [1, 4]


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize(("num_tokens", "shared", "copied"), [(4, 2, False), (5, 2, True), (1, 0, True)])
def test_a_fork_shares_full_blocks_and_copies_the_partial_one(prefix_caching, num_tokens, shared, copied):
    kv = make(num_blocks=12, prefix_caching=prefix_caching)
    kv.admit(0, NO_MATCH, num_tokens, 2, 0.0)
    for slot in (1, 2):
        kv.hold(slot, 1)
        kv.check()
    own = [table(kv, slot)[0] for slot in (1, 2)]
    kv.commit(0, raw(range(num_tokens)), "", num_tokens)
    copies = kv.fork(0, np.array([1, 2], np.int32), num_tokens)
    kv.check()
    for slot, block in zip((1, 2), own, strict=True):
        assert table(kv, slot) == [*table(kv, 0)[:shared], block]
    assert copies.tolist() == ([[table(kv, 0)[shared]] * 2, own] if copied else [[], []])
    assert kv.num_used_blocks == kv.blocks_for(num_tokens) + 2
    for slot in (0, 2, 1):
        kv.release(slot, 0.0)
        kv.check()
    assert kv.num_used_blocks == 0
    assert kv.num_cached_blocks == (shared if prefix_caching else 0)


def test_a_heir_has_the_blocks_and_the_row_in_flight_stays():
    kv = make()
    kv.admit(0, NO_MATCH, 5, 1, 0.0)
    kv.hold(1, 1)
    kv.commit(0, raw(range(5)), "", 2)
    row = table(kv, 0)
    kv.hand_over(0, 1)
    kv.check()
    assert table(kv, 1) == row == kv.tables.ids[0, :3].tolist()
    assert (kv.tables.num_owned[0], kv.num_used_blocks) == (0, 3)
    kv.commit(1, raw(range(5)), "", 4)
    kv.release(1, 0.0)
    assert (kv.num_cached_blocks, kv.num_used_blocks) == (2, 0)


def test_growth_by_one_and_by_runs_fills_the_same_columns():
    one, runs = make(), make()
    for kv in (one, runs):
        kv.admit(0, NO_MATCH, 2, 0, 0.0)
        kv.admit(1, NO_MATCH, 4, 0, 0.0)
    slots = np.array([0, 1, 0], np.int32)
    blocks = one.take(3)
    for slot, block in zip(slots, blocks, strict=True):
        one.tables.append(np.array([slot]), np.array([block]))
    runs.tables.append(slots, runs.take(3), np.array([0, 0, 1]))
    assert one.tables.ids.tolist() == runs.tables.ids.tolist()
    assert one.tables.num_owned.tolist() == runs.tables.num_owned.tolist() == [3, 3, 0, 0]
    runs.check()


def test_free_blocks_are_taken_before_cached_ones():
    kv = make(num_blocks=4)
    kv.admit(0, NO_MATCH, 4, 0, 0.0)
    kv.commit(0, raw(range(4)), "", 4)
    cached = table(kv, 0)
    kv.release(0, 0.0)
    assert kv.take(3).tolist() == [2, 3, cached[1]]


def test_without_prefix_caching_nothing_is_kept():
    kv = make(prefix_caching=False)
    tokens = raw(range(5))
    kv.admit(0, kv.match(tokens, ""), 5, 0, 0.0)
    kv.commit(0, tokens, "", 5)
    kv.release(0, 0.0)
    kv.check()
    assert kv.num_free_blocks == 8
    assert kv.match(tokens, "") is NO_MATCH


def test_releasing_twice_is_an_error_of_ours():
    kv = make()
    kv.admit(0, NO_MATCH, 4, 0, 0.0)
    kv.release(0, 0.0)
    with pytest.raises(InvariantError, match="owns no blocks"):
        kv.release(0, 0.0)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda kv: kv.pool.refs.__setitem__(table(kv, 0)[0], 2), "miscounted"),
        (lambda kv: kv.tables.num_owned.__setitem__(0, 2), "miscounted"),
        (lambda kv: kv.pool._free.__setitem__(0, table(kv, 0)[2]), "two places"),
        (lambda kv: setattr(kv.tree, "num_evictable", 1), "counted"),
    ],
)
def test_check_notices_damage(damage, message):
    kv = make()
    kv.admit(0, NO_MATCH, 5, 0, 0.0)
    kv.commit(0, raw(range(5)), "", 2)
    kv.check()
    damage(kv)
    with pytest.raises(InvariantError, match=message):
        kv.check()
