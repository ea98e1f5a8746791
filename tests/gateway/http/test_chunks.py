"""Where chunks end is found however the bytes come, and what is no chunked body is refused."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expediter.gateway.http.chunks import ChunkError, ChunkTracker

LAST = b"0\r\n\r\n"


def framed(payloads: list[bytes], extension: bytes = b"") -> bytes:
    return b"".join(b"%x%b\r\n%b\r\n" % (len(payload), extension, payload) for payload in payloads)


def cuts(data: bytes, positions: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(position % (len(data) + 1) for position in positions)})
    return [data[begin:end] for begin, end in itertools.pairwise(edges)]


payloads = st.lists(st.binary(min_size=1, max_size=40), max_size=8)
long_payloads = st.lists(st.integers(1, 200_000).map(lambda size: b"x" * size), min_size=1, max_size=3)
splits = st.lists(st.integers(0, 10**6), max_size=12)


@given(payloads | long_payloads, splits, st.sampled_from([b"", b";a=b", b" "]))
def test_what_is_passed_on_is_what_came_in_whole_chunks(
    parts: list[bytes], positions: list[int], extension: bytes
) -> None:
    raw = framed(parts, extension) + LAST
    tracker, passed = ChunkTracker(), b""
    for piece in cuts(raw, positions):
        assert not tracker.ended
        passed += tracker.feed(piece)
        assert raw.startswith(passed)
        if tracker.at_boundary:  # another chunk could follow here
            ends = {len(framed(parts[:count], extension)) for count in range(len(parts) + 1)} | {len(raw)}
            assert len(passed) in ends
    assert tracker.ended
    assert passed == raw


@given(payloads | long_payloads, splits)
def test_unwrapped_chunks_are_their_payload(parts: list[bytes], positions: list[int]) -> None:
    tracker = ChunkTracker(unwraps=True)
    raw = framed(parts) + LAST
    assert b"".join(map(tracker.feed, cuts(raw, positions))) == b"".join(parts)
    assert tracker.ended


@given(payloads, splits)
def test_trailers_are_left_out(parts: list[bytes], positions: list[int]) -> None:
    tracker = ChunkTracker()
    raw = framed(parts) + b"0\r\nX-Checksum: 1\r\nSet-Cookie: a=b\r\n\r\n"
    assert b"".join(map(tracker.feed, cuts(raw, positions))) == framed(parts) + LAST
    assert tracker.ended


def test_a_short_chunk_is_held_until_it_is_whole() -> None:
    tracker = ChunkTracker()
    assert tracker.feed(b"5\r\nhel") == b""
    assert tracker.at_boundary
    assert tracker.feed(b"lo\r\n5\r\n") == b"5\r\nhello\r\n"
    assert tracker.at_boundary


def test_of_a_long_chunk_what_is_there_goes_on() -> None:
    tracker = ChunkTracker()
    size = 1 << 20
    raw = b"%x\r\n" % size + b"x" * 1000
    assert tracker.feed(raw) == raw
    assert not tracker.at_boundary
    assert tracker.feed(b"x" * (size - 1000)) == b"x" * (size - 1000)
    assert tracker.feed(b"\r") == b""
    assert tracker.feed(b"\n" + LAST) == b"\r\n" + LAST
    assert tracker.ended


@pytest.mark.parametrize(
    "raw",
    [
        b"0x5\r\nhello\r\n",
        b"+5\r\nhello\r\n",
        b"-5\r\nhello\r\n",
        b"5_0\r\nhello\r\n",
        b" 5\r\nhello\r\n",
        b"\r\nhello",
        b"5\nhello\n",
        b"g\r\n",
        b"5\r\nhelloXX",
        b"5\r\nhello!\r\n",
        b"1234567890abcdef\r\n",
        b"5;" + b"a" * 400 + b"\r\nhello\r\n",
        b"0\r\n\r\nmore",
        b"0\r\n" + b"X: y\r\n" * 5000,
    ],
)
@pytest.mark.parametrize("in_pieces", [False, True])
def test_what_is_not_chunked_is_refused(raw: bytes, in_pieces: bool) -> None:
    tracker = ChunkTracker()
    pieces = [raw[i : i + 1] for i in range(len(raw))] if in_pieces else [raw]
    with pytest.raises(ChunkError):
        list(map(tracker.feed, pieces))
