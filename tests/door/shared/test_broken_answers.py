"""A backend that breaks off, or whose bytes are no HTTP: never a clean end of something incomplete (CASE 42)."""

from __future__ import annotations

import asyncio

import pytest
from tests.door.front_door import FrontDoor, front_door, run
from tests.door.http_client import CHAT, Connection, ask, ask_all, chat
from tests.door.mock_backends import MockBackend, all_do

OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"id":"mock","choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
CHUNK = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)


@pytest.mark.parametrize("moment", ["mid_stream", "after_head"])
def test_a_stream_that_breaks_ends_with_an_error_event_and_no_clean_end(
    door: FrontDoor, mocks: list[MockBackend], moment: str
) -> None:
    """Case 42: after the head of a stream the only way to say it is an event, and then the connection is cut."""

    async def story() -> None:
        all_do(mocks, reset=moment, num_chunks=6)
        answer = await ask(door.port, chat(stream=True))
        if answer.status >= 500:  # nothing had been sent to the client yet: better still
            assert moment == "after_head"
            assert answer.json["error"]
            return
        assert answer.status == 200
        assert not answer.is_whole
        assert "[DONE]" not in answer.events
        assert answer.events[-1]["error"]["message"]
        assert len(answer.events) == (4 if moment == "mid_stream" else 1)

    run(story())


def test_a_stream_that_hangs_is_ended_by_its_lack_of_progress(mocks: list[MockBackend]) -> None:
    """How long a gap may be is learned from streams that ended well."""
    with front_door(mocks, config="[door]\nmin_progress_s = 1.5\n") as door:

        async def story() -> None:
            all_do(mocks, num_chunks=6, gap_s=0.01)
            assert all(answer.is_good for answer in await ask_all(door.port, [chat(stream=True)] * 20, 4))
            all_do(mocks, hang="mid_stream", num_chunks=6)
            answer = await ask(door.port, chat(stream=True))
            assert answer.status == 200
            assert not answer.is_whole
            assert answer.events[-1]["error"]["message"]
            assert 1 < answer.took_s < 8

        run(story())


def test_a_stream_that_hangs_is_ended_where_no_gap_was_ever_seen(mocks: list[MockBackend]) -> None:
    with front_door(mocks, config="[door]\nmin_progress_s = 0.5\nusual_gap_s = 0.5\n") as door:

        async def story() -> None:
            all_do(mocks, hang="mid_stream", num_chunks=6)
            answer = await ask(door.port, chat(stream=True))
            assert answer.status == 200
            assert answer.events[-1]["error"]["message"]
            assert 1.5 < answer.took_s < 6
            # And one whose gaps are longer is not, once it has shown that.
            all_do(mocks, num_chunks=6, gap_s=1.0)
            assert (await ask(door.port, chat(stream=True))).is_good

        run(story())


def test_comments_that_keep_a_stream_alive_are_no_first_token(mocks: list[MockBackend]) -> None:
    """llama.cpp and TGI send them while they compute a long prompt: they go on at once, and the wait is for its start.

    It is borne as long as such a start is, not as a gap, and is the time to the first token.
    """
    with front_door(mocks, config="[door]\nmin_progress_s = 0.5\n") as door:

        async def story() -> None:
            all_do(mocks, num_chunks=6, gap_s=0.01, prefill_s=1.0)
            assert all(answer.is_good for answer in await ask_all(door.port, [chat(stream=True)] * 20, 8))
            all_do(mocks, num_chunks=6, gap_s=0.01, pings_s=(0.3, 0.3), after_pings_s=1.5)
            answer = await ask(door.port, chat(stream=True))
            assert answer.is_good
            assert [data for _, data in answer.chunks[:2]] == [b":\n\n"] * 2
            assert answer.chunks[1][0] - answer.sent_s < 1.5
            assert answer.events[-1] == "[DONE]"
            (told,) = door.get(f"/requests/{answer.headers['x-request-id']}").json["gateway"]
            assert told["spans"][-2]["details"]["first_byte_s"] > 2
            # Nobody else can go on where bytes have been sent.
            all_do(mocks, reset="after_pings", pings_s=(0.1,), num_chunks=6)
            answer = await ask(door.port, chat(stream=True))
            assert not answer.is_whole
            assert answer.events[-1]["error"]["message"]

        run(story())


def test_a_reply_with_a_length_that_breaks_is_cut_too(door: FrontDoor, mocks: list[MockBackend]) -> None:
    async def story() -> None:
        all_do(mocks, reset="mid_stream", reply_bytes=400_000)
        answer = await ask(door.port, chat())
        assert not answer.is_good

    run(story())


BROKEN = {
    "no http": b"\x16\x03\x01\x02\x00 hello\r\n\r\n",
    "nothing": b"",
    "half a head": b"HTTP/1.1 200 OK\r\ncontent-ty",
    "bad status": b"HTTP/1.1 banana OK\r\ncontent-length: 2\r\n\r\n{}",
    "bad length": OK + b"content-length: -5\r\n\r\n{}",
    "two lengths": OK + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{} ",
    "length and chunked": OK + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "body too short": OK + b'content-length: 999\r\n\r\n{"a": 1}',
    "huge head": OK + b"x-pad: " + b"a" * 2_000_000 + b"\r\ncontent-length: 2\r\n\r\n{}",
    "many headers": OK + b"".join(b"x-%d: 1\r\n" % i for i in range(20_000)) + b"content-length: 2\r\n\r\n{}",
    "header injection": OK + b"x-request-id: a\x00b\r\ncontent-length: 2\r\n\r\n{}",
    "chunk size": SSE + b"zz\r\nhello\r\n0\r\n\r\n",
    "chunk size huge": SSE + b"fffffffffffffffffff\r\nhello",
    "chunk without end": SSE + CHUNK + b"5\r\nhelloXX0\r\n\r\n",
    "stream without end": SSE + CHUNK + CHUNK,
}


@pytest.mark.parametrize("kind", BROKEN)
def test_bytes_that_are_no_whole_answer(door: FrontDoor, mocks: list[MockBackend], kind: str) -> None:
    """The client gets an error or a cut, never a whole 200; the door serves the next one on a fresh connection."""

    async def story() -> None:
        all_do(mocks, raw=BROKEN[kind])
        for stream in (False, True):
            answer = await ask(door.port, chat(stream=stream), timeout_s=20)
            allowed_whole = kind == "length and chunked"  # RFC 9112, 6.3: a proxy may take it as chunked, and close
            assert not answer.is_good or allowed_whole, (answer.status, answer.headers, answer.body[:200])
            assert answer.status == 0 or answer.status >= 500 or answer.status == 200
            if answer.status >= 500:
                assert answer.json["error"]["message"]
        all_do(mocks)
        await asyncio.sleep(0.3)
        for _ in range(100):
            answer = await ask(door.port, chat())
            if answer.is_good:
                break
            assert answer.status in (502, 503)
            await asyncio.sleep(0.05)
        assert answer.is_good

    run(story())


def test_what_comes_after_an_answer_is_no_answer_to_the_next_request(door: FrontDoor, mocks: list[MockBackend]) -> None:
    """Response smuggling: a backend sends one answer too many on a kept connection."""

    async def story() -> None:
        two = OK + b'content-length: 11\r\n\r\n{"mine": 1}' + OK + b'content-length: 15\r\n\r\n{"stranger": 1}'
        all_do(mocks, raw=two)
        connection = await Connection.open(door.port)
        answers = [await connection.ask("POST", CHAT, chat()) for _ in range(8)]
        connection.leave()
        assert not any(b"stranger" in answer.body for answer in answers)

    run(story())


def test_large_replies_come_whole_and_alike(door: FrontDoor, mocks: list[MockBackend]) -> None:
    async def story() -> None:
        all_do(mocks, reply_bytes=3_000_000)
        answers = await ask_all(door.port, [chat(f"{i}") for i in range(8)], 4)
        assert all(len(answer.json["choices"][0]["message"]["content"]) == 3_000_000 for answer in answers)
        all_do(mocks, reply_bytes=200_000, num_chunks=8)
        answers = await ask_all(door.port, [chat(f"{i}", stream=True) for i in range(8)], 4)
        for answer in answers:
            texts = [event["choices"][0]["delta"].get("content", "") for event in answer.events[:-1]]
            assert texts == [f"{i}:{'x' * 200_000}" for i in range(8)] + [""]

    run(story())
