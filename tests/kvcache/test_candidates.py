"""What is kept for each holder: a flood of one evicts nothing that another has within its part and uses."""

from __future__ import annotations

import itertools

import pytest
from cache_builders import Cache, policies, raw
from hypothesis import given, settings
from hypothesis import strategies as st

from expediter.core.request import CacheHint

POOL = 16  # of which 8 blocks are kept: 8 for one holder, 4 each for two


def put(cache: Cache, *tokens: int, salt: str, hint: CacheHint | None = None) -> None:
    """Run a prompt through, evicting what it needs."""
    short = len(tokens) - cache.kv.num_free_blocks
    if short > 0:
        cache.kv.tree.advance(cache.now_s)
        cache.evict(min(short, cache.kv.num_cached_blocks))
    slot = cache.hold(*tokens, salt=salt)
    assert slot is not None
    cache.release(slot, hint)


def cached(cache: Cache, *tokens: int, salt: str) -> int:
    return cache.kv.tree.match(raw(*tokens), salt, len(tokens)).num_blocks


@pytest.mark.parametrize("name", policies())
@pytest.mark.parametrize("repeats", [1, 3])
@pytest.mark.parametrize("pin", [False, True])
def test_a_flood_does_not_flush_what_another_uses(name: str, repeats: int, pin: bool) -> None:
    """However it is made: prompts that come once, or several times, or are pinned."""
    cache = Cache(policies(POOL)[name], POOL)
    hint = CacheHint(pin_s=1000.0) if pin else None
    put(cache, 1, 2, 3, 4, salt="calm/")
    for number in range(50):
        for _ in range(repeats):
            put(cache, *range(100 + 10 * number, 106 + 10 * number), salt="flood/", hint=hint)
        assert cached(cache, 1, 2, 3, 4, salt="calm/") == 4
    put(cache, 1, 2, 3, 4, salt="calm/")  # and the flood does not wait for it either
    assert cached(cache, 1, 2, 3, 4, salt="calm/") == 4


def test_what_exceeds_its_part_goes_in_the_policys_order() -> None:
    cache = Cache(policies(POOL)["lru"], POOL)
    put(cache, 1, 2, 3, 4, 5, 6, salt="calm/")  # two more than its part
    put(cache, *range(100, 110), salt="flood/")
    put(cache, *range(200, 206), salt="flood/")
    assert cached(cache, 1, 2, 3, 4, 5, 6, salt="calm/") == 4
    assert cached(cache, *range(100, 110), salt="flood/") == 6


def test_what_was_not_used_for_long_is_not_kept() -> None:
    cache = Cache(policies(POOL)["lru"], POOL)
    put(cache, 1, 2, 3, 4, salt="calm/")
    put(cache, *range(100, 112), salt="flood/")
    cache.now_s += 700
    put(cache, *range(200, 204), salt="flood/")
    assert cached(cache, 1, 2, 3, 4, salt="calm/") == 0
    assert cached(cache, *range(100, 112), salt="flood/") == 12


def test_salts_of_one_tenant_are_one_holder_and_other_salts_together_another() -> None:
    candidates = Cache(policies(POOL)["lru"], POOL).kv.tree.candidates
    assert candidates.holder_of("a/") is candidates.holder_of("a/x") is candidates.holder_of("a/b/c")
    assert candidates.holder_of("a/") is not candidates.holder_of("b/")
    assert candidates.holder_of("") is candidates.holder_of("a") is candidates.holder_of("/x")


SALTS = st.sampled_from(["a/", "a/x", "b/", "c/", ""])


@pytest.mark.parametrize("name", policies())
@settings(deadline=None, max_examples=60)
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(SALTS, st.lists(st.integers(0, 1), min_size=1, max_size=5)),
            st.tuples(st.just("evict"), st.integers(1, 6)),
            st.tuples(st.just("wait"), st.sampled_from([1, 300, 700])),
        ),
        max_size=30,
    )
)
def test_nobody_loses_its_part_while_another_has_more(name: str, steps: list[tuple[str, object]]) -> None:
    """Block by block, and all at once as well as one by one, which `Cache.evict` compares."""
    cache = Cache(policies(POOL)[name], POOL)
    tree = cache.kv.tree

    def leaves() -> list[tuple[str, int, bool]]:
        """Holder, blocks of it, and whether it was used lately, of each leaf that can go."""
        nodes = [node for node in tree.nodes if tree.candidates.can_shorten(node)]
        return [(node.holder.name, node.holder.num_blocks, node.used_s > tree._now_s - 600) for node in nodes]

    def holders() -> dict[str, int]:
        nodes = list(tree.nodes)
        by_name = itertools.groupby(sorted(nodes, key=lambda node: node.holder.name), key=lambda node: node.holder.name)
        return {name: sum(len(node.blocks) for node in group) for name, group in by_name}

    for what, value in steps:
        if what == "evict":
            for _ in range(min(int(value), cache.kv.num_cached_blocks)):  # type: ignore[call-overload]
                before, could_go = holders(), leaves()
                part = POOL // 2 // len(before)
                cache.evict(1)
                after = holders()
                (loser,) = [name for name in before if after.get(name, 0) < before[name]]
                if before[loser] <= part and all(lately for name, _, lately in could_go if name == loser):
                    assert all(size <= part for _, size, _ in could_go)
        elif what == "wait":
            cache.now_s += int(value)  # type: ignore[call-overload]
            tree.advance(cache.now_s)
        else:
            put(cache, *value, salt=what)  # type: ignore[misc]
    cache.evict(cache.kv.num_cached_blocks)
    assert holders() == {}
