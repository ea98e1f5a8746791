"""Streams of tokens become text in whole characters, and stop strings are never shown."""

import itertools
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers_for_tests import byte_level, sentencepiece, wordpiece

from expediter.core.errors import RequestError
from expediter.engine.detokenizer import IncrementalDetokenizer, StopMatcher
from expediter.engine.tokenizer import Tokenizer

BYTE_LEVEL = byte_level()
SENTENCEPIECE = sentencepiece()
WORDPIECE = wordpiece()

unicode_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.text(
    "aé你😀\u200d👩 \n", max_size=40
)


def _stream(tokenizer: Tokenizer, ids: list[int], sizes: list[int] = [1], **options) -> list[str]:  # noqa: B006 - read only
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    pieces, begin, turn = [], 0, 0
    while begin < len(ids):
        size = sizes[turn % len(sizes)]
        pieces.append(detokenizer.push(ids[begin : begin + size]))
        begin, turn = begin + size, turn + 1
    return [*pieces, detokenizer.flush()]


@settings(deadline=None)
@given(text=unicode_text, sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_byte_level_stream_equals_the_text(text: str, sizes: list[int]) -> None:
    pieces = _stream(BYTE_LEVEL, BYTE_LEVEL.encode(text), sizes)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text


@settings(deadline=None)
@given(
    ids=st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 3), max_size=40),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    skip=st.booleans(),
)
def test_any_byte_level_tokens_stream_as_they_decode_at_once(ids: list[int], sizes: list[int], skip: bool) -> None:
    """Random tokens make invalid bytes; those are U+FFFD, but a character cut off by the end is left out."""
    whole = BYTE_LEVEL.decode(ids, skip_special_tokens=skip)
    streamed = "".join(_stream(BYTE_LEVEL, ids, sizes, skip_special_tokens=skip))
    assert whole in {streamed, streamed + "\ufffd"}


@settings(deadline=None)
@given(text=unicode_text)
def test_smollm2_stream_equals_the_text(text: str, smollm2_tokenizer: Tokenizer) -> None:
    ids = smollm2_tokenizer.encode(text, add_special_tokens=False)
    assert "".join(_stream(smollm2_tokenizer, ids)) == smollm2_tokenizer.decode(ids)


@settings(deadline=None)
@given(text=unicode_text, sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4))
@example(text="the fox 😀 the 你好 fox", sizes=[1])
@example(text="😀😀😀", sizes=[1])
def test_sentencepiece_stream_equals_decoding_at_once(text: str, sizes: list[int]) -> None:
    ids = SENTENCEPIECE.encode(text)
    assert "".join(_stream(SENTENCEPIECE, ids, sizes)) == SENTENCEPIECE.decode(ids)


@settings(deadline=None)
@given(text=st.text("abc the fox", max_size=30))
def test_wordpiece_stream_equals_decoding_at_once(text: str) -> None:
    ids = WORDPIECE.encode(text)
    assert "".join(_stream(WORDPIECE, ids)) == WORDPIECE.decode(ids)


def test_output_is_written_as_the_continuation_of_its_prompt() -> None:
    ids = SENTENCEPIECE.encode("the fox")
    assert "".join(_stream(SENTENCEPIECE, ids[-1:])) == "fox"
    assert "".join(_stream(SENTENCEPIECE, ids[-1:], prompt_ids=ids[:-1])) == " fox"


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte-level", "sentencepiece"])
def test_no_piece_holds_part_of_a_character(tokenizer: Tokenizer) -> None:
    text = "a😀b你c"
    ids = tokenizer.encode(text)
    assert len(ids) > len(text)  # characters do span tokens
    pieces = _stream(tokenizer, ids)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte-level", "sentencepiece"])
def test_character_cut_off_by_the_end_is_left_out(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab€")[:-1]
    assert tokenizer.decode(ids).startswith("ab\ufffd")
    assert "".join(_stream(tokenizer, ids)) == "ab"


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte-level", "sentencepiece"])
def test_invalid_bytes_do_not_hold_the_stream_back(tokenizer: Tokenizer) -> None:
    """A run of continuation bytes is shown as U+FFFD soon, not at the end."""
    token = tokenizer.encode("€")[-1]
    assert tokenizer.decode([token]) == "\ufffd"
    pieces = _stream(tokenizer, [token] * 40)
    assert any("\ufffd" in piece for piece in pieces[:10])


def test_special_tokens_are_skipped_or_shown() -> None:
    end = BYTE_LEVEL.encode("<|end|>")
    assert len(end) == 1
    ids = [*BYTE_LEVEL.encode("ab"), *end]
    assert "".join(_stream(BYTE_LEVEL, ids)) == "ab"
    assert "".join(_stream(BYTE_LEVEL, ids, skip_special_tokens=False)) == "ab<|end|>"


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte-level", "sentencepiece"])
def test_cost_per_token_does_not_grow_with_the_output(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the fox 😀 " * 20)
    detokenizer = IncrementalDetokenizer(tokenizer)

    def seconds(rounds: int) -> float:
        started = time.thread_time()
        for _ in range(rounds):
            detokenizer.push(ids)
        return time.thread_time() - started

    seconds(2)
    early = min(seconds(2) for _ in range(3))
    seconds(60)
    late = min(seconds(2) for _ in range(3))
    assert late < 4 * early + 0.01


def _cut(pieces: list[str], stops: list[str], **options) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, **options)
    shown = ""
    for piece in pieces:
        text, stopped_by = matcher.push(piece)
        shown += text
        if stopped_by is not None:
            assert matcher.push("more") == ("", None)
            assert matcher.flush() == ""
            return shown, stopped_by
    return shown + matcher.flush(), None


def _reference_cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Grow the text character by character; the first end of a stop string ends it, the longest one there."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    text=st.text("ab#", max_size=30),
    stops=st.lists(st.text("ab#", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
@example(text="aab", stops=["ab"], cuts=[1, 2])
@example(text="xaba", stops=["abab", "ba"], cuts=[2])
def test_stream_is_cut_where_the_whole_text_is(text: str, stops: list[str], cuts: list[int]) -> None:
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[begin:end] for begin, end in itertools.pairwise(edges)]
    assert _cut(pieces, stops) == _reference_cut(text, stops)


def test_false_beginning_of_a_stop_string_is_shown_as_soon_as_it_is_one() -> None:
    matcher = StopMatcher(["</answer>"])
    assert matcher.push("yes </ans") == ("yes ", None)
    assert matcher.push("wers>") == ("</answers>", None)
    assert matcher.push(" </") == (" ", None)
    assert matcher.flush() == "</"


def test_stop_string_over_three_pieces_is_included_on_demand() -> None:
    assert _cut(["one ST", "O", "P two"], ["STOP"]) == ("one ", "STOP")
    assert _cut(["one ST", "O", "P two"], ["STOP"], include_stop=True) == ("one STOP", "STOP")


def test_stop_inside_characters_over_several_tokens() -> None:
    ids = BYTE_LEVEL.encode("go 😀 on")
    pieces = _stream(BYTE_LEVEL, ids)
    assert _cut(pieces, ["😀"]) == ("go ", "😀")


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError) as caught:
        StopMatcher(["a", ""])
    assert caught.value.param == "stop"
