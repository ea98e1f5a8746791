"""Real processes that are killed, stopped and flooded (CASES 42, 49, 50)."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from live_server import HERE, LiveServer, children_of, is_alive, start_fake_server, wait_until


class Stream(threading.Thread):
    """Reads one stream to its end; knows whether the end was clean."""

    def __init__(self, server: LiveServer, max_tokens: int = 200, prompt: str = "stream") -> None:
        super().__init__(daemon=True)
        self._server = server
        self._body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        self.raw = b""
        self.status = 0
        self.ended_cleanly = False
        self.start()

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=60)
        try:
            connection.request("POST", "/v1/completions", json.dumps(self._body))
            response = connection.getresponse()
            self.status = response.status
            while data := response.read1(65536):
                self.raw += data
            self.ended_cleanly = True
        except http.client.IncompleteRead as error:
            self.raw += error.partial
        except OSError:
            pass
        finally:
            connection.close()

    @property
    def is_complete(self) -> bool:
        return self.ended_cleanly and self.raw.endswith(b"data: [DONE]\n\n")

    @property
    def error(self) -> dict[str, Any] | None:
        """The error event, which must be the last thing in the stream."""
        last = self.raw.decode().rstrip("\n").rsplit("\n\n", 1)[-1].removeprefix("data: ")
        error: dict[str, Any] | None = json.loads(last).get("error") if last.startswith("{") else None
        return error


def assert_broken_off(stream: Stream) -> None:
    """Headers, tokens, an error event, and no clean end of the body: no client can take it for the whole."""
    assert stream.status == 200
    assert stream.error is not None
    assert stream.error["type"] == "server_error"
    assert b"[DONE]" not in stream.raw
    assert not stream.ended_cleanly


def text_of(stream: Stream) -> str:
    events = [json.loads(line[6:]) for line in stream.raw.decode().splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in event["choices"])


def test_kill_9_of_a_replica_under_load(model_folder: Path) -> None:
    with start_fake_server(model_folder, "--replicas", "2", "--model", "toy", "--step-s", "0.02") as server:
        victim, other = server.replica_pids()
        want = server.complete("stream", max_tokens=200, ignore_eos=True).json["choices"][0]["text"]
        streams = [Stream(server) for _ in range(8)]
        wait_until(lambda: all(stream.raw for stream in streams))
        os.kill(victim, signal.SIGKILL)
        for stream in streams:
            stream.join(60)
            assert stream.is_complete, "who had requests there does not notice"
            assert text_of(stream) == want
        wait_until(lambda: server.metric("expediter:replica_up") == 2, what="replica back")
        assert is_alive(other)
        assert not is_alive(victim)
        assert server.metric("expediter:replica_restarts_total") == 1
        assert 0 < server.metric("expediter:requests_resumed_total") < len(streams)
        assert server.metric("vllm:request_success_total", finished_reason="error") == 0
        served = {engine: server.metric("vllm:request_success_total", engine=engine) for engine in ("0", "1")}
        for _ in range(4):
            assert server.complete("again", max_tokens=2).status == 200
        for engine, count in served.items():
            assert server.metric("vllm:request_success_total", engine=engine) == count + 2, "both serve"
        pids = server.replica_pids()
        assert server.stop() == 0
        assert not any(map(is_alive, [*pids, victim]))


def test_the_only_replica_goes_on_when_it_is_back(model_folder: Path) -> None:
    with start_fake_server(model_folder, "--model", "toy", "--step-s", "0.02") as server, ThreadPoolExecutor(1) as pool:
        reply = pool.submit(server.complete, "x", max_tokens=200, ignore_eos=True, n=2)
        stream = Stream(server)
        wait_until(lambda: bool(stream.raw))
        os.kill(server.replica_pids()[0], signal.SIGKILL)
        wait_until(lambda: server.get("/ready").status == 503)
        refused = server.complete("x")  # what is new does not wait for it
        assert refused.status == 503
        assert refused.headers["retry-after"]
        assert reply.result().status == 200
        assert reply.result().json["usage"]["completion_tokens"] == 400
        assert reply.result().json["usage"]["prompt_tokens"] == 1
        stream.join(60)
        assert stream.is_complete
        assert server.complete("x").status == 200


def test_a_stalled_replica_is_not_ready_and_is_replaced(model_folder: Path) -> None:
    flags = ("--model", "toy", "--step-s", "0.02", "--stall-s", "1", "--kill-stalled-s", "3")
    with start_fake_server(model_folder, *flags) as server:
        (victim,) = server.replica_pids()
        stream = Stream(server, max_tokens=400)
        wait_until(lambda: bool(stream.raw))
        os.kill(victim, signal.SIGSTOP)
        wait_until(lambda: server.get("/ready").status == 503, what="not ready")
        told = server.get("/ready").json
        assert told == {"ready": False, "backends": {"own": "ejected"}, "replicas": {"0": "stalled"}}
        assert server.get("/health").status == 200
        assert server.complete("x").status == 503
        wait_until(lambda: server.get("/ready").status == 200, what="ready again")
        assert server.complete("x").status == 200
        stream.join(60)
        assert stream.is_complete
        assert not is_alive(victim)


def test_a_replica_that_only_paused_goes_on(model_folder: Path) -> None:
    flags = ("--model", "toy", "--step-s", "0.02", "--stall-s", "1", "--kill-stalled-s", "30")
    with start_fake_server(model_folder, *flags) as server:
        (pid,) = server.replica_pids()
        stream = Stream(server, max_tokens=100)
        wait_until(lambda: bool(stream.raw))
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: server.get("/ready").status == 503)
        os.kill(pid, signal.SIGCONT)
        wait_until(lambda: server.get("/ready").status == 200)
        stream.join(20)
        assert stream.is_complete


def test_a_long_step_is_no_stall(model_folder: Path) -> None:
    flags = ("--model", "toy", "--step-s", "2.5", "--stall-s", "1", "--kill-stalled-s", "2")
    with start_fake_server(model_folder, *flags) as server, ThreadPoolExecutor(1) as pool:
        reply = pool.submit(server.complete, "x", max_tokens=2, ignore_eos=True)
        while not reply.done():
            assert server.get("/ready").status == 200
            time.sleep(0.1)
        assert reply.result().json["usage"]["completion_tokens"] == 2


def test_a_step_that_hangs_is_ended(model_folder: Path) -> None:
    flags = ("--model", "toy", "--step-s", "60", "--max-step-s", "1")
    with start_fake_server(model_folder, *flags) as server:
        assert server.complete("x").status == 500
        wait_until(lambda: server.get("/ready").status == 200)


def test_kill_9_of_the_gateway_leaves_no_replica(model_folder: Path) -> None:
    with start_fake_server(model_folder, "--replicas", "2", "--model", "toy", "--step-s", "0.02") as server:
        pids = server.replica_pids()
        assert len(pids) == 2
        stream = Stream(server)
        wait_until(lambda: bool(stream.raw))
        server.process.kill()
        wait_until(lambda: not any(map(is_alive, pids)), 5, "replicas gone")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_draining_finishes_what_is_in_flight(model_folder: Path, number: signal.Signals) -> None:
    with start_fake_server(model_folder, "--model", "toy", "--step-s", "0.02") as server:
        streams = [Stream(server, max_tokens=100) for _ in range(4)]
        wait_until(lambda: all(stream.raw for stream in streams))
        pids = server.replica_pids()
        os.killpg(server.process.pid, number)  # as a terminal does it
        wait_until(lambda: server.get("/ready").status == 503)
        assert server.get("/health").status == 200
        refused = server.complete("new")
        assert refused.status == 503
        assert refused.json["error"]["message"]
        for stream in streams:
            stream.join(20)
            assert stream.is_complete
        assert server.process.wait(10) == 0
        assert not any(map(is_alive, pids))


@pytest.mark.parametrize(("timeout_s", "signals"), [("0.5", 1), ("60", 2)])
def test_what_does_not_finish_in_time_gets_an_error_event(model_folder: Path, timeout_s: str, signals: int) -> None:
    """At the deadline, or at once with a second signal; either way with exit code 0."""
    flags = ("--model", "toy", "--step-s", "0.02", "--shutdown-timeout", timeout_s)
    with start_fake_server(model_folder, *flags) as server, ThreadPoolExecutor(1) as pool:
        streams = [Stream(server, max_tokens=1500) for _ in range(3)]
        whole = pool.submit(server.complete, "x", max_tokens=1500, ignore_eos=True)
        wait_until(lambda: all(stream.raw for stream in streams))
        wait_until(lambda: server.metric("vllm:num_requests_running") == 4)
        pids = server.replica_pids()
        started_s = time.monotonic()
        for _ in range(signals):
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
        for stream in streams:
            stream.join(10)
            assert_broken_off(stream)
        assert whole.result().status == 500
        assert server.process.wait(10) == 0
        assert time.monotonic() - started_s < 8
        assert not any(map(is_alive, pids))


def test_a_signal_during_the_start_ends_it(model_folder: Path) -> None:
    command = (sys.executable, str(HERE / "fake_server.py"), str(model_folder), "--replicas", "2", "--model", "toy")
    for number in (signal.SIGTERM, signal.SIGINT):
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True) as process:
            while len(children_of(process.pid)) < 2:
                assert process.poll() is None
            pids = children_of(process.pid)
            os.killpg(process.pid, number)
            assert process.wait(10) == 0
        assert not any(map(is_alive, pids))


def test_liveness_answers_during_a_burst(model_folder: Path) -> None:
    num_requests = 1280

    async def one(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = json.dumps({"prompt": "burst", "max_tokens": 8, "ignore_eos": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        answer = await reader.read()
        writer.close()
        return answer[:15]

    async def burst(port: int) -> list[bytes]:
        return await asyncio.gather(*(one(port) for _ in range(num_requests)))

    with (
        start_fake_server(model_folder, "--replicas", "2", "--num-blocks", "2048") as server,
        ThreadPoolExecutor(1) as pool,
    ):
        answers = pool.submit(asyncio.run, burst(server.port))
        waits: list[float] = []
        while not answers.done():
            started_s = time.monotonic()
            assert server.get("/health", timeout_s=10).status == 200
            waits.append(time.monotonic() - started_s)
            time.sleep(0.05)
        assert answers.result() == [b"HTTP/1.1 200 OK"] * num_requests
        assert len(waits) >= 3
        assert max(waits) < 5
        wait_until(lambda: server.metric("vllm:num_requests_running") == 0)
        assert server.metric("vllm:request_success_total") == num_requests


def test_a_reader_that_stops_reading_does_not_disturb_others(model_folder: Path) -> None:
    with start_fake_server(model_folder, "--model", "toy") as server:
        body = json.dumps({"prompt": "x", "max_tokens": 1500, "ignore_eos": True, "stream": True}).encode()
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            assert server.complete("other", max_tokens=20).status == 200
        wait_until(lambda: server.metric("vllm:num_requests_running") == 0)


def test_children_are_found(model_folder: Path) -> None:
    """The helper that the tests above rely on sees processes at all."""
    with start_fake_server(model_folder) as server:
        assert children_of(server.process.pid) == server.replica_pids()
        assert server.process.pid in children_of(os.getpid())
