"""What a cache holds, from its events: nothing that was dropped is believed in, whatever is missed or comes twice."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from expediter.control.kv_contents import CacheContents, Cleared, News, Removed, Stored
from expediter.control.prefix_index import prefix_keys, root_key

events = st.one_of(
    st.lists(st.integers(0, 9), max_size=4).map(lambda hashes: Stored(tuple(hashes), 16)),
    st.lists(st.integers(0, 9), max_size=4).map(lambda hashes: Removed(tuple(hashes))),
    st.just(Cleared()),
)


def held_after(batches):
    held = set()
    for batch in batches:
        for event in batch:
            if isinstance(event, Stored):
                held |= set(event.hashes)
            elif isinstance(event, Removed):
                held -= set(event.hashes)
            else:
                held = set()
    return held


@given(st.lists(st.lists(events, max_size=4), max_size=12), st.data())
def test_what_is_known_is_held_and_complete_is_exact(batches, data):
    contents = CacheContents()
    seen = 0
    for number, batch in enumerate(batches):
        if data.draw(st.booleans(), "missed"):
            continue
        assert contents.misses(number) == (number > seen)
        contents.apply(number, batch)
        seen = number + 1
        if data.draw(st.booleans(), "twice") and number:
            contents.apply(number, batch)
        held = held_after(batches[: number + 1])
        assert contents.num_tokens <= 16 * len(held)
        if contents.is_complete:
            assert contents.num_tokens == 16 * len(held)


def test_an_engine_that_begins_anew_has_an_empty_cache():
    contents = CacheContents()
    contents.apply(0, [Stored((1, 2, 3), 16)])
    contents.apply(1, [Stored((4,), 16)])
    news = contents.apply(0, [Stored((9,), 16)])
    assert news.is_lost
    assert contents.num_tokens == 16
    assert not contents.misses(1)


def test_news_say_what_is_gone():
    contents = CacheContents()
    assert contents.apply(0, [Stored((1,), 16)]) == News()
    assert contents.apply(1, [Removed((1,))]) == News(has_dropped=True)
    assert contents.apply(2, [Cleared()]) == News(is_lost=True)


@given(st.integers(0, 3), st.integers(1, 3), st.sampled_from(["", "salt"]), st.data())
def test_blocks_have_the_numbers_of_their_prompts_prefixes(num_before, num_blocks, salt, data):
    """Stored in one go or one after the other, in blocks as large as the index's or larger."""
    block_tokens = data.draw(st.sampled_from([16, 32]))
    prompt = np.arange((num_before + num_blocks) * block_tokens, dtype=np.int32)
    contents = CacheContents()
    contents.root = root_key(salt)
    found = []
    cuts = [num_before] if num_before else []
    for number, (begin, end) in enumerate(pairwise([0, *cuts, num_before + num_blocks])):
        tokens = tuple(prompt[begin * block_tokens : end * block_tokens].tolist())
        names = tuple(range(begin, end))
        news = contents.apply(number, [Stored(names, block_tokens, begin - 1 if begin else None, tokens)])
        found += [key for keys in news.stored for key in keys]
    assert found == prefix_keys(prompt, salt, 16)
    dropped = contents.apply(number + 1, [Removed((num_before + num_blocks - 1,))]).dropped
    assert dropped == found[-block_tokens // 16 :]


def test_blocks_of_unknown_place_have_no_numbers():
    contents = CacheContents()
    contents.root = 0
    tokens = tuple(range(16))
    assert contents.apply(0, [Stored((1,), 16, "who", tokens)]).stored == []
    assert contents.apply(1, [Stored((2,), 16, None, ())]).stored == []
    assert contents.apply(2, [Stored((3,), 24, None, tuple(range(24)))]).stored == []
    assert contents.num_tokens == 16 + 16 + 24
