"""The block pool: a stack of free ids, and owners counted per block."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expediter.core.errors import ConfigurationError, InvariantError
from expediter.kvcache.pool import BlockPool


def ids(*blocks):
    return np.array(blocks, np.int32)


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_a_pool_needs_a_block(num_blocks):
    with pytest.raises(ConfigurationError, match="at least one block"):
        BlockPool(num_blocks)


def test_lowest_ids_come_first_and_the_last_freed_is_taken_next():
    pool = BlockPool(5)
    assert pool.pop(3).tolist() == [0, 1, 2]
    pool.push(pool.disown(ids(1, 0)))
    assert pool.pop(3).tolist() == [1, 0, 3]
    assert pool.num_free == 1


@given(st.lists(st.integers(0, 3), max_size=6))
def test_popping_several_equals_popping_one_by_one(counts):
    together, single = BlockPool(20), BlockPool(20)
    for count in counts:
        assert together.pop(count).tolist() == [int(single.pop(1)[0]) for _ in range(count)]
    assert together.free_ids().tolist() == single.free_ids().tolist()


def test_owners_are_counted():
    pool = BlockPool(4)
    blocks = pool.pop(2)
    assert pool.acquire(ids(0, 1)) == 0
    assert pool.acquire(ids(2)) == 1
    assert pool.refs.tolist() == [2, 2, 1, 0]
    assert pool.disown(blocks).tolist() == []
    assert pool.disown(ids(1, 0, 2)).tolist() == [1, 0, 2]


def test_misuse_is_an_error_of_ours():
    pool = BlockPool(2)
    with pytest.raises(InvariantError, match="3 blocks asked"):
        pool.pop(3)
    block = pool.pop(1)
    pool.push(pool.disown(block))
    with pytest.raises(InvariantError, match="freed twice"):
        pool.disown(block)
    assert pool.refs.min() == 0
    with pytest.raises(InvariantError, match="freed onto"):
        pool.push(block)
