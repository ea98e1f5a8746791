"""A small HTTP client of the tests' own: it notes when each chunk came and how the answer ended."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

CHAT = "/v1/chat/completions"


@dataclass
class Answer:
    """A response; times of `time.monotonic`.

    Attributes:
        chunks: (time, data) per chunk of the body, or per read where the body has a length.
        is_whole: head and body came in full, as its framing says.
    """

    sent_s: float
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    chunks: list[tuple[float, bytes]] = field(default_factory=list)
    is_whole: bool = False
    ended_s: float = 0.0

    @property
    def body(self) -> bytes:
        return b"".join(data for _, data in self.chunks)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """Server-sent events, decoded; `[DONE]` as that string."""
        data = [line[6:] for line in self.body.split(b"\n") if line.startswith(b"data: ")]
        return [item.decode() if item == b"[DONE]" else json.loads(item) for item in data]

    @property
    def is_good(self) -> bool:
        return self.status == 200 and self.is_whole

    @property
    def took_s(self) -> float:
        return self.ended_s - self.sent_s


class Connection:
    """One connection to the door; requests go one after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, port: int) -> Connection:
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=1 << 20))

    def send(self, method: str, path: str, body: bytes, headers: dict[str, str] | None = None) -> None:
        lines = [f"{method} {path} HTTP/1.1", "host: door", f"content-length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        self.writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    async def receive(self, answer: Answer) -> Answer:
        """Read one response to its end, whatever that is."""
        try:
            await self._head(answer)
            await self._body(answer)
        except (asyncio.IncompleteReadError, ConnectionError, ValueError):
            pass
        answer.ended_s = time.monotonic()
        return answer

    async def ask(self, method: str, path: str, body: bytes, headers: dict[str, str] | None = None) -> Answer:
        answer = Answer(time.monotonic())
        self.send(method, path, body, headers)
        return await self.receive(answer)

    async def read_head(self) -> Answer:
        """Read the head only."""
        answer = Answer(time.monotonic())
        await self._head(answer)
        return answer

    def leave(self) -> None:
        """Go, whatever is under way."""
        self.writer.transport.abort()

    async def close(self) -> None:
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()

    async def _head(self, answer: Answer) -> None:
        raw = await self.reader.readuntil(b"\r\n\r\n")
        first, *lines = raw.decode("latin-1").split("\r\n")
        answer.status = int(first.split(" ")[1])
        answer.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if answer.status == 100:
            await self._head(answer)

    async def _body(self, answer: Answer) -> None:
        if "chunked" in answer.headers.get("transfer-encoding", ""):
            while size := int((await self.reader.readuntil(b"\r\n")).split(b";")[0], 16):
                data = (await self.reader.readexactly(size + 2))[:-2]
                answer.chunks.append((time.monotonic(), data))
            await self.reader.readexactly(2)
        else:
            left = int(answer.headers["content-length"])
            while left:
                data = await self.reader.read(left)
                if not data:
                    return
                answer.chunks.append((time.monotonic(), data))
                left -= len(data)
        answer.is_whole = True


def chat(text: str = "hello", **fields: Any) -> bytes:
    """Return a chat request's body."""
    messages = [{"role": "user", "content": text}]
    return json.dumps({"model": "mock", "messages": messages, "max_tokens": 16, **fields}).encode()


async def ask(
    port: int, body: bytes, path: str = CHAT, headers: dict[str, str] | None = None, timeout_s: float = 60
) -> Answer:
    """Send one request on a connection of its own; a status of 0 says that none could be had."""
    answer = Answer(time.monotonic())
    try:
        connection = await Connection.open(port)
    except OSError:
        answer.ended_s = time.monotonic()
        return answer
    try:
        async with asyncio.timeout(timeout_s):
            return await connection.ask("POST", path, body, headers)
    finally:
        connection.leave()


async def ask_all(port: int, bodies: Sequence[bytes], concurrency: int, **options: Any) -> list[Answer]:
    """Send requests, so many at a time, each client on a kept connection; answers in the requests' order."""
    answers: list[Answer | None] = [None] * len(bodies)
    queue = iter(range(len(bodies)))

    async def client() -> None:
        connection: Connection | None = None
        for index in queue:
            if connection is None:
                connection = await Connection.open(port)
            answer = await connection.ask("POST", CHAT, bodies[index], **options)
            answers[index] = answer
            if not answer.is_whole or answer.headers.get("connection") == "close":
                connection.leave()
                connection = None
        if connection is not None:
            await connection.close()

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return [answer for answer in answers if answer is not None]
