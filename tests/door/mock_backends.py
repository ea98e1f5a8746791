"""Backends without a model that speak OpenAI's API and misbehave when told to.

All of a test's backends live in one thread with an event loop of its own; each has a port, can be killed and revived
there, and remembers what it was asked, who left, and how much of each prompt it had seen before.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import httptools

Moment = Literal["before_head", "after_head", "after_pings", "mid_stream"]
Result = TypeVar("Result")

_BLOCK_BYTES = 64
_LINGER_0 = struct.pack("ii", 1, 0)
"""A closed socket with this option sends a reset, not an end."""


@dataclass
class Arrival:
    """One request, as the backend saw it; times of `time.monotonic`."""

    at_s: float
    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    ended_s: float | None = None
    cancelled_s: float | None = None

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def is_work(self) -> bool:
        return self.method == "POST"


@dataclass
class Behaviour:
    """What a backend does with work. Everything may be changed while it runs, for requests that come later.

    Attributes:
        status: answered with instead of 200, until `status_until_s` (of `time.monotonic`).
        prefill_s: before the head of a response.
        pings_s: before each of the comments that come between the head of a stream and its first event.
        after_pings_s: between the last of these comments and the first event.
        num_chunks, gap_s: of a stream, and between its chunks.
        reply_bytes: length of the text of a reply, or of each chunk of a stream.
        hang, reset: the moment at which nothing more comes, or the connection breaks.
        raw: sent instead of any response, and then the connection is closed.
        reports_usage: streams end with a usage chunk if the client asked for one.
    """

    status: int = 200
    status_until_s: float = float("inf")
    prefill_s: float = 0.0
    pings_s: tuple[float, ...] = ()
    after_pings_s: float = 0.0
    num_chunks: int = 4
    gap_s: float = 0.0
    reply_bytes: int = 16
    hang: Moment | None = None
    reset: Moment | None = None
    raw: bytes | None = None
    reports_usage: bool = True


@dataclass
class Metrics:
    """What `GET /metrics` says.

    Attributes:
        mode: `live`: the truth; `frozen`: always `running` and `waiting`; `missing`: 404; `hang`: no answer; `garbage`:
            something that nobody can read.
    """

    mode: Literal["live", "frozen", "missing", "hang", "garbage"] = "live"
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.1


@dataclass
class PrefixCache:
    """Least recently used blocks of prompts; a block counts as cached from the arrival of its request on."""

    max_blocks: int = 1 << 20
    hit_bytes: int = 0
    asked_bytes: int = 0
    _blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def look_up(self, prompt: bytes) -> None:
        """Count what of a prompt is cached already, and cache the rest."""
        chain, still_hits = 0, True
        for start in range(0, len(prompt) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
            chain = hash((chain, prompt[start : start + _BLOCK_BYTES]))
            self.asked_bytes += _BLOCK_BYTES
            still_hits = still_hits and chain in self._blocks
            if still_hits:
                self.hit_bytes += _BLOCK_BYTES
            self._blocks[chain] = None
            self._blocks.move_to_end(chain)
        while len(self._blocks) > self.max_blocks:
            self._blocks.popitem(last=False)


class MockBackend:
    """One backend; made by `mock_backends`. Methods may be called from any thread.

    Attributes:
        models: most tokens of a request, by name.
        health_answers: false: whoever asks for anything but work hears nothing.
        arrivals: all requests in their order.
        num_computed: tokens that it has sent.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, name: str) -> None:
        self.name = name
        self.port = 0
        self.models: dict[str, int] = {"mock": 131_072}
        self.behaviour = Behaviour()
        self.metrics = Metrics()
        self.cache = PrefixCache()
        self.arrivals: list[Arrival] = []
        self.num_in_flight = 0
        self.num_computed = 0
        self.num_connections_made = 0
        self.health_answers = True
        self._loop = loop
        self._server: asyncio.Server | None = None
        self.connections: set[_Connection] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def work(self) -> list[Arrival]:
        """Requests that were not for models, metrics or health."""
        return [arrival for arrival in self.arrivals if arrival.is_work]

    @property
    def num_cancelled(self) -> int:
        return sum(arrival.cancelled_s is not None for arrival in self.work)

    def kill(self) -> None:
        """Stop listening and reset every connection, as the end of a process would."""
        self._call(self._kill)

    def revive(self) -> None:
        """Listen on the same port again."""
        self._run(self._listen())

    def close_idle(self) -> None:
        """Close the connections that nobody waits on, as a server does whose keep-alive time is over."""
        self._call(lambda: [each.close() for each in list(self.connections) if each.arrival is None])

    def _kill(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in list(self.connections):
            connection.reset()

    async def _listen(self) -> None:
        self._server = await self._loop.create_server(lambda: _Connection(self), "127.0.0.1", self.port, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]

    def _run(self, coroutine: Any) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    def _call(self, function: Callable[[], Result]) -> Result:
        async def call() -> Result:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(10)


@contextmanager
def mock_backends(count: int) -> Iterator[list[MockBackend]]:
    """Run backends that listen on free ports until the block ends."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="mock backends", daemon=True)
    thread.start()
    backends = [MockBackend(loop, f"mock{number}") for number in range(count)]
    try:
        for backend in backends:
            backend.revive()
        yield backends
    finally:
        for backend in backends:
            backend.kill()
        asyncio.run_coroutine_threadsafe(_cancel_all(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class _Connection(asyncio.Protocol):
    """Parses requests one after the other; each is answered by a task of its own."""

    def __init__(self, backend: MockBackend) -> None:
        self.backend = backend
        self.arrival: Arrival | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: list[Arrival] = []
        self._url = b""
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._task: asyncio.Task[None] | None = None
        self._may_write = asyncio.Event()
        self._may_write.set()

    # ---- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.backend.connections.add(self)
        self.backend.num_connections_made += 1

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.transport.abort()

    def pause_writing(self) -> None:
        self._may_write.clear()

    def resume_writing(self) -> None:
        self._may_write.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.backend.connections.discard(self)
        if self.arrival is not None and self.arrival.ended_s is None:
            self.arrival.cancelled_s = time.monotonic()
        if self._task is not None:
            self._task.cancel()

    # ---- httptools

    def on_message_begin(self) -> None:
        self._url, self._headers, self._body = b"", {}, []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        method = self._parser.get_method().decode()
        arrival = Arrival(time.monotonic(), method, self._url.decode(), self._headers, b"".join(self._body))
        self.backend.arrivals.append(arrival)
        self._waiting.append(arrival)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._answer_all())

    # ---- answers

    def close(self) -> None:
        self.transport.close()

    def reset(self) -> None:
        sock = self.transport.get_extra_info("socket")
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_0)
        self.transport.abort()

    async def _answer_all(self) -> None:
        while self._waiting:
            self.arrival = self._waiting.pop(0)
            if self.arrival.is_work:
                self.backend.num_in_flight += 1
                try:
                    await self._work(self.arrival)
                finally:
                    self.backend.num_in_flight -= 1
            else:
                await self._tell(self.arrival.path)
            self.arrival.ended_s = time.monotonic()
            self.arrival = None
        self._task = None

    async def _tell(self, path: str) -> None:
        """Answer what is no work."""
        if not self.backend.health_answers:
            await asyncio.Event().wait()
        if path.startswith("/v1/models"):
            models = [
                {"id": name, "object": "model", "created": 1, "owned_by": "mock", "max_model_len": limit}
                for name, limit in self.backend.models.items()
            ]
            self._reply(200, {"object": "list", "data": models})
        elif path.startswith("/metrics"):
            await self._metrics()
        else:
            healthy = self.backend.behaviour.status < 500 or time.monotonic() >= self.backend.behaviour.status_until_s
            self._reply(200 if healthy else self.backend.behaviour.status, {"status": "ok" if healthy else "down"})

    async def _metrics(self) -> None:
        metrics = self.backend.metrics
        if metrics.mode == "hang":
            await asyncio.Event().wait()
        if metrics.mode == "missing":
            self._reply(404, {"detail": "not found"})
            return
        running = self.backend.num_in_flight if metrics.mode == "live" else metrics.running
        text = (
            f'vllm:num_requests_running{{model_name="mock",engine="0"}} {running}\n'
            f'vllm:num_requests_waiting{{model_name="mock",engine="0"}} {metrics.waiting}\n'
            f'vllm:kv_cache_usage_perc{{model_name="mock",engine="0"}} {metrics.kv_usage}\n'
            f'vllm:generation_tokens_total{{model_name="mock",engine="0"}} {self.backend.num_computed}\n'
        )
        if metrics.mode == "garbage":
            text = "\x00\xff{{{ vllm:num_requests_running NaN NaN\n" * 50
        self._write(200, text.encode("latin-1"), "text/plain")

    async def _work(self, arrival: Arrival) -> None:
        behaviour = self.backend.behaviour
        try:
            body = arrival.json
        except (ValueError, RecursionError):
            self._reply(400, {"error": {"message": "no JSON", "type": "mock", "param": None, "code": None}})
            return
        self.backend.cache.look_up(json.dumps(body.get("messages", body.get("prompt", ""))).encode())
        if behaviour.status != 200 and time.monotonic() < behaviour.status_until_s:
            error = {"message": "as told", "type": "mock", "param": None, "code": None}
            self._reply(behaviour.status, {"error": error})
            return
        await self._come_to("before_head", behaviour)
        if behaviour.prefill_s:
            await asyncio.sleep(behaviour.prefill_s)
        if behaviour.raw is not None:
            self.transport.write(behaviour.raw)
            self.transport.close()
            return
        text = "x" * behaviour.reply_bytes
        if body.get("stream"):
            await self._stream(body, behaviour, text)
        else:
            choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
            raw = json.dumps({"id": "mock", "object": "chat.completion", "choices": [choice], "usage": _usage(body)})
            await self._say_slowly(raw.encode(), behaviour)

    async def _say_slowly(self, raw: bytes, behaviour: Behaviour) -> None:
        self._head(200, "application/json", f"content-length: {len(raw)}")
        await self._come_to("after_head", behaviour)
        self.transport.write(raw[: len(raw) // 2])
        await self._come_to("mid_stream", behaviour)
        self.transport.write(raw[len(raw) // 2 :])

    async def _stream(self, body: dict[str, Any], behaviour: Behaviour, text: str) -> None:
        self._head(200, "text/event-stream; charset=utf-8", "transfer-encoding: chunked")
        await self._come_to("after_head", behaviour)
        for pause_s in behaviour.pings_s:
            await asyncio.sleep(pause_s)
            self._chunk(b":\n\n")
        await self._come_to("after_pings", behaviour)
        await asyncio.sleep(behaviour.after_pings_s)
        for number in range(behaviour.num_chunks):
            if number == behaviour.num_chunks // 2:
                await self._come_to("mid_stream", behaviour)
            self.backend.num_computed += 1
            delta = {"index": 0, "delta": {"content": f"{number}:{text}"}, "finish_reason": None}
            self._event({"id": "mock", "object": "chat.completion.chunk", "choices": [delta]})
            await self._may_write.wait()
            if behaviour.gap_s:
                await asyncio.sleep(behaviour.gap_s)
        end = {"index": 0, "delta": {}, "finish_reason": "stop"}
        self._event({"id": "mock", "object": "chat.completion.chunk", "choices": [end]})
        if behaviour.reports_usage and (body.get("stream_options") or {}).get("include_usage"):
            self._event({"id": "mock", "object": "chat.completion.chunk", "choices": [], "usage": _usage(body)})
        self._chunk(b"data: [DONE]\n\n")
        self.transport.write(b"0\r\n\r\n")

    async def _come_to(self, moment: Moment, behaviour: Behaviour) -> None:
        if behaviour.hang == moment:
            await asyncio.Event().wait()
        if behaviour.reset == moment:
            self.reset()
            await asyncio.Event().wait()  # cancelled as the connection is lost

    def _event(self, content: object) -> None:
        self._chunk(b"data: " + json.dumps(content).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.transport.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _reply(self, status: int, content: object) -> None:
        self._write(status, json.dumps(content).encode(), "application/json")

    def _write(self, status: int, body: bytes, kind: str) -> None:
        self._head(status, kind, f"content-length: {len(body)}")
        self.transport.write(body)

    def _head(self, status: int, kind: str, framing: str) -> None:
        self.transport.write(f"HTTP/1.1 {status} Mock\r\ncontent-type: {kind}\r\n{framing}\r\n\r\n".encode())


def _usage(body: dict[str, Any]) -> dict[str, int]:
    prompt, output = len(json.dumps(body.get("messages", ""))) // 4, int(body.get("max_tokens", 16))
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def hit_share(backends: Sequence[MockBackend]) -> float:
    """Return hit bytes by asked bytes, over all of them."""
    return sum(each.cache.hit_bytes for each in backends) / max(1, sum(each.cache.asked_bytes for each in backends))


def best_hit_share(backends: Sequence[MockBackend]) -> float:
    """Return the share that one cache without bounds would have had, which saw all their work in its order."""
    cache = PrefixCache()
    for arrival in sorted((each for backend in backends for each in backend.work), key=lambda each: each.at_s):
        cache.look_up(json.dumps(arrival.json.get("messages", arrival.json.get("prompt", ""))).encode())
    return cache.hit_bytes / max(1, cache.asked_bytes)


def all_do(mocks: Sequence[MockBackend], **behaviour: object) -> None:
    """Have all of them behave like that from now on."""
    for mock in mocks:
        mock.behaviour = Behaviour(**behaviour)  # type: ignore[arg-type]
