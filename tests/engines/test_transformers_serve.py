"""`transformers serve` behind the gateway: anything that speaks OpenAI's API will do.

It has no metrics and no limits to ask for, begins a stream before it has computed the prompt, and ends it without
`[DONE]`. `make test-engines` makes its environment and runs these.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from benchmarks.peers.engine_server import all_ready
from benchmarks.peers.environments import TRANSFORMERS
from benchmarks.peers.transformers_server import TransformersServer
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

from expediter.engine.default_model import resolve_model

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[TransformersServer]:
    python = interpreter(TRANSFORMERS, "test-engines")
    with all_ready([TransformersServer(python, resolve_model())]) as (ready,):
        yield ready


@pytest.fixture(scope="module")
def door(server: TransformersServer) -> Iterator[EngineDoor]:
    with engine_door([server.url]) as running:
        yield running


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": resolve_model().name, "messages": QUESTION, "max_tokens": 8, "temperature": 0, **fields}


def test_it_finds_out_what_there_is_to_know(door: EngineDoor) -> None:
    (model,) = get(door.url, "/v1/models")["data"]
    assert model["id"] == resolve_model().name
    (backend,) = door.backends()
    assert (backend["kind"], backend["state"]) == ("other", "up")
    assert (backend["max_model_len"], backend["max_requests"], backend["num_running"]) == (None, None, None)


def test_answers_are_its_own(door: EngineDoor, server: TransformersServer) -> None:
    direct, through = (post(url, CHAT, chat()) for url in (server.url, door.url))
    assert through["choices"] == direct["choices"]
    assert through["usage"] == direct["usage"]
    assert "Paris" in through["choices"][0]["message"]["content"]


def test_streams_are_its_own(door: EngineDoor, server: TransformersServer) -> None:
    def said(url: str) -> list[Any]:
        lines = stream_lines(url, CHAT, chat())
        return [json.loads(line.removeprefix("data: "))["choices"] for line in lines]

    direct = said(server.url)
    assert said(door.url) == direct
    assert len(direct) > 8
    with openai.OpenAI(base_url=f"{door.url}/v1", api_key="unused", max_retries=0) as client:
        chunks = list(client.chat.completions.create(**chat(stream=True)))
    assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_the_role_is_no_first_token(door: EngineDoor) -> None:
    started_s = time.monotonic()
    messages = [{"role": "user", "content": text(1, 500)}]
    with asked(door.url, CHAT, chat(messages=messages, max_tokens=2, stream=True)) as connection:
        answer = connection.getresponse()
        name = answer.headers["X-Request-Id"]
        events_s = [time.monotonic() - started_s for line in answer if line.startswith(b"data: ")]
    assert events_s[0] < events_s[1] / 2
    assert door.told(name)["spans"][-2]["details"]["first_byte_s"] > (events_s[0] + events_s[1]) / 2


def test_a_client_that_leaves_is_gone(door: EngineDoor) -> None:
    with asked(door.url, CHAT, chat(max_tokens=2000, stream=True)) as connection:
        connection.getresponse().read(20)
        assert door.backends()[0]["num_in_flight"] == 1
    wait_until(lambda: door.backends()[0]["num_in_flight"] == 0, "it is gone", 3)
    assert post(door.url, CHAT, chat(max_tokens=1))["usage"]["completion_tokens"] == 1
    assert door.backends()[0]["outcomes"].get("ok", 0) > 0
