"""An ASGI application behind a listener: what it is told of a request, and what becomes of its answer."""

from __future__ import annotations

import asyncio
from typing import Any

from wire_tools import statuses, talk, toy_server, until

from expediter.gateway.http.asgi import AsgiApplication

CLOSE = b"Connection: close\r\n\r\n"


async def answer_of(app: Any, request: bytes = b"GET / HTTP/1.1\r\nHost: x\r\n" + CLOSE, **limits: float) -> bytes:
    async with toy_server(AsgiApplication(app, {"tenant": "t"}), **limits) as (_, port):  # type: ignore[arg-type]
        return await talk(port, request)


def start(status: int = 200, *headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": headers}


def body(data: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def test_what_the_application_is_told() -> None:
    told: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        told.append((scope, await receive()))
        await send(start(201, (b"content-length", b"2"), (b"x-a", b"b")))
        await send(body(b"ok"))

    head = b"POST /a%20b?c=d HTTP/1.1\r\nHost: x\r\nX-Y: z\r\nContent-Length: 4\r\n"
    answer = await answer_of(app, head + CLOSE + b"data")
    assert answer.startswith(b"HTTP/1.1 201 Created\r\n")
    assert b"x-a: b\r\n" in answer
    assert answer.count(b"content-length: 2") == 1
    assert answer.endswith(b"\r\n\r\nok")
    scope, message = told[0]
    assert (scope["method"], scope["path"], scope["raw_path"], scope["query_string"]) == (
        "POST",
        "/a b",
        b"/a%20b",
        b"c=d",
    )
    assert (b"x-y", b"z") in scope["headers"]
    assert scope["tenant"] == "t"
    assert message == {"type": "http.request", "body": b"data", "more_body": False}


async def test_a_stream_is_chunked_and_one_that_breaks_has_no_end() -> None:
    async def whole(scope: Any, receive: Any, send: Any) -> None:
        await send(start())
        await send(body(b"one", more=True))
        await send(body(b"", more=True))
        await send(body(b"two"))

    async def broken(scope: Any, receive: Any, send: Any) -> None:
        await send(start())
        await send(body(b"one", more=True))

    async def failing(scope: Any, receive: Any, send: Any) -> None:
        await broken(scope, receive, send)
        raise RuntimeError("a bug")

    assert (await answer_of(whole)).endswith(b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n")
    for app in (broken, failing):
        assert (await answer_of(app)).endswith(b"3\r\none\r\n")


async def test_who_fails_before_it_has_begun_answers_500() -> None:
    async def failing(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("a bug with a secret")

    async def silent(scope: Any, receive: Any, send: Any) -> None:
        pass

    for app in (failing, silent):
        answer = await answer_of(app)
        assert statuses(answer) == [500]
        assert b"secret" not in answer


async def test_a_client_that_leaves_is_told_to_the_application() -> None:
    heard: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send(start())
        await send(body(b"one", more=True))
        heard.append((await receive())["type"])
        await send(body(b"nobody reads it"))
        heard.append("ended")

    async with toy_server(AsgiApplication(app)) as (_, port):  # type: ignore[arg-type]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"one")
        writer.close()
        await until(lambda: heard == ["http.disconnect", "ended"])


async def test_a_slow_reader_holds_the_application_back() -> None:
    sent = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal sent
        await send(start())
        for _ in range(400):
            await send(body(b"x" * 65536, more=True))
            sent += 1
        await send(body(b""))

    async with toy_server(AsgiApplication(app), write_buffer_bytes=65536) as (_, port):  # type: ignore[arg-type]
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=65536)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n" + CLOSE)
        await reader.readexactly(1000)
        await asyncio.sleep(0.3)
        assert sent < 390, "the kernel's buffers hold a part; the rest is not made yet"
        while await reader.read(1 << 20):
            pass
        assert sent == 400
        writer.close()
