"""Nothing but forwarding: what any proxy of this kind pays, on the same HTTP parts as ours.

A request is parsed, goes to the next backend in turn over a kept connection, and the answer's bytes are copied. No
keys, limits, metrics, routing, retries or time-outs: not a server for anybody.

    python -m benchmarks.router.floor PORT BACKEND_PORT...
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections import deque
from typing import cast

import httptools
import uvloop


class _Client(asyncio.Protocol):
    """A client's connection; the bytes of a request are kept until it is whole, then passed on as they came."""

    def __init__(self, floor: Floor) -> None:
        self._floor = floor
        self._parser = httptools.HttpRequestParser(self)
        self._raw: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._raw.append(data)
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        raw = b"".join(self._raw)
        self._raw.clear()
        self._floor.forward(raw, self)


class _Upstream(asyncio.Protocol):
    """A connection to a backend; copies each answer to the client that it is for."""

    def __init__(self, pool: deque[_Upstream]) -> None:
        self._pool = pool
        self._client: _Client | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def send(self, raw: bytes, client: _Client) -> None:
        self._client = client
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(raw)

    def data_received(self, data: bytes) -> None:
        client = self._client
        if client is not None:
            client.transport.write(data)
            self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        self._client = None
        self._pool.append(self)


class Floor:
    """Backends in turn, each with its idle connections."""

    def __init__(self, ports: list[int]) -> None:
        self._backends = itertools.cycle([(port, deque[_Upstream]()) for port in ports])
        self._connecting: set[asyncio.Task[None]] = set()

    def forward(self, raw: bytes, client: _Client) -> None:
        port, pool = next(self._backends)
        if pool:
            pool.popleft().send(raw, client)
            return
        task = asyncio.get_running_loop().create_task(self._connect(port, pool, raw, client))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, port: int, pool: deque[_Upstream], raw: bytes, client: _Client) -> None:
        loop = asyncio.get_running_loop()
        _, upstream = await loop.create_connection(lambda: _Upstream(pool), "127.0.0.1", port)
        upstream.send(raw, client)


async def serve(port: int, backend_ports: list[int]) -> None:
    """Forward until the process ends."""
    floor = Floor(backend_ports)
    server = await asyncio.get_running_loop().create_server(lambda: _Client(floor), "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), [int(word) for word in sys.argv[2:]]))
