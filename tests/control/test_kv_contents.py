"""What a cache holds, from its events: nothing that was dropped is believed in, whatever is missed or comes twice."""

from hypothesis import given
from hypothesis import strategies as st

from expediter.control.kv_contents import CacheContents, Cleared, Removed, Stored

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
    assert contents.apply(0, [Stored((1,), 16)]) == (False, False)
    assert contents.apply(1, [Removed((1,))]) == (False, True)
    assert contents.apply(2, [Cleared()]) == (True, False)
