"""The radix tree against a model that keeps one entry per cached block."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expediter.core.errors import InvariantError
from expediter.kvcache.pool import BlockPool
from expediter.kvcache.radix import RadixTree


def raw(*tokens: int) -> bytes:
    return np.array(tokens, np.int32).tobytes()


def num_entries(tree: RadixTree) -> int:
    return sum(len(holder.heap) for holder in tree.candidates._holders.values())


class Cache:
    """Pool and tree, with ownership kept as the manager keeps it."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.tree = RadixTree(self.pool, block_size)

    def hold(self, tokens: bytes, salt: str = "") -> np.ndarray:
        """Insert all whole blocks; return the ids that the tree holds for them, owned."""
        own = self.pool.pop(len(tokens) // 4 // self.block_size)
        blocks = self.tree.insert(tokens, salt, own, 0)
        changed = blocks != own
        self.tree.num_evictable -= self.pool.acquire(blocks[changed])
        self.pool.push(self.pool.disown(own[changed]))
        self.tree.check()
        return blocks

    def release(self, blocks: np.ndarray) -> None:
        self.tree.num_evictable += len(self.pool.disown(blocks))
        self.tree.touch(int(blocks[-1]))
        self.tree.check()

    def put(self, *tokens: int, salt: str = "") -> list[int]:
        blocks = self.hold(raw(*tokens), salt)
        self.release(blocks)
        return blocks.tolist()

    def evict(self, count: int) -> list[int]:
        evicted = self.tree.evict(count)
        self.pool.push(evicted)
        self.tree.check()
        return evicted.tolist()

    def found(self, *tokens: int, salt: str = "") -> list[int]:
        return self.tree.match(raw(*tokens), salt, 1000).blocks.tolist()


def test_a_prefix_is_found_in_whole_blocks():
    cache = Cache(8, 2)
    blocks = cache.put(1, 2, 3, 4, 5, 6)
    assert cache.found(1, 2, 3, 4, 5, 6, 7) == blocks
    assert cache.found(1, 2, 3, 4, 5) == blocks[:2]
    assert cache.found(1, 2, 3, 9) == blocks[:1]
    assert cache.found(1) == cache.found(2, 1) == []
    assert cache.tree.match(raw(1, 2, 3, 4), "", 1).blocks.tolist() == blocks[:1]


def test_a_node_is_split_where_prompts_part():
    cache = Cache(8, 1)
    first = cache.put(1, 2, 3, 4)
    assert len(cache.tree.nodes) == 1
    second = cache.put(1, 2, 8, 9)
    assert len(cache.tree.nodes) == 3
    assert second[:2] == first[:2]
    assert not set(second[2:]) & set(first)
    assert cache.tree.num_blocks == 6
    assert cache.found(1, 2, 3, 4) == first
    assert cache.found(1, 2, 8, 9) == second


def test_what_follows_a_reused_prefix_is_a_node_of_its_own():
    cache = Cache(12, 1)
    cache.put(1, 2)
    cache.put(1, 2, 3)
    assert len(cache.tree.nodes) == 2
    cache.put(1, 7)
    cache.put(1, 2, 3, 4)
    assert len(cache.tree.nodes) == 5
    assert len(cache.found(1, 2, 3, 4)) == 4


def test_a_growing_sequence_goes_on_where_it_was_inserted_last():
    cache = Cache(8, 1)
    own = cache.pool.pop(4)
    assert cache.tree.insert(raw(1, 2), "", own[:2], 0) is not None
    other = cache.hold(raw(1, 5))  # splits the node in between
    assert cache.tree.insert(raw(1, 2, 3, 4), "", own, 2).tolist() == own.tolist()
    cache.tree.check()
    assert cache.found(1, 2, 3, 4) == own.tolist()
    assert other[0] == own[0]


def test_salts_are_roots_of_their_own():
    cache = Cache(8, 1)
    first, second = cache.put(1, 2), cache.put(1, 2, salt="b")
    assert not set(first) & set(second)
    assert cache.found(1, 2) == first
    assert cache.found(1, 2, salt="b") == second
    assert cache.found(1, 2, salt="c") == []


def test_eviction_takes_tails_first_and_the_least_recently_used():
    cache = Cache(8, 1)
    old, new = cache.put(1, 2, 3), cache.put(1, 8, 9)
    assert cache.evict(1) == [old[2]]
    cache.put(1, 2)
    assert cache.evict(3) == [new[2], new[1], old[1]]
    assert cache.evict(1) == [old[0]]


def test_what_is_owned_stays_and_so_does_its_path():
    cache = Cache(8, 1)
    held = cache.hold(raw(1, 2))
    cache.put(1, 2, 3, 4)
    assert cache.tree.num_evictable == 2
    assert len(cache.evict(2)) == 2
    assert cache.found(1, 2, 3) == held.tolist()
    with pytest.raises(InvariantError, match="no leaf can go"):
        cache.tree.evict(1)


def test_nothing_is_left_of_an_empty_tree():
    cache = Cache(6, 1)
    for salt in "abc":
        cache.put(1, 2, salt=salt)
    cache.evict(6)
    assert cache.tree._roots == {}
    assert len(cache.tree.nodes) == cache.tree.num_blocks == cache.tree.num_evictable == 0
    assert cache.pool.num_free == 6


def test_using_the_same_leaf_over_and_over_keeps_the_heap_small():
    cache = Cache(4, 1)
    for _ in range(1000):
        cache.put(1, 2)
    assert num_entries(cache.tree) <= 64 + 2 * len(cache.tree.nodes.by_id) + 1
    cache.put(3, 4)
    tails_first = [*cache.found(1, 2)[::-1], *cache.found(3, 4)[::-1]]
    assert cache.evict(4) == tails_first


def test_memory_is_bounded_by_the_pool_however_many_prompts_pass():
    cache = Cache(16, 1)
    for number in range(2000):
        if cache.pool.num_free < 4:
            cache.evict(4)
        cache.put(number % 3, number, number + 1, number + 2, salt=str(number % 5))
    tree = cache.tree
    assert len(tree.nodes.by_id) <= 17
    assert num_entries(tree) <= 64 + 2 * 17 + 1
    assert len(tree._roots) <= 5
    assert sum(len(node.tokens) for node in tree.nodes) == 4 * tree.num_blocks


def test_an_unknown_block_is_an_error_of_ours():
    with pytest.raises(InvariantError, match="not in the tree"):
        Cache(4, 1).tree.nodes.holding(2)


class Model:
    """One entry per cached block: its path of tokens, its id, its owners and when it was used last."""

    def __init__(self) -> None:
        self.ids: dict[tuple, int] = {}
        self.used: dict[tuple, int] = {}
        self.owners: dict[tuple, int] = {}
        self.time = 0

    def touch(self, path: tuple, blocks: list[int], owners: int) -> None:
        self.time += 1
        for end in range(2, len(path) + 1):  # path[0] is the salt
            self.ids.setdefault(path[:end], blocks[end - 2])
            self.used[path[:end]] = self.time
            self.owners[path[:end]] = self.owners.get(path[:end], 0) + owners

    def evict(self) -> int:
        leaves = [p for p in self.ids if not self.owners[p] and not any(q[:-1] == p for q in self.ids)]
        path = min(leaves, key=self.used.__getitem__)
        del self.used[path], self.owners[path]
        return self.ids.pop(path)

    def evictable(self) -> int:
        return sum(not owners for owners in self.owners.values())

    def match(self, path: tuple) -> list[int]:
        return [
            self.ids[path[:end]]
            for end in itertools.takewhile(lambda end: path[:end] in self.ids, range(2, len(path) + 1))
        ]


DEPTH = 4


@settings(deadline=None, max_examples=150)
@given(
    operations=st.lists(
        st.one_of(
            st.tuples(st.just("hold"), st.tuples(st.sampled_from("ab"), *[st.integers(0, 2)] * DEPTH)),
            st.tuples(st.just("release"), st.integers(0, 9)),
            st.tuples(st.just("evict"), st.integers(1, 5)),
        ),
        max_size=40,
    )
)
def test_hits_and_evictions_equal_those_of_a_plain_lru_model(operations):
    """Prompts of equal depth, so that a use never ends inside a node and last use is exact for every block."""
    cache, model = Cache(40, 1), Model()
    held: list[tuple[tuple, np.ndarray]] = []
    for kind, value in operations:
        if kind == "hold":
            short = DEPTH - cache.pool.num_free
            if short > cache.tree.num_evictable:
                continue
            assert [model.evict() for _ in range(short)] == (cache.evict(short) if short > 0 else [])
            assert cache.found(*value[1:], salt=value[0]) == model.match(value)
            blocks = cache.hold(raw(*value[1:]), value[0])
            model.touch(value, blocks.tolist(), 1)
            held.append((value, blocks))
        elif kind == "release" and held:
            path, blocks = held.pop(value % len(held))
            cache.release(blocks)
            model.touch(path, blocks.tolist(), -1)
        elif kind == "evict":
            count = min(value, model.evictable())
            assert cache.evict(count) == [model.evict() for _ in range(count)]
        assert cache.tree.num_evictable == model.evictable()
        assert cache.tree.num_blocks == len(model.ids)
