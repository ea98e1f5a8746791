"""Eviction policies: an example of each that tells it from its neighbours, and each against a model per block."""

import math

import pytest
from cache_builders import DROP, Cache, policies, raw
from hypothesis import given, settings
from hypothesis import strategies as st

from expediter.core.errors import ConfigurationError
from expediter.core.request import CacheHint
from expediter.kvcache.eviction import HintedLru, Lfu, Lru, SegmentedLru


def famous_then_newer(policy) -> Cache:
    """1 is used three times, then 2 twice, then 3 once."""
    cache = Cache(policy)
    for token in (1, 1, 1, 2, 2, 3):
        cache.put(token)
    return cache


@pytest.mark.parametrize(
    ("name", "order"),
    [("lru", [1, 2, 3]), ("lfu", [3, 2, 1]), ("segmented_lru", [3, 1, 2]), ("lru_with_hint", [1, 2, 3])],
)
def test_recency_frequency_and_both(name, order):
    assert famous_then_newer(policies()[name]).evict_tokens(3) == order


def test_old_fame_fades():
    cache = Cache(Lfu(12, half_life=1.0))
    for _ in range(4):
        cache.put(1)
    evicted = []
    for token in range(100, 140):
        cache.put(token)
        evicted += cache.evict_tokens(1)
    # Four uses are worth one of today after two half-lives.
    assert evicted[:24] == list(range(100, 124))
    assert 1 in evicted[24:27]


def test_one_off_prompts_flush_an_lru_and_leave_what_is_protected():
    for policy, kept in ((Lru(), False), (SegmentedLru(12, 0.5), True)):
        cache = Cache(policy)
        cache.put(1, 2, 3)
        cache.put(1, 2, 3)
        for token in range(100, 130):
            cache.put(token)
        assert (cache.kv.match(raw(1, 2, 3, 9), "").num_blocks == 3) is kept


def test_only_a_share_is_protected():
    policy = SegmentedLru(12, 0.25)
    cache = Cache(policy)
    for token in (1, 2, 3, 4):
        cache.put(token)
        cache.put(token)
    cache.put(5)
    assert policy.num_protected_blocks == policy.max_protected_blocks == 3
    assert cache.evict_tokens(3) == [1, 5, 2]  # 1 lost its protection to 4 and is older than 5


def test_the_node_that_returns_late_goes_before_the_one_that_returns_soon():
    cache = Cache(HintedLru(gap_weight=1.0))
    cache.put(1)
    cache.now_s = 100.0
    cache.put(2)
    cache.put(2)  # after a second
    cache.put(1)  # after a hundred
    assert cache.evict_tokens(2) == [1, 2]


def test_who_is_long_idle_goes_whatever_was_expected():
    cache = Cache(HintedLru(gap_weight=1.0))
    cache.put(1)
    cache.put(1)
    cache.now_s = 50.0
    cache.put(2)
    cache.now_s = 80.0
    cache.put(2)  # expected after 30 s, and 1 after one
    cache.now_s = 200.0
    cache.put(3)
    assert cache.evict_tokens(3) == [1, 2, 3]


@pytest.mark.parametrize("name", policies())
def test_leaf_first_and_tail_first(name):
    cache = Cache(policies()[name])
    cache.put(1, 2, 3, 4)
    cache.put(1, 2, 5, 6)
    order = cache.evict_tokens(6)
    assert order.index(4) < order.index(3) < order.index(2) < order.index(1)
    assert order.index(6) < order.index(5) < order.index(2)


def test_a_hit_inside_a_node_leaves_the_rest_of_it_old():
    cache = Cache(Lru())
    cache.put(1, 2, 3, 4)
    cache.put(7)
    cache.put(1, 2, 8)
    assert cache.evict_tokens(3) == [4, 3, 7]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Lfu(8, 0.0),
        lambda: SegmentedLru(8, 1.5),
        lambda: HintedLru(gap_weight=-1.0),
        lambda: HintedLru(smoothing=0.0),
        lambda: Cache(Lru(), max_pinned_share=2.0),
    ],
)
def test_settings_that_cannot_be(make):
    with pytest.raises(ConfigurationError):
        make()


# -- a model per block ------------------------------------------------------------------------------------------------


class Model:
    """Every cached block by its path, with the uses that it has seen; keys are computed from those alone."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.paths: dict[int, tuple] = {}
        self.uses: dict[int, list[tuple[int, float]]] = {}  # (evictions so far, time)
        self.gaps: dict[int, list[float]] = {}
        self.last: dict[int, tuple[int, float]] = {}  # (number of the call, time)
        self.num_evicted = 0
        self.num_calls = 0

    def use(self, path: tuple, blocks: list[int], num_known: int, num_hits: int, now_s: float) -> None:
        """A sequence takes `blocks`: of the first `num_hits` it reuses the contents; `num_known` as of its start."""
        for index, block in enumerate(blocks):
            if index < num_hits:
                self.uses[block].append((self.num_evicted, now_s))
                self.gaps[block].append(now_s - self.last[block][1])
            else:
                self.paths[block] = path[: index + 2]
                self.uses[block] = [(self.num_evicted, now_s)]
                self.gaps[block] = []

    def touch(self, blocks: list[int], now_s: float) -> None:
        self.num_calls += 1
        for block in blocks:
            self.last[block] = (self.num_calls, now_s)

    def forget(self, block: int) -> None:
        for table in (self.paths, self.uses, self.gaps, self.last):
            del table[block]

    def lru(self, block: int) -> float:
        return self.last[block][0]

    def lfu(self, block: int) -> float:
        return math.log2(math.fsum(2.0 ** (clock / self.num_blocks) for clock, _ in self.uses[block]))

    def segmented_lru(self, block: int) -> float:
        """With all of the pool to protect: what was reused goes last."""
        return (len(self.uses[block]) > 1) * 1e6 + self.last[block][0]

    def lru_with_hint(self, block: int) -> float:
        """What was never reused ranks by its last use alone (see `NoPrior`)."""
        gaps, mean = self.gaps[block], 0.0
        for index, gap in enumerate(gaps):
            mean = gap if index == 0 else (mean + gap) / 2
        return self.last[block][1] - 0.3 * mean


class NoPrior(HintedLru):
    """Expects nothing of what was never reused, so that a key follows from one block's uses."""

    def added(self, node):
        super().added(node)
        node.history = 0.0


NUM_BLOCKS = 10
MODELLED = {
    "lru": Lru,
    "lfu": lambda: Lfu(NUM_BLOCKS),
    "segmented_lru": lambda: SegmentedLru(NUM_BLOCKS, 1.0),
    "lru_with_hint": NoPrior,
}
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=5)
HINTS = st.sampled_from([None, None, None, DROP, CacheHint(pin_s=3.0), CacheHint(pin_s=40.0)])


def run_operations(cache: Cache, operations, *, evict, on_hold=None, on_release=None):
    held: list[tuple] = []
    for kind, value in operations:
        if kind == "hold":
            path, tokens = ("", *value), value
            match = cache.kv.match(raw(*tokens), "").num_blocks
            short = len(tokens) - cache.kv.num_free_blocks
            if short > 0:  # make room first, so that what is evicted is seen
                evict(min(short, cache.kv.num_cached_blocks))
            match = cache.kv.match(raw(*tokens), "").num_blocks
            full = cache.kv.tree.match(raw(*tokens), "", len(tokens)).num_blocks
            slot = cache.hold(*tokens)
            if slot is not None:
                blocks = cache.kv.tables.ids[slot, : len(tokens)].tolist()
                held.append((slot, blocks))
                if on_hold is not None:
                    on_hold(path, blocks, match, full)
        elif kind == "release" and held:
            slot, blocks = held.pop(value[0] % len(held))
            cache.release(slot, value[1])
            if on_release is not None:
                on_release(blocks)
        elif kind == "evict":
            evict(min(value, cache.kv.num_cached_blocks))
        elif kind == "wait":
            cache.now_s += value


def operations(hints):
    return st.lists(
        st.one_of(
            st.tuples(st.just("hold"), PROMPTS),
            st.tuples(st.just("hold"), PROMPTS),
            st.tuples(st.just("release"), st.tuples(st.integers(0, 7), hints)),
            st.tuples(st.just("release"), st.tuples(st.integers(0, 7), hints)),
            st.tuples(st.just("evict"), st.integers(1, 4)),
            st.tuples(st.just("wait"), st.integers(1, 30)),
        ),
        max_size=40,
    )


@pytest.mark.parametrize("name", MODELLED)
@settings(deadline=None, max_examples=100)
@given(operations=operations(st.none()))
def test_each_eviction_is_the_least_of_the_leaves_by_a_model_of_single_blocks(name, operations):
    cache, model = Cache(MODELLED[name](), NUM_BLOCKS), Model(NUM_BLOCKS)
    rank = getattr(model, name)

    def evict(count):
        paths, owners = model.paths, cache.kv.pool.refs
        for block in cache.evict(count):
            parents = {path[:-1] for path in paths.values()}
            leaves = [b for b, path in paths.items() if not owners[b] and path not in parents]
            assert block in leaves
            assert rank(block) <= min(rank(b) for b in leaves) + 1e-9
            model.forget(block)
            model.num_evicted += 1

    def on_hold(path, blocks, match, full):
        model.use(path, blocks, match, full, cache.now_s)
        model.touch(blocks, cache.now_s)

    run_operations(
        cache, operations, evict=evict, on_hold=on_hold, on_release=lambda blocks: model.touch(blocks, cache.now_s)
    )
    assert len(model.paths) == cache.kv.tree.num_blocks


@settings(deadline=None, max_examples=60)
@given(operations=operations(HINTS))
def test_without_a_protected_share_a_segmented_lru_is_an_lru(operations):
    caches = [Cache(policy, NUM_BLOCKS) for policy in (Lru(), SegmentedLru(NUM_BLOCKS, 0.0))]
    evicted = [[], []]
    for cache, log in zip(caches, evicted, strict=True):
        run_operations(cache, operations, evict=lambda count, cache=cache, log=log: log.extend(cache.evict(count)))
    assert evicted[0] == evicted[1]


@pytest.mark.parametrize("name", policies())
@settings(deadline=None, max_examples=100)
@given(operations=operations(HINTS), share=st.sampled_from([0.0, 0.3, 0.5, 1.0]))
def test_pins_are_bounded_and_yield_and_everything_without_owner_can_go(name, operations, share):
    cache = Cache(policies(NUM_BLOCKS)[name], NUM_BLOCKS, max_pinned_share=share)
    tree = cache.kv.tree

    def evict(count):
        for _ in range(count):
            leaves = [node for node in tree.nodes if tree.candidates.can_shorten(node)]
            ordinary = {int(node.blocks[-1]) for node in leaves if not node.pinned_until_s}
            (block,) = cache.evict(1)
            assert not ordinary or block in ordinary
            assert tree.pins.num_blocks <= share * NUM_BLOCKS
        policy = tree.policy
        if isinstance(policy, SegmentedLru):
            protected = sum(len(node.blocks) for node in tree.nodes if node.history)
            assert policy.num_protected_blocks == protected <= policy.max_protected_blocks

    run_operations(cache, operations, evict=evict)
    for slot in sorted(set(range(8)) - set(cache.slots)):
        cache.release(slot)
    evict(cache.kv.num_cached_blocks)
    assert cache.kv.num_free_blocks == NUM_BLOCKS
    assert tree.pins.num_blocks == len(tree.nodes) == 0
