"""Heads that were seen before are taken without parsing, and nothing can be told from that but the time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_tools import ToyApp, statuses, talk, toy_server

from expediter.gateway.http.known_heads import HeadPattern, KnownHeads, pattern_of
from expediter.gateway.http.protocol import HttpConnection
from expediter.gateway.http.server_state import ServerState
from expediter.gateway.http.wire import HttpLimits

CLOSE = b"GET /end HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written = b""
        self.is_over = False

    def write(self, data: bytes) -> None:
        self.written += data

    def write_eof(self) -> None:
        self.is_over = True

    close = abort = write_eof

    def is_closing(self) -> bool:
        return self.is_over

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", 1)


def told(messages: list[bytes], *, at_once: bool) -> tuple[list[tuple[Any, ...]], list[int]]:
    """Return what an application hears of messages on one connection, and the statuses of its answers."""
    app = ToyApp()
    connection, wire = HttpConnection(ServerState(app, HttpLimits())), Wire()
    connection.connection_made(wire)  # type: ignore[arg-type]
    for message in messages:
        # One that comes in two pieces is always parsed.
        for piece in [message] if at_once else [message[:9], message[9:]]:
            connection.data_received(piece)
    heard = [
        (r.method, r.target, r.path, r.query, r.version, r.headers, r.fields, r.length, r.body) for r in app.requests
    ]
    return heard, statuses(wire.written)


names = st.sampled_from([b"Content-Length", b"content-length", b"CONTENT-LENGTH", b"Content-length "])
extras = st.lists(
    st.sampled_from(
        [
            b"X-A: b",
            b"x-a: c",
            b"Expect: 100-continue",
            b"Connection: close",
            b"Connection: keep-alive",
            b"Content-Length: 3",
            b"Transfer-Encoding: chunked",
            b"Upgrade: h2c",
            b"Host: y",
        ]
    ),
    max_size=2,
)


@st.composite
def message(draw: st.DrawFn) -> bytes:
    body = draw(st.binary(max_size=12))
    length = draw(st.sampled_from([b"%d" % len(body), b"%d" % len(body), b"0%d" % len(body), b"+1", b""]))
    lines = [*draw(extras), draw(names) + b": " + length]
    line = draw(st.sampled_from([b"POST /a%20b?c HTTP/1.1", b"POST / HTTP/1.1", b"POST / HTTP/1.0", b"GET / HTTP/1.1"]))
    order = draw(st.permutations([b"Host: x", *lines]))
    return line + b"\r\n" + b"\r\n".join(order) + b"\r\n\r\n" + body


@given(st.lists(message(), min_size=1, max_size=3).map(lambda some: [*some, *some, *some]))
def test_a_known_head_means_what_it_meant_when_it_was_parsed(messages: list[bytes]) -> None:
    assert told(messages, at_once=True) == told(messages, at_once=False)


HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 12\r\nA: b\r\n\r\n"


def test_only_the_length_may_differ() -> None:
    pattern = HeadPattern(HEAD)
    assert pattern.length == 12
    for digits in (b"12", b"3", b"0", b"123456789"):
        other = HEAD.replace(b"12", digits)
        assert pattern.find(other + b"...") == (int(digits), len(other))
    for digits in (b"", b"1234567890", b"+1", b"-1", b"1_0", b" 1", b"1 ", b"1\r\nB: c", "\u0661".encode()):
        assert pattern.find(HEAD.replace(b"12", digits)) is None
    for other in (HEAD.replace(b"b", b"c"), HEAD.replace(b"Length", b"length"), HEAD[:-1], HEAD[:-8], b""):
        assert pattern.find(other) is None


def test_without_a_length_nothing_may_differ() -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    pattern = HeadPattern(head)
    assert pattern.length is None
    assert pattern.find(head + b"5\r\n") == (0, len(head))
    assert pattern.find(head[:-1]) is None


def test_the_pattern_of_a_message_is_that_of_a_whole_one() -> None:
    assert pattern_of(HEAD + b"x" * 12) is not None
    for other in (HEAD + b"x" * 11, HEAD + b"x" * 13, HEAD[:-2], b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"):
        assert pattern_of(other) is None


@pytest.mark.parametrize("path", [b"/refused", b"/x"])
async def test_limits_and_refusals_hold_for_known_heads(path: bytes) -> None:
    post = b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    small, large = post % (path, 3) + b"abc", post % (path, 200) + b"x" * 200
    async with toy_server(ToyApp(), max_body_bytes=100) as (_, port):
        answer = await talk(port, small, small, large)
    assert statuses(answer) == ([403] if path == b"/refused" else [200, 200, 413])


async def test_pipelined_and_known_requests_keep_their_order() -> None:
    post = b"POST /%d HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nok"
    same = b"POST /later HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nok"
    app = ToyApp()
    async with toy_server(app) as (_, port):
        talking = asyncio.create_task(talk(port, same, post % 1 + post % 1, post % 1, CLOSE))
        for number in range(400):
            if app.later:
                break
            await asyncio.sleep(0.01 if number < 399 else 0)
        await asyncio.sleep(0.1)
        app.later[0].send(200, [], b"first")
        answer = await talking
    assert statuses(answer) == [200] * 5
    assert answer.index(b"first") < answer.index(b"POST /1")


def test_a_connection_keeps_few_heads_and_no_bodies() -> None:
    app = ToyApp()
    connection, wire = HttpConnection(ServerState(app, HttpLimits())), Wire()
    connection.connection_made(wire)  # type: ignore[arg-type]
    for number in range(100):
        connection.data_received(b"POST /%d HTTP/1.1\r\nHost: x\r\nContent-Length: 4000\r\n\r\n" % number + b"x" * 4000)
    known = connection._known
    assert isinstance(known, KnownHeads)
    assert len(known._requests) <= 8
    assert not any(request.body for _, request in known._requests)
