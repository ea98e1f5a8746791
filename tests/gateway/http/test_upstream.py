"""Connections to a backend: responses however they are framed, kept connections, and every way in which it can fail."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from wire_tools import until

from expediter.core.errors import ConfigurationError
from expediter.gateway.http.response_heads import ResponseHead
from expediter.gateway.http.upstream import Address, UpstreamCall, UpstreamFailure, UpstreamPool

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
HEAD = b"POST /x HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n"


class Heard:
    """What a call's listener has heard."""

    def __init__(self) -> None:
        self.head: ResponseHead | None = None
        self.body = b""
        self.pieces: list[bytes] = []
        self.is_over = False
        self.failure: UpstreamFailure | None = None
        self.call: UpstreamCall | None = None

    def upstream_head(self, head: ResponseHead) -> None:
        assert self.head is None
        self.head = head

    def upstream_data(self, data: bytes, is_last: bool) -> None:
        assert not self.is_over
        self.body += data
        self.pieces.append(data)
        self.is_over = is_last

    def upstream_failed(self, failure: UpstreamFailure) -> None:
        assert not self.is_over
        self.failure, self.is_over = failure, True


class Backend:
    """Counts its connections; each is handled by the script."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.num_connections = 0
        self.requests: list[bytes] = []
        self.num_closed = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            await self.script(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.num_closed += 1
            writer.close()

    async def read_request(self, reader: asyncio.StreamReader) -> bytes:
        head = await reader.readuntil(b"\r\n\r\n")
        request = head + await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
        self.requests.append(request)
        return request


@asynccontextmanager
async def backend(script: Script, tls: ssl.SSLContext | None = None) -> AsyncIterator[tuple[Backend, int]]:
    mock = Backend(script)
    server = await asyncio.start_server(mock.handle, "127.0.0.1", 0, ssl=tls)
    try:
        yield mock, server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def ask(pool: UpstreamPool, *, unwraps: bool = False, body: bytes = b"body") -> Heard:
    heard = Heard()
    head = HEAD.replace(b"4", b"%d" % len(body))
    heard.call = pool.send(head, body, heard, unwraps=unwraps)
    await until(lambda: heard.is_over)
    return heard


def answering(*pieces: bytes, pause_s: float = 0.0, closes: bool = False) -> tuple[Script, list[Backend]]:
    """A script that answers every request of a connection with these pieces."""
    holder: list[Backend] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await holder[0].read_request(reader)
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(pause_s)
            if closes:
                return

    return script, holder


@asynccontextmanager
async def served(
    *pieces: bytes, pause_s: float = 0.0, closes: bool = False
) -> AsyncIterator[tuple[Backend, UpstreamPool]]:
    script, holder = answering(*pieces, pause_s=pause_s, closes=closes)
    async with backend(script) as (mock, port):
        holder.append(mock)
        pool = UpstreamPool(Address(host="127.0.0.1", port=port))
        try:
            yield mock, pool
        finally:
            pool.close()


WHOLE = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 5\r\n\r\nhello"


async def test_a_response_with_a_length_and_a_kept_connection() -> None:
    async with served(WHOLE) as (mock, pool):
        for _ in range(3):
            heard = await ask(pool)
            assert heard.head is not None
            assert (heard.head.status, heard.head.length, heard.body) == (200, 5, b"hello")
            assert dict(heard.head.headers)[b"content-type"] == b"text/plain"
        assert mock.num_connections == 1
        assert mock.requests == [HEAD + b"body"] * 3


async def test_a_head_that_is_nearly_known_is_read_as_strictly_as_any() -> None:
    """The same head with another length is known, one with two different lengths is still no response."""
    twice = WHOLE.replace(b"\r\n\r\n", b"\r\nContent-Length: 5\r\n\r\n")
    longer = WHOLE.replace(b": 5", b": 11").replace(b"hello", b"hello world")
    answers = [WHOLE, longer, WHOLE, twice, twice.replace(b": 5", b": 2", 1)]

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await reader.readuntil(b"\r\n\r\nbody")
            writer.write(answers.pop(0))

    async with backend(script) as (mock, port):
        pool = UpstreamPool(Address(host="127.0.0.1", port=port))
        told = [await ask(pool) for _ in range(5)]
        assert [each.body for each in told[:4]] == [b"hello", b"hello world", b"hello", b"hello"]
        assert [each.failure for each in told] == [None] * 4 + [UpstreamFailure.PROTOCOL]
        assert mock.num_connections == 1
        pool.close()


async def test_a_response_may_come_byte_by_byte() -> None:
    async with served(*(WHOLE[i : i + 1] for i in range(len(WHOLE))), pause_s=0.001) as (_, pool):
        assert (await ask(pool)).body == b"hello"


async def test_chunks_are_passed_on_as_they_are_or_unwrapped() -> None:
    chunks = b"5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n"
    async with served(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks) as (mock, pool):
        heard = await ask(pool)
        assert heard.body == chunks
        assert heard.head is not None
        assert heard.head.is_chunked
        assert (await ask(pool, unwraps=True)).body == b"hello world"
        assert mock.num_connections == 1


async def test_whole_plain_chunks_take_the_short_way_and_all_else_keeps_its_place() -> None:
    """Between the two ways nothing is lost, doubled or out of order."""
    plain = [b"5\r\nhello\r\n", b"1A\r\n%b\r\n" % (b"x" * 26), b"1a\r\n%b\r\n" % (b"\r\n" * 13)]
    others = [
        *(b"5;a=b\r\nhello\r\n", b"05\r\nhello\r\n", b"2\r\nab\r\n2\r\ncd\r\n", b"5\r\nhe", b"llo\r\n"),
        *(b"4\r\nno\r\n", b"\r\n", b"2000\r\n%b\r\n" % (b"y" * 8192), b"1\r\nz\r\n0\r\n\r\n"),
    ]
    pieces = [others[0], plain[0], *others[1:3], plain[1], *others[3:5], plain[2], *others[5:8], plain[0], others[8]]

    async with served(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", *pieces, pause_s=0.02) as (_, pool):

        class Taking(Heard):
            taken: tuple[bytes, ...] = ()

            def upstream_data(self, data: bytes, is_last: bool) -> None:
                super().upstream_data(data, is_last)
                if self.call is not None:
                    self.call.take_chunks(self.take)

            def take(self, chunk: bytes) -> None:
                self.taken += (chunk,)
                super().upstream_data(chunk, False)

        for _ in range(2):  # the second time on the same connection
            heard = Taking()
            heard.call = pool.send(HEAD, b"body", heard)
            await until(lambda: heard.is_over)  # noqa: B023 - it is over before the next one is made
            assert heard.body == b"".join(pieces)
            assert heard.taken == (plain[0], plain[1], plain[2], plain[0])


async def test_a_body_that_ends_with_the_connection() -> None:
    async with served(b"HTTP/1.1 200 OK\r\n\r\n", b"some", b"thing", closes=True) as (_, pool):
        assert (await ask(pool)).body == b"something"


@pytest.mark.parametrize("status", [204, 304])
async def test_responses_without_a_body(status: int) -> None:
    async with served(b"HTTP/1.1 %d x\r\n\r\n" % status) as (mock, pool):
        for _ in range(2):
            assert (await ask(pool)).body == b""
        assert mock.num_connections == 1


async def test_interim_responses_are_skipped() -> None:
    async with served(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + WHOLE) as (_, pool):
        heard = await ask(pool)
        assert heard.head is not None
        assert heard.head.status == 200


async def test_a_large_request_arrives_whole() -> None:
    async with served(WHOLE) as (mock, pool):
        body = bytes(range(256)) * 40_000
        await ask(pool, body=body)
        assert mock.requests[0].endswith(body)


async def test_a_connection_that_the_backend_does_not_keep() -> None:
    async with served(WHOLE.replace(b"Content-Type", b"Connection: close\r\nContent-Type")) as (mock, pool):
        for _ in range(2):
            assert (await ask(pool)).body == b"hello"
        assert mock.num_connections == 2


async def test_the_end_is_heard_of_a_response_whose_connection_is_not_kept() -> None:
    """The pool is closed while a response is on its way, as when its backend is removed."""
    head, body = WHOLE[:-5], WHOLE[-5:]
    async with served(head, body, pause_s=0.05) as (_, pool):
        heard = Heard()
        pool.send(HEAD, b"body", heard)
        await until(lambda: heard.head is not None)
        pool.close()
        await until(lambda: heard.is_over)
        assert (heard.body, heard.failure) == (b"hello", None)


async def test_a_kept_connection_that_was_closed_meanwhile_is_no_failure() -> None:
    """The backend answers one request per connection and says nothing of it; its close may cross the next request."""
    async with served(WHOLE, closes=True) as (mock, pool):
        for number in range(5):
            heard = await ask(pool)
            assert heard.failure is None
            assert heard.body == b"hello"
            assert mock.num_connections == number + 1


async def test_nobody_listens() -> None:
    async with served(WHOLE) as (_, pool):
        address = pool.address
    heard = await ask(UpstreamPool(address))
    assert heard.failure is UpstreamFailure.CONNECT


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Le",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhel",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
    ],
)
async def test_a_response_that_breaks_off(sent: bytes) -> None:
    async with served(sent, closes=True) as (_, pool):
        heard = await ask(pool)
        assert heard.failure is UpstreamFailure.BROKEN


@pytest.mark.parametrize(
    "sent",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nA: b\r\n c\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nno colon\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello and more",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\nA: " + b"a" * 70_000,
        b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 20_000 + b"Content-Length: 5\r\n\r\nhello",
    ],
)
async def test_what_is_no_response(sent: bytes) -> None:
    async with served(sent) as (mock, pool):
        heard = await ask(pool)
        assert heard.failure is UpstreamFailure.PROTOCOL
        await until(lambda: mock.num_closed == 1)


async def test_who_talks_without_being_asked_is_dropped() -> None:
    async with served(WHOLE, b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\nfor next", pause_s=0.05) as (mock, pool):
        await ask(pool)
        await until(lambda: mock.num_closed == 1)
        heard = await ask(pool)
        assert heard.body == b"hello"
        assert mock.num_connections == 2


async def test_a_response_ends_also_where_its_connection_is_not_kept() -> None:
    async with served(WHOLE, pause_s=0.05) as (mock, pool):
        heard = Heard()
        pool.send(HEAD, b"body", heard)
        await until(lambda: mock.requests)
        pool.close()
        await until(lambda: heard.is_over)
        assert (heard.failure, heard.body) == (None, b"hello")


async def test_a_cancelled_call_closes_the_connection_and_says_nothing() -> None:
    async with served(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello", b"", pause_s=60) as (mock, pool):
        heard = Heard()
        call = pool.send(HEAD, b"body", heard)
        await until(lambda: heard.body == b"hello")
        call.cancel()
        await asyncio.sleep(0.05)
        assert not heard.is_over
        early = pool.send(HEAD, b"body", heard)
        early.cancel()  # while it connects
        await asyncio.sleep(0.05)
        assert not heard.is_over
        assert len(mock.requests) == 1


async def test_a_paused_call_takes_nothing_until_it_goes_on() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 50000000\r\n\r\n")
        for _ in range(50):
            writer.write(b"x" * 1_000_000)
            await writer.drain()

    async with backend(script) as (_, port):
        pool = UpstreamPool(Address(host="127.0.0.1", port=port))
        heard = Heard()
        call = pool.send(HEAD, b"body", heard)
        await until(lambda: heard.pieces)
        call.pause()
        await asyncio.sleep(0.05)
        before = len(heard.body)
        await asyncio.sleep(0.1)
        assert len(heard.body) == before < 50_000_000
        call.resume()
        await until(lambda: heard.is_over)
        assert len(heard.body) == 50_000_000
        pool.close()


async def test_a_unix_socket(tmp_path: Path) -> None:
    script, holder = answering(WHOLE)
    mock = Backend(script)
    holder.append(mock)
    server = await asyncio.start_unix_server(mock.handle, tmp_path / "s")
    pool = UpstreamPool(Address(path=str(tmp_path / "s")))
    assert (await ask(pool)).body == b"hello"
    pool.close()
    server.close()


def make_certificate(folder: Path) -> tuple[Path, Path]:
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*command, *names, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return key, certificate


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
async def test_tls(tmp_path: Path) -> None:
    """A backend behind https: its certificate counts if it is known, and for the name that was asked for."""
    key, certificate = make_certificate(tmp_path)
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(certificate, key)
    script, holder = answering(WHOLE)
    async with backend(script, server_side) as (mock, port):
        holder.append(mock)
        trusting = ssl.create_default_context(cafile=certificate)
        pool = UpstreamPool(Address(host="localhost", port=port, ssl=trusting))
        for _ in range(2):
            assert (await ask(pool)).body == b"hello"
        assert mock.num_connections == 1
        pool.close()
        for host, context in (("localhost", ssl.create_default_context()), ("127.0.0.1", trusting)):
            heard = await ask(UpstreamPool(Address(host=host, port=port, ssl=context)))
            assert heard.failure is UpstreamFailure.CONNECT


def test_an_address_is_one_of_two_kinds() -> None:
    for wrong in ({}, {"host": "x", "path": "/y"}):
        with pytest.raises(ConfigurationError, match="host, or the path"):
            Address(**wrong)  # type: ignore[arg-type]
