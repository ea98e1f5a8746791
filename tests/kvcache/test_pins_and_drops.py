"""What clients wish for their cached blocks."""

import pytest
from cache_builders import DROP, Cache, raw

from expediter.core.errors import RequestError
from expediter.core.request import MAX_PIN_S, CacheHint
from expediter.kvcache.eviction import Lru
from expediter.kvcache.manager import KVCacheManager


@pytest.mark.parametrize("fields", [{}, {"pin_s": -1.0}, {"pin_s": MAX_PIN_S + 1}, {"pin_s": 1.0, "drop": True}])
def test_hints_that_cannot_be(fields):
    with pytest.raises(RequestError):
        CacheHint(**fields)


def test_a_pin_outlives_newer_blocks_until_its_time_is_over():
    cache = Cache(Lru())
    cache.put(1, 2, hint=CacheHint(pin_s=10.0))
    cache.put(3)
    cache.put(4)
    assert cache.evict_tokens(1) == [3]
    cache.now_s = 20.0
    cache.put(5)
    assert cache.evict_tokens(4) == [2, 1, 4, 5]


def test_a_pin_covers_the_head_of_the_path_only_as_far_as_there_is_room():
    cache = Cache(Lru(), num_blocks=8, max_pinned_share=0.5)
    cache.put(1, 2, 3, 4, 5, 6, hint=CacheHint(pin_s=100.0))
    assert cache.kv.tree.pins.num_blocks == 4
    cache.put(7, hint=CacheHint(pin_s=100.0))  # finds none
    assert cache.evict_tokens(3) == [6, 5, 7]
    assert cache.evict_tokens(2) == [4, 3]  # nothing else is left, so the pin yields
    cache.put(8, hint=CacheHint(pin_s=100.0))
    assert cache.kv.tree.pins.num_blocks == 3


def test_a_pin_can_be_prolonged_and_never_shortened():
    cache = Cache(Lru())
    cache.put(1, hint=CacheHint(pin_s=50.0))
    cache.put(1, hint=CacheHint(pin_s=5.0))
    cache.now_s = 20.0
    cache.put(2)
    assert cache.evict_tokens(1) == [2]
    cache.put(1, hint=CacheHint(pin_s=90.0))
    cache.now_s = 70.0
    cache.put(3)
    assert cache.evict_tokens(1) == [3]


def test_a_pin_covers_what_is_asked_for_and_not_what_others_add():
    cache = Cache(Lru())
    cache.put(1, 2, hint=CacheHint(pin_s=100.0))
    cache.put(1, 2, 3, 4)
    cache.put(5)
    assert cache.kv.tree.pins.num_blocks == 2
    assert cache.evict_tokens(3) == [4, 3, 5]


def test_pins_stay_few_in_memory_however_often_they_are_renewed():
    cache = Cache(Lru())
    for _ in range(1000):
        cache.put(1, 2, hint=CacheHint(pin_s=100.0))
    assert len(cache.kv.tree.pins._timers) <= 64 + 2 * len(cache.kv.tree.nodes) + 1


def test_a_drop_frees_what_nobody_else_used():
    cache = Cache(Lru())
    cache.put(1, 2, 3)
    cache.put(1, 2, 4, 5, hint=DROP)
    assert cache.kv.num_free_blocks == 9
    assert cache.kv.match(raw(1, 2, 3, 9), "").num_blocks == 3
    assert cache.kv.match(raw(1, 2, 4, 9), "").num_blocks == 2


def test_a_drop_leaves_what_is_in_use_shared_or_pinned():
    cache = Cache(Lru())
    slot = cache.hold(1, 2)
    other = cache.hold(1, 2, 3)
    cache.release(slot, DROP)
    assert cache.kv.num_used_blocks == 3
    cache.release(other, DROP)
    assert (cache.kv.num_cached_blocks, cache.kv.num_free_blocks) == (2, 10)
    cache.put(7, 8, hint=CacheHint(pin_s=9.0))
    cache.put(7, 8, hint=DROP)
    assert cache.kv.match(raw(7, 8, 9), "").num_blocks == 2


def test_hints_without_anything_cached_do_nothing():
    kv = KVCacheManager(num_blocks=4, block_size=2, max_num_seqs=1, max_model_len=8)
    for hint in (DROP, CacheHint(pin_s=1.0)):
        kv.admit(0, kv.match(raw(1), ""), 1, 0, 0.0)
        kv.commit(0, raw(1), "", 1)
        kv.release(0, 0.0, hint)
        kv.check()
    assert kv.num_free_blocks == 4
