"""Text of one choice, however its tokens are divided into batches (CASES 45, 46, 47): checked against the whole."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from live_server import EOS, make_model_folder

from expediter.core.events import Admitted, Finished, Rejected, RejectReason
from expediter.core.plan import TokenLogprobs
from expediter.core.request import FinishReason, Request
from expediter.engine.detokenizer import IncrementalDetokenizer, StopMatcher
from expediter.engine.tokenizer import Tokenizer
from expediter.gateway.errors import ApiError
from expediter.gateway.generation import Choice, Delta
from expediter.runtime.streams import RequestStream

ALPHABET = st.sampled_from("ab🍕é語\u0301 ")


@cache
def tokenizer() -> Tokenizer:
    with TemporaryDirectory() as folder:
        return Tokenizer.from_folder(make_model_folder(Path(folder)))


def make_choice(stops: Sequence[str] = (), min_tokens: int = 0) -> tuple[Choice, RequestStream]:
    request = Request(
        request_id="r", prompt=np.ones(3, np.int32), max_tokens=1000, min_tokens=min_tokens, stop_token_ids=(EOS,)
    )
    choice = Choice(0, request, IncrementalDetokenizer(tokenizer()), StopMatcher(stops))
    choice.stream = RequestStream(request, request.request_id, asyncio.Event())
    return choice, choice.stream


def finished(reason: FinishReason, num_output_tokens: int = 0) -> Finished:
    return Finished("r", 1.0, reason, 3, num_output_tokens, 0, 0)


def run(
    tokens: Sequence[int], cuts: set[int], stops: Sequence[str], reason: FinishReason, ends_alone: bool
) -> list[Delta]:
    """Feed the tokens, looking after each cut; the end comes with the last tokens or after them."""
    choice, stream = make_choice(stops)
    stream.push(Admitted("r", 0.0, 3, 0, False))
    deltas = []
    for position, token in enumerate(tokens):
        stream.push_tokens([token], TokenLogprobs(-1.0, 1, ()))
        if position in cuts and (position < len(tokens) - 1 or ends_alone) and choice.finish_reason is None:
            deltas.append(choice.poll())
    stream.push(finished(reason, len(tokens)))
    if choice.finish_reason is None:
        deltas.append(choice.poll())
    assert choice.finish_reason is not None
    return [delta for delta in deltas if delta is not None]


def expected(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The text before the stop string that is complete first, and whether there is one."""
    matches = [(begin + len(stop), begin) for stop in stops if (begin := text.find(stop)) >= 0]
    return (text[: min(matches)[1]], True) if matches else (text, False)


@settings(max_examples=400, deadline=None)
@given(
    st.text(ALPHABET, max_size=12),
    st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3),
    st.sets(st.integers(0, 60)),
    st.integers(0, 3),
    st.booleans(),
)
def test_any_division_gives_the_same_text(
    text: str, stops: list[str], cuts: set[int], num_cut_off: int, ends_by_token: bool
) -> None:
    raw = text.encode()
    raw = raw[: max(len(raw) - num_cut_off, 0)]
    tokens = [*raw, EOS] if ends_by_token else list(raw)
    reason = FinishReason.STOP if ends_by_token else FinishReason.LENGTH
    deltas = run(tokens, cuts, stops, reason, ends_alone=not ends_by_token)
    want, is_stopped = expected(raw.decode(errors="ignore"), stops)
    assert "".join(delta.text for delta in deltas) == want
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason == ("stop" if is_stopped or ends_by_token else "length")
    assert all(delta.text for delta in deltas[:-1])
    assert not any("\ufffd" in delta.text for delta in deltas)
    shown = [token for delta in deltas for token in delta.tokens]
    assert shown == tokens[: len(shown)]
    assert EOS not in shown
    assert sum(len(delta.logprobs) for delta in deltas) == len(shown)


def test_stop_strings_count_from_min_tokens_on() -> None:
    choice, stream = make_choice(["a"], min_tokens=3)
    stream.push_tokens(list(b"aabab"), None)
    delta = choice.poll()
    assert delta is not None
    assert (delta.text, delta.finish_reason, choice.num_output_tokens) == ("aab", "stop", 4)


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (finished(FinishReason.ERROR), 500),
        (finished(FinishReason.ABORT), 500),
        (Rejected("r", 0.0, RejectReason.SHUTDOWN, "closing"), 503),
        (Rejected("r", 0.0, RejectReason.TOO_LONG, "too long"), 400),
        (Rejected("r", 0.0, RejectReason.UNSERVABLE, "too large"), 400),
    ],
)
def test_failures(end: Finished | Rejected, status: int) -> None:
    choice, stream = make_choice()
    stream.push_tokens(list(b"text"), None)
    stream.push(end)
    with pytest.raises(ApiError) as caught:
        choice.poll()
    assert caught.value.status == status
    assert choice.has_ended


def test_unread_tokens_take_one_item() -> None:
    """A consumer that is behind costs a list of at most max_tokens numbers, whatever the number of steps."""
    choice, stream = make_choice()
    for _ in range(500):
        stream.push_tokens([97], None)
    assert len(stream._items) == 1
    delta = choice.poll()
    assert delta is not None
    assert delta.text == "a" * 500
