"""Bodies, heads and clients without measure cost little memory, and nobody else notices (CASES 48, 52, 53)."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import pytest
from tests.door.front_door import FrontDoor, run, until
from tests.door.http_client import CHAT, Answer, Connection, ask, chat
from tests.door.mock_backends import Behaviour, MockBackend

from expediter.gateway.http.wire import HttpLimits

MIB = 1 << 20


async def peak_rss(door: FrontDoor, stop: asyncio.Event) -> int:
    """Return the most memory that the door had until told to stop."""
    peak = 0
    while not stop.is_set():
        peak = max(peak, door.rss_bytes())
        await asyncio.sleep(0.002)
    return peak


def test_bodies_of_20_mb_at_once(door: FrontDoor, mocks: list[MockBackend]) -> None:
    """Case 53 (CVE-2025-48956 and others): refused, or passed on, and in either case without several copies of it."""

    async def story() -> None:
        assert (await ask(door.port, chat())).is_good
        body = chat("m" * (20 * MIB))
        stop = asyncio.Event()
        before, watching = door.rss_bytes(), asyncio.create_task(peak_rss(door, stop))
        answers = await asyncio.gather(*(ask(door.port, body) for _ in range(6)))
        stop.set()
        for answer in answers:
            assert answer.status in (0, 413, 200), answer.status  # 0: it closed while we were still sending
        assert await watching - before < 6 * 20 * MIB * 1.5 + 20 * MIB
        assert {answer.status for answer in answers} != {0} or len(answers) == 0
        assert (await ask(door.port, chat())).is_good

    run(story())


def test_a_chunked_body_without_end(door: FrontDoor) -> None:
    """Case 53: nobody says how long it will be; it is refused when it has become too long, and soon read no further."""

    async def story() -> None:
        connection = await Connection.open(door.port)
        connection.writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: d\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        before, sent, sent_before_answer = door.rss_bytes(), 0, 0
        receiving = asyncio.create_task(connection.receive(Answer(time.monotonic())))
        with suppress(ConnectionError):
            async with asyncio.timeout(20):
                while True:
                    connection.writer.write(b"%x\r\n%s\r\n" % (MIB, b"q" * MIB))
                    sent += MIB
                    await connection.writer.drain()
                    await asyncio.sleep(0)  # a door that keeps up lets `drain` return at once: nobody would receive
                    if not receiving.done():
                        sent_before_answer = sent
                    else:
                        await asyncio.sleep(0.01)
        answer = await receiving
        connection.leave()
        assert answer.status == 413
        assert answer.is_whole, "what is sent meanwhile takes nothing of it away"
        assert sent_before_answer < 48 * MIB, "the limit, and what two sockets hold"
        assert door.rss_bytes() - before < 100 * MIB
        assert (await ask(door.port, chat())).is_good

    run(story())


@pytest.mark.parametrize(
    "head",
    [
        b"POST " + CHAT.encode() + b" HTTP/1.1\r\nhost: d\r\nx-pad: " + b"a" * MIB + b"\r\n\r\n",
        b"POST " + CHAT.encode() + b" HTTP/1.1\r\nhost: d\r\n" + b"x-pad: 1\r\n" * 50_000 + b"\r\n",
        b"GET /" + b"a" * MIB + b" HTTP/1.1\r\nhost: d\r\n\r\n",
        b"POST " + CHAT.encode() + b" HTTP/1.1\r\nhost: d\r\nauthorization: Bearer " + b"k" * MIB + b"\r\n\r\n",
    ],
    ids=["one header", "many headers", "path", "key"],
)
def test_a_head_of_a_megabyte_is_refused(door: FrontDoor, head: bytes) -> None:
    """Case 53."""

    async def story() -> None:
        before = door.rss_bytes()
        for _ in range(10):
            connection = await Connection.open(door.port)
            connection.writer.write(head)
            answer = await asyncio.wait_for(connection.receive(Answer(time.monotonic())), 10)
            connection.leave()
            assert answer.status in (0, 400, 413, 414, 431), answer.status
        assert door.rss_bytes() - before < 32 * MIB
        assert (await ask(door.port, chat())).is_good

    run(story())


def test_slow_senders_are_let_go_and_disturb_nobody(door: FrontDoor, mocks: list[MockBackend]) -> None:
    """Case 53, slowloris: heads and bodies that come a byte at a time, on many connections."""

    async def story() -> None:
        before = door.rss_bytes()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: d\r\ncontent-length: 4000\r\n\r\n".encode()
        slow = [await Connection.open(door.port) for _ in range(200)]
        for number, connection in enumerate(slow):
            connection.writer.write(head[: len(head) - number % 2 * 8])
        started_s = time.monotonic()
        while time.monotonic() - started_s < 3:
            for connection in slow:
                if not connection.writer.is_closing():
                    connection.writer.write(b"z")
            assert (await ask(door.port, chat(), timeout_s=5)).is_good
            await asyncio.sleep(0.1)
        assert door.rss_bytes() - before < 32 * MIB
        assert sum(len(mock.work) for mock in mocks) < 100, "unfinished requests reach nobody"
        for connection in slow:
            connection.leave()

    run(story())


def test_a_reader_that_stops_reading(door: FrontDoor, mocks: list[MockBackend]) -> None:
    """Case 52: a stream of 200 MB to a client that reads nothing.

    The door holds a bounded part of it, so the backend is made to wait or the request is ended; others are served.
    """

    async def story() -> None:
        for mock in mocks:
            mock.behaviour = Behaviour(num_chunks=2000, reply_bytes=100_000)
        before = door.rss_bytes()
        stuck = [await Connection.open(door.port) for _ in range(4)]
        for connection in stuck:
            connection.writer.transport.pause_reading()
            connection.send("POST", CHAT, chat(stream=True))
        await until(lambda: sum(len(mock.work) for mock in mocks) == 4)
        for mock in mocks:
            mock.behaviour = Behaviour()
        for _ in range(20):
            assert (await ask(door.port, chat(), timeout_s=5)).is_good
            assert door.rss_bytes() - before < 64 * MIB
            await asyncio.sleep(0.1)
        for connection in stuck:
            connection.leave()
        await until(lambda: sum(mock.num_in_flight for mock in mocks) == 0, 5, "the backends see it")

    run(story())


def test_an_idle_connection_is_kept_longer_than_clients_keep_theirs(door: FrontDoor) -> None:
    """Case 48 (llm-d PR#1564): we never close first, so no request of a client's pool meets a closing connection."""
    assert HttpLimits().keep_alive_s > 90, "aiohttp keeps theirs for 15 s, httpx for 5, nginx for 60, Go for 90"

    async def story() -> None:
        connection = await Connection.open(door.port)
        for pause_s in (0.0, 1.0, 3.0):
            await asyncio.sleep(pause_s)
            assert (await connection.ask("POST", CHAT, chat())).is_good
        await connection.close()

    run(story())


def test_pipelined_requests_are_answered_in_order_or_refused(door: FrontDoor) -> None:
    async def story() -> None:
        connection = await Connection.open(door.port)
        for number in range(5):
            connection.send("POST", CHAT, chat(f"{number}", max_tokens=number + 1))
        answers = [await connection.receive(Answer(time.monotonic())) for _ in range(5)]
        connection.leave()
        good = [answer for answer in answers if answer.is_good]
        assert good, "the first at least"
        tokens = [answer.json["usage"]["completion_tokens"] for answer in good]
        assert tokens == list(range(1, len(tokens) + 1))

    run(story())


def test_expect_100_continue(door: FrontDoor) -> None:
    """curl asks before it sends more than a kilobyte; without an answer it waits for a second."""

    async def story() -> None:
        body = chat("e" * 5000)
        connection = await Connection.open(door.port)
        head = f"POST {CHAT} HTTP/1.1\r\nhost: d\r\nexpect: 100-continue\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.writer.write(head.encode())
        assert (await asyncio.wait_for(connection.reader.readuntil(b"\r\n\r\n"), 5)).startswith(b"HTTP/1.1 100 ")
        connection.writer.write(body)
        assert (await connection.receive(Answer(time.monotonic()))).is_good
        connection.leave()

    run(story())
