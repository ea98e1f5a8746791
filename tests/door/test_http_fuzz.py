"""Bytes that are no HTTP, or nearly: no 500, no hang, flat memory, a probe is answered afterwards (CASE 44, fuzz)."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.door.front_door import FrontDoor, front_door, run
from tests.door.http_client import CHAT, Answer, Connection, ask, chat
from tests.door.mock_backends import mock_backends

MIB = 1 << 20
GOOD = b"POST %s HTTP/1.1\r\nhost: door\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (
    *(CHAT.encode(), len(chat()), chat()),
)
TOKENS = (
    *(b"\r\n", b"\n", b"\r", b"\r\n\r\n", b" ", b"\t", b":", b"\x00", b"\xff", b"HTTP/1.1", b"HTTP/9.9", b"HTTP/1.0"),
    *(
        b"GET",
        b"POST",
        b"CONNECT",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"/v1/chat/completions",
        b"//v1",
        b"/../..",
        b"*",
    ),
    *(b"content-length: ", b"content-length: -1\r\n", b"content-length: 99999999999999999999\r\n", b"+5", b"0x10"),
    *(b"transfer-encoding: chunked\r\n", b"transfer-encoding: identity, chunked\r\n", b"0\r\n\r\n", b"ffffffff\r\n"),
    *(
        b"5;ext=1\r\nhello\r\n",
        b"expect: 100-continue\r\n",
        b"upgrade: websocket\r\nconnection: upgrade\r\n",
        b"{",
        b"}",
    ),
    *(b"authorization: Bearer ", b"connection: close\r\n", b"connection: keep-alive\r\n", b"host: \r\n", b"x" * 5000),
    *(
        b'{"model": "mock", "messages": []}',
        b'{"stream": true}',
        b"[" * 3000,
        b'"\\ud800"',
        b"\xef\xbb\xbf",
        b"\xed\xa0\x80",
    ),
)


@pytest.fixture(scope="module")
def door() -> Iterator[FrontDoor]:
    with mock_backends(2) as mocks, front_door(mocks) as running:
        yield running


def mutations() -> st.SearchStrategy[bytes]:
    """Return good requests with pieces cut out, doubled, replaced, or put in."""
    edit = st.tuples(
        st.integers(0, len(GOOD)), st.integers(0, 40), st.one_of(st.sampled_from(TOKENS), st.binary(max_size=20))
    )

    def apply(edits: list[tuple[int, int, bytes]]) -> bytes:
        raw = GOOD
        for start, length, put in edits:
            raw = raw[:start] + put + raw[start + length :]
        return raw

    return st.lists(edit, min_size=1, max_size=5).map(apply)


def made() -> st.SearchStrategy[bytes]:
    return st.lists(st.one_of(st.sampled_from(TOKENS), st.binary(max_size=64)), max_size=30).map(b"".join)


def bodies() -> st.SearchStrategy[bytes]:
    """Return whole requests around bodies that are JSON, nearly JSON, or not."""
    leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20))
    values = st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
        max_leaves=12,
    )
    names = st.sampled_from(["model", "messages", "prompt", "stream", "n", "max_tokens", "stop", "user", "metadata"])
    fields = st.dictionaries(names, values, max_size=6).map(lambda each: json.dumps(each).encode())
    raw = st.one_of(fields, st.binary(max_size=200), st.sampled_from(TOKENS))
    return raw.map(
        lambda body: b"POST %s HTTP/1.1\r\nhost: d\r\ncontent-length: %d\r\n\r\n%s" % (CHAT.encode(), len(body), body)
    )


async def throw(port: int, pieces: list[bytes]) -> bytes:
    """Send pieces, and return all that is answered until the door closes or falls silent.

    Silence is fine (a request may be incomplete), but then no more will come, and the door has to close.
    """
    connection = await Connection.open(port)
    received = b""

    async def read() -> None:
        nonlocal received
        while data := await connection.reader.read(65536):
            received += data

    try:
        for piece in pieces:
            connection.writer.write(piece)
            await asyncio.sleep(0)
        with suppress(TimeoutError):
            await asyncio.wait_for(read(), 0.05)
        connection.writer.write_eof()
        await asyncio.wait_for(read(), 5)
    except OSError:
        pass
    finally:
        connection.leave()
    return received


def statuses(raw: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) [^\r\n]*\r\n", raw)]


def check(door: FrontDoor, raw: bytes, cuts: list[int]) -> None:
    async def story() -> None:
        edges = sorted({0, len(raw), *(cut % (len(raw) + 1) for cut in cuts)})
        received = await throw(door.port, [raw[a:b] for a, b in pairwise(edges)])
        assert not received or received.startswith(b"HTTP/1.1 "), received[:100]
        for status in statuses(received):
            assert status < 500 or status in (501, 505), (raw, received[:300])

    run(story(), 20)


FUZZ = settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow])


@FUZZ
@given(raw=mutations(), cuts=st.lists(st.integers(0, 400), max_size=3))
def test_mutated_requests(door: FrontDoor, raw: bytes, cuts: list[int]) -> None:
    check(door, raw, cuts)


@FUZZ
@given(raw=made(), cuts=st.lists(st.integers(0, 2000), max_size=3))
def test_made_up_bytes(door: FrontDoor, raw: bytes, cuts: list[int]) -> None:
    check(door, raw, cuts)


@FUZZ
@given(raw=bodies(), cuts=st.lists(st.integers(0, 400), max_size=3))
def test_bodies(door: FrontDoor, raw: bytes, cuts: list[int]) -> None:
    check(door, raw, cuts)


SMUGGLING = {
    "two lengths": b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello!",
    "length list": b"content-length: 5, 6\r\n\r\nhello!",
    "length and chunked": b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked in between": b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "chunked twice": b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "unknown coding": b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    "space before colon": b"content-length : 5\r\n\r\nhello",
    "folded header": b"x-a: 1\r\n content-length: 5\r\n\r\nhello",
    "bare line feed": b"content-length: 5\nx: y\n\nhello",
    "negative": b"content-length: -5\r\n\r\nhello",
    "plus": b"content-length: +5\r\n\r\nhello",
    "hexadecimal": b"content-length: 0x5\r\n\r\nhello",
    "overflow": b"content-length: 18446744073709551621\r\n\r\nhello",
    "chunk size with sign": b"transfer-encoding: chunked\r\n\r\n+5\r\nhello\r\n0\r\n\r\n",
    "chunk without end": b"transfer-encoding: chunked\r\n\r\n5\r\nhelloXX0\r\n\r\n",
}


@pytest.mark.parametrize("kind", SMUGGLING)
def test_ambiguous_framing_is_no_way_in(door: FrontDoor, kind: str) -> None:
    """What two parsers could read differently is refused, and the connection closed: no second request hides in it."""

    async def story() -> None:
        hidden = b"GET /hidden HTTP/1.1\r\nhost: d\r\n\r\n"
        raw = b"POST %s HTTP/1.1\r\nhost: d\r\n" % CHAT.encode() + SMUGGLING[kind] + hidden
        received = await throw(door.port, [raw])
        found = statuses(received)
        assert found[:1] in ([], [400], [501]), received[:300]
        assert 404 not in found, "the hidden request was read as one"

    run(story(), 20)


@pytest.mark.parametrize(
    "body",
    [
        *[b"", b"{", b'{"model": "mock"', b'{"model": "mock"} x', b"[]", b'"hi"', b"null", b"7", b"\x00"],
        *[b'{"model": "\\ud800"}', b'\xef\xbb\xbf{"model": "mock"}', b'{"model": "\xff"}'],
        *[b'{"model": ' + b"[" * 100_000, b'{"model": "mock", "messages": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"],
        *[json.dumps({"model": "mock"}).encode("utf-16"), b'{"x":' * 50_000],
    ],
)
def test_malformed_bodies_are_a_400_in_openais_shape(door: FrontDoor, body: bytes) -> None:
    """Case 44 (sglang #3805, colibri PR#1589): refused at the door; backends of others need not know how."""

    async def story() -> None:
        answer = await ask(door.port, body)
        assert answer.status == 400, (answer.status, answer.body)
        assert set(answer.json["error"]) == {"message", "type", "param", "code"}
        assert (await ask(door.port, chat())).is_good

    run(story())


def test_memory_and_sockets_after_much_of_it(door: FrontDoor) -> None:
    """Thousands of broken connections leave nothing behind."""

    async def story() -> None:
        samples = [GOOD[:cut] for cut in range(0, len(GOOD), 7)] + [token * 20 for token in TOKENS]

        async def batch() -> None:
            for start in range(0, len(samples), 20):
                await asyncio.gather(*(drop(sample) for sample in samples[start : start + 20]))

        async def drop(raw: bytes) -> None:
            connection = await Connection.open(door.port)
            connection.writer.write(raw)
            await asyncio.sleep(0.001)
            connection.leave()

        for _ in range(5):
            await batch()
        before, fds = door.rss_bytes(), door.num_fds()
        for _ in range(15):
            await batch()
        assert door.rss_bytes() - before < 8 * MIB
        started_s = time.monotonic()
        while door.num_fds() > fds + 4:
            assert time.monotonic() - started_s < 10, (door.num_fds(), fds)
            await asyncio.sleep(0.05)
        probe = await ask(door.port, chat())
        assert isinstance(probe, Answer)
        assert probe.is_good

    run(story())
