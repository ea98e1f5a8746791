"""The server's side of a connection: what it takes and refuses, and in what order it answers (CASES 48, 52, 53)."""

from __future__ import annotations

import asyncio
import socket

import pytest
from wire_tools import ToyApp, statuses, talk, toy_server, until

GET = b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n"
CLOSE = b"GET /end HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def post(path: bytes, body: bytes, *headers: bytes) -> bytes:
    lines = [b"POST /%b HTTP/1.1" % path, b"Host: x", b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


async def exchange(*pieces: bytes, **limits: float) -> bytes:
    async with toy_server(ToyApp(), **limits) as (_, port):
        return await talk(port, *pieces)


async def test_a_connection_is_kept_and_closed_when_asked() -> None:
    answer = await exchange(GET % b"a", post(b"b", b"body"), CLOSE)
    assert statuses(answer) == [200, 200, 200]
    assert b"GET /a " in answer
    assert b"POST /b body" in answer
    assert answer.count(b"connection: close\r\n") == 1


async def test_a_request_may_come_byte_by_byte() -> None:
    raw = post(b"slow", b"body", b"Connection: close")
    answer = await exchange(*(raw[i : i + 1] for i in range(len(raw))))
    assert answer.endswith(b"POST /slow body")


async def test_pipelined_requests_are_answered_in_order() -> None:
    app = ToyApp()
    async with toy_server(app) as (_, port):
        talking = asyncio.create_task(talk(port, GET % b"later" + GET % b"second" + CLOSE))
        await until(lambda: app.later)
        await asyncio.sleep(0.05)
        assert len(app.requests) == 1, "the second waits for its turn"
        app.later[0].send(200, [], b"first")
        answer = await talking
    assert answer.index(b"first") < answer.index(b"GET /second") < answer.index(b"GET /end")


async def test_too_many_pipelined_requests_are_not_kept() -> None:
    app = ToyApp()
    async with toy_server(app, max_pipelined=4) as (_, port):
        talking = asyncio.create_task(talk(port, GET % b"later" + GET % b"x" * 1000))
        await until(lambda: app.later)
        app.later[0].send(200, [], b"")
        assert statuses(await talking) == [200] * 5


async def test_chunked_request_bodies() -> None:
    head = b"POST /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    answer = await exchange(head, b"3\r\nabc\r\n", b"4;x=y\r\ndefg\r\n0\r\nX-Trailer: 1\r\n\r\n")
    assert answer.endswith(b"POST /c abcdefg")


async def test_expect_100_continue() -> None:
    head = b"POST /e HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 4\r\nConnection: close\r\n\r\n"
    assert statuses(await exchange(head, b"body")) == [100, 200]
    refused = head.replace(b"/e", b"/refused")
    assert statuses(await exchange(refused)) == [403], "no body is asked for"


async def test_http_1_0() -> None:
    answer = await exchange(b"GET /chunked HTTP/1.0\r\n\r\n")
    assert answer.endswith(b"\r\n\r\nonetwo"), "the body ends with the connection"
    assert b"chunked" not in answer
    kept = b"GET /a HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"
    answer = await exchange(kept, b"GET /b HTTP/1.0\r\n\r\n")
    assert answer.count(b"connection: keep-alive") == 1
    assert statuses(answer) == [200, 200]


async def test_chunked_responses() -> None:
    answer = await exchange(GET % b"chunked", CLOSE)
    assert b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n" in answer


async def test_head_and_no_content() -> None:
    answer = await exchange(b"HEAD /h HTTP/1.1\r\nHost: x\r\n\r\n", GET % b"nothing", CLOSE)
    first, second, third = answer.split(b"HTTP/1.1 ")[1:]
    assert b"content-length: 8" in first
    assert first.endswith(b"\r\n\r\n")
    assert second.startswith(b"204")
    assert b"content-length" not in second
    assert third.endswith(b"GET /end ")


async def test_a_request_for_another_protocol_is_answered_in_this_one() -> None:
    """Java's client asks for h2c with its first request; its body must not be lost."""
    upgrade = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAAQ")
    answer = await exchange(post(b"j", b"the body", *upgrade), CLOSE)
    assert statuses(answer) == [200, 200]
    assert b"POST /j the body" in answer


async def test_an_absolute_target() -> None:
    answer = await exchange(b"GET http://elsewhere/p%20q?r=s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert answer.endswith(b"GET /p q ")


@pytest.mark.parametrize(
    "raw",
    [
        post(b"", b"abc", b"Content-Length: 3"),
        post(b"", b"abc", b"Content-Length: 4"),
        post(b"", b"0\r\n\r\n", b"Transfer-Encoding: chunked"),
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.0\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0x1\r\na\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\na\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\na",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: +3\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3, 3\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nA: b\r\n c: d\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nA: b\x00c\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\nA: b\n\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/2.0\r\nHost: x\r\n\r\n",
        b"GET /\r\n\r\n",
        b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
    ],
)
async def test_what_is_ambiguous_or_malformed_is_refused_and_the_connection_closed(raw: bytes) -> None:
    """Request smuggling: whatever two parsers could read in two ways is read in none."""
    app = ToyApp()
    async with toy_server(app) as (_, port):
        answer = await talk(port, raw + GET % b"smuggled")
    assert statuses(answer) == [400]
    assert b"connection: close" in answer
    assert not any(request.path == "/smuggled" for request in app.requests)


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 1_000_000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 200 + b"\r\n", 431),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3E8\r\n" + b"a" * 1000, 413),
    ],
)
async def test_limits_of_size(raw: bytes, status: int) -> None:
    answer = await exchange(raw, max_body_bytes=999)
    assert statuses(answer) == [status]
    assert b"connection: close" in answer


async def test_a_client_that_is_refused_may_finish_its_body_and_reads_why() -> None:
    """Closing at once would reset the connection, and take the answer along."""
    answer = await exchange(post(b"big", b"x" * 3_000_000), max_body_bytes=1000)
    assert statuses(answer) == [413]


async def test_bodies_of_all_connections_together_are_bounded() -> None:
    app = ToyApp()
    head = b"POST /b HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
    async with toy_server(app, max_buffered_bytes=2500) as (_, port):
        waiting = []
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head + b"x" * 900)
            waiting.append((reader, writer))
            await asyncio.sleep(0.05)
        assert (await waiting[2][0].readline()).startswith(b"HTTP/1.1 503")
        for _, writer in waiting:
            writer.close()
        answer = b""

        async def is_taken() -> bool:
            nonlocal answer
            answer = await talk(port, head.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + b"x" * 1000)
            return statuses(answer) == [200]

        for _ in range(100):
            if await is_taken():
                break
        assert statuses(answer) == [200], "what was given up is counted off"


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"GET / HT"], [408]),
        ([b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n", b"abc"], [408]),
        ([GET % b"a"], [200]),
        ([], []),
    ],
)
async def test_who_is_slow_or_idle_is_closed(pieces: list[bytes], expected: list[int]) -> None:
    """Slowloris; and a kept connection after its time."""
    answer = await exchange(*pieces, head_timeout_s=0.2, body_timeout_s=0.2, keep_alive_s=0.4)
    assert statuses(answer) == expected


async def test_a_client_that_leaves_is_noticed() -> None:
    app = ToyApp()
    async with toy_server(app) as (listener, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET % b"later")
        await until(lambda: app.later)
        writer.close()
        await until(lambda: app.gone == 1)
        app.later[0].send(200, [], b"nobody hears it")
        await until(lambda: listener.num_connections == 0)


async def test_an_answer_that_is_cut_has_no_clean_end() -> None:
    app = ToyApp()
    async with toy_server(app) as (_, port):
        talking = asyncio.create_task(talk(port, GET % b"later"))
        await until(lambda: app.later)
        reply = app.later[0]
        reply.start(200, [], None)
        reply.write(b"some")
        reply.cut()
        answer = await talking
    assert answer.endswith(b"4\r\nsome\r\n")


async def test_a_bug_in_the_application_is_told_without_details() -> None:
    answer = await exchange(b"GET /broken HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert statuses(answer) == [500]
    assert answer.endswith(b"internal error")


async def test_who_reads_too_slowly_is_told_of_and_then_cut_off() -> None:
    """A stream's bytes in memory are bounded, and so is the time that they wait (CASES 52)."""
    app = ToyApp()
    async with toy_server(app, write_buffer_bytes=1000, write_timeout_s=0.5) as (_, port):
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.sendall(GET % b"later")
            await until(lambda: app.later)
            reply = app.later[0]
            reply.start(200, [], None)
            for _ in range(1000):
                if reply.is_paused:
                    break
                reply.write(b"x" * 65536)
                await asyncio.sleep(0)
            assert app.paused == ["pause"]
            await until(lambda: app.gone == 1)


async def test_stopping_lets_answers_out_and_closes_the_idle() -> None:
    app = ToyApp()
    async with toy_server(app) as (listener, port):
        idle = asyncio.create_task(talk(port, GET % b"a"))
        busy = asyncio.create_task(talk(port, GET % b"later"))
        await until(lambda: len(app.requests) == 2)
        stopping = asyncio.create_task(listener.stop(10.0))
        assert statuses(await idle) == [200]
        app.later[0].send(200, [], b"still")
        answer = await busy
        assert answer.endswith(b"still")
        assert b"connection: close" in answer
        await stopping
