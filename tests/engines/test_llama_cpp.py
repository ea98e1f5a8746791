"""Two real llama.cpp servers with the gateway in front. `make test-engines` makes their environment and runs these."""

from __future__ import annotations

import json
import time
import urllib.error
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from benchmarks.peers.engine_server import all_ready
from benchmarks.peers.environments import LLAMA_CPP
from benchmarks.peers.llama_cpp_server import LlamaCppServer
from tests.engines.engine_door import (
    EngineDoor,
    asked,
    engine_door,
    get,
    interpreter,
    post,
    stream_lines,
    text,
    wait_until,
)

from expediter.gateway.backends.metrics_text import read_load

MODEL = "smollm2"
NUM_SLOTS = 2
SLOT_CONTEXT = 1024
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
CHAT = {"model": MODEL, "messages": QUESTION, "max_tokens": 8, "temperature": 0}
COMPLETION = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "n_probs": 2}
ENDLESS = {"model": MODEL, "prompt": "Once", "max_tokens": 900, "ignore_eos": True}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
VARIES = {"id", "created", "created_at", "completed_at", "timings", "usage", "system_fingerprint"}


@pytest.fixture(scope="module")
def pair() -> Iterator[Sequence[LlamaCppServer]]:
    python: Path = interpreter(LLAMA_CPP, "test-engines")
    servers = [LlamaCppServer(python, num_slots=NUM_SLOTS, slot_context=SLOT_CONTEXT) for _ in range(2)]
    with all_ready(servers) as ready:
        yield ready


@pytest.fixture(scope="module")
def door(pair: Sequence[LlamaCppServer]) -> Iterator[EngineDoor]:
    with engine_door([server.url for server in pair]) as running:
        yield running


def comparable(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer without what differs between any two."""
    return {key: value for key, value in answer.items() if key not in VARIES}


def num_processing(servers: Sequence[LlamaCppServer]) -> float:
    return sum(server.metric("llamacpp:requests_processing") for server in servers)


def test_it_finds_out_what_they_serve(door: EngineDoor, pair: Sequence[LlamaCppServer]) -> None:
    (model,) = get(door.url, "/v1/models")["data"]
    assert model["id"] == MODEL
    wait_until(lambda: all(backend["num_running"] is not None for backend in door.backends()), "metrics are read")
    for backend in door.backends():
        assert (backend["kind"], backend["state"], backend["models"]) == ("llama.cpp", "up", [MODEL])
        assert backend["max_model_len"] == SLOT_CONTEXT
        assert backend["max_requests"] == NUM_SLOTS
        assert (backend["num_running"], backend["num_waiting"], backend["kv_use"]) == (0, 0, None)


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)])
def test_answers_are_those_of_llama_cpp(
    door: EngineDoor, pair: Sequence[LlamaCppServer], path: str, body: dict[str, Any]
) -> None:
    direct = [comparable(post(server.url, path, body)) for server in pair]
    assert direct[0] == direct[1]
    answer = post(door.url, path, body)
    assert comparable(answer) == direct[0]
    assert answer["timings"]["predicted_n"] == 8  # its own fields pass, both ways


def test_streams_are_those_of_llama_cpp(door: EngineDoor, pair: Sequence[LlamaCppServer]) -> None:
    body = {**CHAT, "stream_options": {"include_usage": True}}

    def said(url: str) -> list[dict[str, Any]]:
        *chunks, end = [line.removeprefix("data: ") for line in stream_lines(url, "/v1/chat/completions", body)]
        assert end == "[DONE]"
        return [comparable(json.loads(chunk)) for chunk in chunks]

    direct = [said(server.url) for server in pair]
    assert direct[0] == direct[1] == said(door.url)
    assert len(direct[0]) > 8


def test_outputs_are_held_to_a_schema(door: EngineDoor) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    messages = [{"role": "user", "content": "Name a person."}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 48, "temperature": 0, "response_format": form}
    answer = json.loads(post(door.url, "/v1/chat/completions", body)["choices"][0]["message"]["content"])
    assert answer.keys() == {"name", "age"}
    assert answer["age"] <= 99


def test_tools_and_other_formats_go_through(door: EngineDoor, pair: Sequence[LlamaCppServer]) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    for path, body in (
        ("/v1/chat/completions", {**CHAT, "tools": tools, "tool_choice": "auto"}),
        ("/v1/messages", {"model": MODEL, "messages": QUESTION, "max_tokens": 8, "temperature": 0}),
    ):
        assert comparable(post(door.url, path, body)) == comparable(post(pair[0].url, path, body))
    answer = post(door.url, "/v1/responses", {"model": MODEL, "input": "Hello", "max_output_tokens": 4})
    assert answer["usage"]["output_tokens"] == 4


def test_errors_are_those_of_llama_cpp(door: EngineDoor) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(door.url, "/v1/completions", {"model": MODEL, "prompt": "time " * 2000, "max_tokens": 1})
    error = json.loads(refused.value.read())["error"]
    assert (refused.value.code, error["type"], error["n_ctx"]) == (400, "exceed_context_size_error", SLOT_CONTEXT)
    assert all(backend["state"] == "up" for backend in door.backends())


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_leaves_is_gone_from_llama_cpp(
    door: EngineDoor, pair: Sequence[LlamaCppServer], is_stream: bool
) -> None:
    """A plain request it notices a second after its last result for anybody: asked too often, it never does."""
    with asked(door.url, "/v1/completions", {**ENDLESS, "stream": is_stream}) as connection:
        wait_until(lambda: num_processing(pair) == 1, "the request runs")
        if is_stream:
            connection.getresponse().read(20)
    wait_until(lambda: not any(backend["num_in_flight"] for backend in door.backends()), "the gateway has none", 3)
    every_s = 0.05 if is_stream else 2.5
    took_s = wait_until(lambda: num_processing(pair) == 0, "the request is gone", every_s=every_s)
    assert took_s < (3 if is_stream else 15)


def test_more_than_they_have_slots_for_waits_at_the_gateway(door: EngineDoor, pair: Sequence[LlamaCppServer]) -> None:
    with ExitStack() as stack:
        for _ in range(2 * NUM_SLOTS + 1):
            stack.enter_context(asked(door.url, "/v1/completions", {**ENDLESS, "stream": True}))
        wait_until(lambda: num_processing(pair) == 2 * NUM_SLOTS, "all slots are taken")
        assert [backend["num_in_flight"] for backend in door.backends()] == [NUM_SLOTS, NUM_SLOTS]
        assert sum(server.metric("llamacpp:requests_deferred") for server in pair) == 0
    wait_until(lambda: num_processing(pair) == 0, "all are gone")


def test_requests_of_others_are_seen_and_avoided(door: EngineDoor, pair: Sequence[LlamaCppServer]) -> None:
    busy, idle = pair
    with ExitStack() as stack:
        for _ in range(NUM_SLOTS + 1):
            stack.enter_context(asked(busy.url, "/v1/completions", {**ENDLESS, "stream": True}))
        wait_until(lambda: door.backends()[0]["num_waiting"] == 1, "the gateway sees one wait")
        assert door.backends()[0]["num_running"] == NUM_SLOTS
        before = idle.metric("llamacpp:tokens_predicted_total")
        num_in_a_row = 0
        for seed in range(40):
            post(door.url, "/v1/completions", {"model": MODEL, "prompt": text(seed, 8), "max_tokens": 1})
            after = idle.metric("llamacpp:tokens_predicted_total")
            num_in_a_row, before = (num_in_a_row + 1 if after > before else 0), after
            if num_in_a_row == 4:
                break
        assert num_in_a_row == 4, "it goes on sending to the busy one"
    wait_until(lambda: door.backends()[0]["num_running"] == 0, "the gateway sees them gone")


def test_a_shared_prefix_goes_where_it_is_cached(door: EngineDoor) -> None:
    prefix = text(7, 120)
    cached = []
    for turn in range(4):
        body = {"model": MODEL, "prompt": f"{prefix} {text(100 + turn, 6)}", "max_tokens": 1}
        usage = post(door.url, "/v1/completions", body)["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] < 20
    assert min(cached[1:]) >= 100


def test_comments_while_a_prompt_is_computed_are_no_first_token(door: EngineDoor) -> None:
    body = {"model": MODEL, "prompt": text(8, 900), "max_tokens": 1, "sse_ping_interval": 1, "stream": True}
    started_s = time.monotonic()
    with asked(door.url, "/v1/completions", body) as connection:
        answer = connection.getresponse()
        name = answer.headers["X-Request-Id"]
        first, first_s = answer.readline(), time.monotonic() - started_s
        token_s = next(time.monotonic() - started_s for line in answer if line.startswith(b"data: "))
        answer.read()
    assert first == b":\n"
    assert first_s < token_s
    assert door.told(name)["spans"][-2]["details"]["first_byte_s"] > (first_s + token_s) / 2


def test_its_metrics_count_work_before_a_request_has_ended(pair: Sequence[LlamaCppServer]) -> None:
    """So a server that works for somebody else's long request is not taken for hung."""

    def work() -> float:
        load = read_load(pair[1].metrics_page())
        assert load is not None
        assert load.work is not None
        return load.work

    before = work()
    with asked(pair[1].url, "/v1/completions", {**ENDLESS, "stream": True}) as connection:
        answer = connection.getresponse()
        for _ in range(20):
            answer.readline()
        under_way = work()
        assert pair[1].metric("llamacpp:requests_processing") == 1
    assert before < under_way < before + ENDLESS["max_tokens"]


def test_one_dies_and_comes_back(door: EngineDoor, pair: Sequence[LlamaCppServer]) -> None:
    """Last: it takes a server away. While it loads its model it answers 503, and gets nothing."""
    dying = pair[0]
    dying.kill()
    for seed in range(6):
        post(door.url, "/v1/completions", {"model": MODEL, "prompt": text(200 + seed, 8), "max_tokens": 1})
    # By a request, or by a probe once nobody has heard of it for five seconds: both idle, and the other may be faster.
    wait_until(lambda: [backend["state"] for backend in door.backends()] == ["ejected", "up"], "its death is known")
    dying.start()
    dying.wait_until_ready()
    wait_until(lambda: door.backends()[0]["state"] != "ejected", "it may be tried")
    for seed in range(40):
        post(door.url, "/v1/completions", {"model": MODEL, "prompt": text(300 + seed, 8), "max_tokens": 1})
        if dying.metric("llamacpp:tokens_predicted_total") > 0:
            break
    assert door.backends()[0]["state"] == "up"
