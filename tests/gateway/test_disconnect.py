"""A client that leaves ends its request, and nobody else's (CASES 20, 38)."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from live_server import LiveServer, wait_until

REQUEST_ID = {"X-Request-Id": "the-same-for-all"}


def connect(server: LiveServer, prompt: Any = "leave", **fields: Any) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    body = {"prompt": prompt, "max_tokens": 1500, "ignore_eos": True, **fields}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json", **REQUEST_ID})
    return connection


def num_aborted(server: LiveServer) -> float:
    return server.metric("vllm:request_success_total", finished_reason="abort")


def is_idle(server: LiveServer) -> bool:
    return server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting") == 0


def test_leaving_mid_stream(slow_server: LiveServer) -> None:
    wait_until(lambda: is_idle(slow_server))
    aborted = num_aborted(slow_server)
    connection = connect(slow_server, stream=True)
    response = connection.getresponse()
    assert response.read(200)
    connection.sock.close() if connection.sock else response.close()
    response.close()
    connection.close()
    assert wait_until(lambda: num_aborted(slow_server) == aborted + 1) < 1
    assert wait_until(lambda: is_idle(slow_server)) < 1


def test_leaving_without_a_stream(slow_server: LiveServer) -> None:
    wait_until(lambda: is_idle(slow_server))
    aborted = num_aborted(slow_server)
    connection = connect(slow_server)
    wait_until(lambda: not is_idle(slow_server))
    connection.close()
    assert wait_until(lambda: num_aborted(slow_server) == aborted + 1) < 1
    assert wait_until(lambda: is_idle(slow_server)) < 1


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_before_the_first_token(slow_server: LiveServer, stream: bool) -> None:
    """All slots are taken, so the request is still waiting when its client leaves."""
    wait_until(lambda: is_idle(slow_server))
    aborted = num_aborted(slow_server)
    running = [connect(slow_server, [i + 1] * 20, stream=True, n=64, max_tokens=300) for i in range(1)]
    wait_until(lambda: slow_server.metric("vllm:num_requests_running") == 64)
    waiting = connect(slow_server, stream=stream)
    wait_until(lambda: slow_server.metric("vllm:num_requests_waiting") == 1)
    waiting.close()
    assert wait_until(lambda: num_aborted(slow_server) == aborted + 1) < 1
    assert slow_server.metric("vllm:num_requests_waiting") == 0
    assert slow_server.metric("vllm:num_requests_running") == 64, "the others are not touched"
    for connection in running:
        connection.close()
    assert wait_until(lambda: is_idle(slow_server)) < 2


def test_leaving_with_several_choices_aborts_each(slow_server: LiveServer) -> None:
    wait_until(lambda: is_idle(slow_server))
    aborted = num_aborted(slow_server)
    connection = connect(slow_server, ["a", "b"], n=3, stream=True)
    response = connection.getresponse()
    response.read(100)
    response.close()
    connection.close()
    assert wait_until(lambda: num_aborted(slow_server) == aborted + 6) < 1


def test_nothing_is_left_of_many_that_come_and_go(slow_server: LiveServer) -> None:
    """Whole, streamed, and left at any point: sockets, memory of metrics and gauges are as before."""
    wait_until(lambda: is_idle(slow_server))
    folder = Path("/proc") / str(slow_server.process.pid) / "fd"
    random = Random(3)

    async def one(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        fields = {"prompt": "x" * random.randint(1, 99), "max_tokens": random.randint(1, 40), "n": random.randint(1, 3)}
        body = json.dumps({**fields, "ignore_eos": True, "stream": random.random() < 0.7}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % len(body) + body)
        with suppress(TimeoutError):
            async with asyncio.timeout(random.choice([0.001, 0.05, 0.3, 30])):
                assert (await reader.read()).startswith(b"HTTP/1.1 200 OK")
        writer.close()

    async def rounds() -> None:
        for _ in range(3):
            await asyncio.gather(*(one(slow_server.port) for _ in range(60)))

    num_fds = len(list(folder.iterdir()))
    asyncio.run(rounds())
    assert wait_until(lambda: is_idle(slow_server)) < 1.5
    wait_until(lambda: len(list(folder.iterdir())) <= num_fds, 3, "sockets closed")
    assert slow_server.metric("vllm:kv_cache_usage_perc") == 0
    assert slow_server.metric("expediter:num_pending_tokens") == 0


def test_two_live_requests_with_one_client_id(slow_server: LiveServer) -> None:
    wait_until(lambda: is_idle(slow_server))
    replies: list[Any] = []
    body = {"max_tokens": 60, "ignore_eos": True, "temperature": 0}

    def stay(prompt: str) -> None:
        reply = slow_server.post("/v1/completions", {"prompt": prompt, **body}, headers=REQUEST_ID)
        replies.append(reply.json)

    alone = slow_server.complete("stay", **body).json["choices"][0]["text"]
    leaver = connect(slow_server, "go")
    thread = threading.Thread(target=stay, args=("stay",))
    thread.start()
    wait_until(lambda: slow_server.metric("vllm:num_requests_running") == 2)
    leaver.close()
    time.sleep(0.2)
    stay("stay")  # the id again, while the first is live
    thread.join()
    assert [reply["choices"][0]["text"] for reply in replies] == [alone, alone]
    assert len({reply["id"] for reply in replies}) == 2
