"""Structured output through the server: what goes wrong with a grammar is its own request's error (CASE 24).

The replicas say the prompt again whatever the grammar; `fake_replica.EchoExecutor` says which grammars misbehave.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer, Reply, grammar_workers, is_alive, start_fake_server, wait_until

ENDLESS = {"type": "object", "properties": {f"p{number}": {} for number in range(16_000)}}
"""Takes minutes to compile: the time is quadratic in the number of properties."""


def ask(server: LiveServer, regex: str, prompt: str = "hello", **fields: Any) -> Reply:
    return server.complete(prompt, structured_outputs={"regex": regex}, **fields)


def error_of(ask_for: Callable[[], Reply]) -> Any:
    """The error of a reply, or of a stream: that is cut after its error event."""
    try:
        reply = ask_for()
    except http.client.IncompleteRead as cut:
        return Reply(200, {}, cut.partial).events[-1]["error"]
    assert reply.status == 400
    return reply.json["error"]


def beside(work: Callable[[], Reply]) -> tuple[threading.Thread, list[Reply]]:
    replies: list[Reply] = []
    thread = threading.Thread(target=lambda: replies.append(work()))
    thread.start()
    return thread, replies


def test_a_grammar_reaches_the_replica_and_changes_nothing_else(server: LiveServer) -> None:
    reply = ask(server, "[a-z]+", n=3)
    assert reply.status == 200
    assert [choice["text"] for choice in reply.json["choices"]] == ["hello"] * 3
    assert {choice["finish_reason"] for choice in reply.json["choices"]} == {"stop"}
    chat = {"messages": [{"role": "user", "content": "hello"}], "response_format": {"type": "json_object"}}
    assert server.post("/v1/chat/completions", chat).json["choices"][0]["message"]["content"] == "hello"


def test_a_schema_that_never_compiles_fails_alone(server: LiveServer) -> None:
    body = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": ENDLESS}}}
    thread, replies = beside(lambda: server.complete("hello", **body))
    num_served = 0
    while thread.is_alive():
        assert server.complete("still here").json["choices"][0]["text"] == "still here"
        assert ask(server, "[a-z ]+", "and me").json["choices"][0]["text"] == "and me"
        num_served += 2
    assert num_served > 2
    error = replies[0].json["error"]
    assert (replies[0].status, error["param"]) == (400, "response_format")
    assert "did not compile within" in error["message"]
    started_s = time.monotonic()
    assert server.complete("hello", **body).status == 400
    assert time.monotonic() - started_s < 2  # it is known by now
    assert server.metric("expediter:replica_restarts_total") == 0
    assert server.metric("expediter:grammars_total", outcome="late") == 1
    assert server.metric("expediter:grammars_total", outcome="compiled") >= 1


def test_no_worker_outlives_its_gateway(model_folder: Path) -> None:
    """Not even one that hangs in its work, when the gateway is killed."""
    with start_fake_server(model_folder) as live:
        assert ask(live, "[a-z]+").status == 200
        (worker,) = grammar_workers(live.process.pid)
        with socket.create_connection(("127.0.0.1", live.port)) as connection:
            raw = json.dumps({"prompt": "hello", "structured_outputs": {"json": ENDLESS}}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
            connection.sendall(head.encode() + raw)
            before = cpu_ticks(worker)
            wait_until(lambda: cpu_ticks(worker) > before + 30, what="the worker compiles")
            live.process.kill()
            live.process.wait()
            wait_until(lambda: not is_alive(worker), what="the worker is gone")


def cpu_ticks(pid: int) -> int:
    """CPU time of a process, in hundredths of a second."""
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]))


def test_a_replica_goes_on_while_it_prepares(server: LiveServer) -> None:
    thread, replies = beside(lambda: ask(server, "slow|hello"))
    num_served = 0
    while thread.is_alive():
        assert server.complete("go on").json["choices"][0]["text"] == "go on"
        num_served += 1
    assert num_served > 2
    assert replies[0].json["choices"][0]["text"] == "hello"


def test_a_replica_that_cannot_prepare_it_says_so(server: LiveServer) -> None:
    for number, stream in enumerate((False, True)):
        error = error_of(lambda n=number, s=stream: ask(server, f"refused{n}", stream=s))  # type: ignore[misc]
        assert error["message"] == "the grammar is refused"
    assert server.complete("hello").json["choices"][0]["text"] == "hello"


@pytest.mark.parametrize("stream", [False, True])
def test_an_output_that_cannot_follow_ends_alone(server: LiveServer, stream: bool) -> None:
    thread, replies = beside(lambda: server.complete("x" * 40, n=4))
    error = error_of(lambda: ask(server, "broken", stream=stream))
    thread.join()
    assert (error["message"], error["type"]) == ("the grammar broke", "invalid_request_error")
    assert [choice["text"] for choice in replies[0].json["choices"]] == ["x" * 40] * 4
    assert server.metric("vllm:num_requests_running") == 0


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed group"),
        ({"structured_outputs": {"json": {"type": "array", "contains": {}}}}, "structured_outputs", "contains"),
        ({"structured_outputs": {"json": {}, "regex": "x"}}, "structured_outputs", "one of"),
        ({"structured_outputs": {"choice": ["x"], "backend": "y"}}, "structured_outputs", "backend"),
        ({"response_format": {"type": "xml"}}, "response_format", "xml"),
        ({"guided_json": {}}, "guided_json", "structured_outputs"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos", "response_format"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 3}, "min_tokens", "response_format"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(server: LiveServer, fields: Any, param: str, words: str) -> None:
    reply = server.complete("hello", **fields)
    error = reply.json["error"]
    assert (reply.status, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert words in error["message"]


def test_calls_that_are_forced_end_where_they_are_complete(server: LiveServer) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [tool], "tool_choice": "required"}
    reply = server.post("/v1/chat/completions", body | {"ignore_eos": True})
    assert (reply.status, reply.json["error"]["param"]) == (400, "ignore_eos")
