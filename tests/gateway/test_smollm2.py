"""`expediter serve` with the real default model, end to end."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import jsonschema
import openai
import pytest
from live_server import LiveServer, start_process

from expediter.core.errors import ConfigurationError
from expediter.engine.default_model import DEFAULT_MODEL, resolve_model

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
FLAGS = ("--port", "0", "--num-gpu-blocks-override", "128", "--max-num-batched-tokens", "256")


@pytest.fixture(scope="module")
def smollm2() -> Iterator[LiveServer]:
    try:
        resolve_model()
    except ConfigurationError as error:
        pytest.skip(f"the default model is not to be had here: {error}")
    with start_process(sys.executable, "-m", "expediter.cli.main", "serve", *FLAGS) as live:
        yield live
        assert live.stop() == 0


@pytest.fixture
def client(smollm2: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=smollm2.url + "/v1", api_key="unused", max_retries=0, timeout=120) as made:
        yield made


def test_chat_knows_the_capital_of_france(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=DEFAULT_MODEL, messages=QUESTION, temperature=0, max_tokens=24)
    text = answer.choices[0].message.content or ""
    assert "Paris" in text
    assert answer.choices[0].finish_reason == "stop"
    streamed = client.chat.completions.create(
        model=DEFAULT_MODEL, messages=QUESTION, temperature=0, max_tokens=24, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == text


def test_seeds_decide_whatever_else_runs(client: openai.OpenAI) -> None:
    """Alone, then with three others around and a cached prefix: the same text for the same seed."""

    def ask(n: int, seed: int) -> list[str]:
        answer = client.completions.create(
            model=DEFAULT_MODEL, prompt="Once upon a time", max_tokens=12, temperature=0.9, n=n, seed=seed
        )
        return [choice.text for choice in answer.choices]

    alone = ask(1, 7)
    among = ask(4, 5)
    assert among[2] == alone[0]
    assert len(set(among)) > 1


def test_limits_follow_the_pool(smollm2: LiveServer) -> None:
    model = smollm2.get("/v1/models").json["data"][0]
    assert (model["id"], model["max_model_len"]) == (DEFAULT_MODEL, 128 * 16)
    assert smollm2.complete("x", max_tokens=5000).json["error"]["param"] == "max_tokens"
    assert smollm2.complete([49152]).json["error"]["param"] == "prompt"
    text = "Zürich 日本 🍕"
    tokens = smollm2.post("/tokenize", {"prompt": text}).json["tokens"]
    assert smollm2.post("/detokenize", {"tokens": tokens}).json == {"prompt": text}


def test_steps_are_logged_for_fitting(smollm2: LiveServer, client: openai.OpenAI) -> None:
    client.completions.create(model=DEFAULT_MODEL, prompt="The sky is", max_tokens=3)
    steps = smollm2.get("/steps").json["steps"]
    assert all(step["elapsed_s"] > 0 and step["num_tokens"] >= 1 for step in steps)
    assert [step["sequence"] for step in steps] == list(range(len(steps)))
    assert smollm2.get(f"/steps?since={len(steps) - 1}").json["steps"] == steps[-1:]
    assert smollm2.get("/steps?since=x").status == 400


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"enum": ["Paris", "Rome", "Berlin"]},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
PERSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}


def test_outputs_follow_a_schema(client: openai.OpenAI) -> None:
    """Three sequences of one prompt beside a free request, streamed and not: valid JSON, and nothing else changes."""
    question = [{"role": "user", "content": "Invent a person."}]
    fields: dict[str, Any] = {"model": DEFAULT_MODEL, "messages": question, "temperature": 0.9, "seed": 3, "n": 3}
    free = client.chat.completions.create(model=DEFAULT_MODEL, messages=QUESTION, temperature=0, max_tokens=24)
    with ThreadPoolExecutor() as threads:
        beside = threads.submit(
            client.chat.completions.create, model=DEFAULT_MODEL, messages=QUESTION, temperature=0, max_tokens=24
        )
        answer = client.chat.completions.create(**fields, max_tokens=120, response_format=PERSON_FORMAT)
    assert beside.result().choices[0].message.content == free.choices[0].message.content
    texts = [choice.message.content or "" for choice in answer.choices]
    for choice, text in zip(answer.choices, texts, strict=True):
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(text), PERSON)
    assert len(set(texts)) > 1
    streamed = [""] * 3
    for chunk in client.chat.completions.create(**fields, max_tokens=120, response_format=PERSON_FORMAT, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


@pytest.mark.parametrize(
    ("wanted", "is_match"),
    [
        ({"choice": ["positive", "negative"]}, lambda text: text in ("positive", "negative")),
        ({"regex": "[0-9]{3}-[0-9]{4}"}, lambda text: re.fullmatch("[0-9]{3}-[0-9]{4}", text)),
        ({"grammar": 'root ::= "SELECT " column " FROM t"\ncolumn ::= "a" | "b"'}, lambda text: text[-7:] == " FROM t"),
        ({"json": PERSON}, lambda text: jsonschema.validate(json.loads(text), PERSON) is None),
    ],
)
def test_outputs_follow_vllms_kinds(client: openai.OpenAI, wanted: dict[str, Any], is_match: Any) -> None:
    answer = client.chat.completions.create(
        model=DEFAULT_MODEL,
        messages=[{"role": "user", "content": "Answer, please."}],
        max_tokens=120,
        seed=1,
        extra_body={"structured_outputs": wanted},
    )
    assert answer.choices[0].finish_reason == "stop"
    assert is_match(answer.choices[0].message.content)


def test_any_json_object_and_one_that_is_cut_short(client: openai.OpenAI) -> None:
    ask = {
        "model": DEFAULT_MODEL,
        "messages": [{"role": "user", "content": "Describe Paris as JSON."}],
        "temperature": 0,
    }
    cut = client.chat.completions.create(**ask, max_tokens=4, response_format={"type": "json_object"})
    assert cut.choices[0].finish_reason == "length"
    assert (cut.choices[0].message.content or "").startswith("{")
    whole = client.chat.completions.create(**ask, max_tokens=60, response_format={"type": "json_object"})
    assert whole.choices[0].finish_reason == "stop"
    assert isinstance(json.loads(whole.choices[0].message.content or ""), dict)


CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather in a city.", "parameters": CITY, "strict": True},
}
ABOUT_ROME: Any = [{"role": "user", "content": "How is the weather in Rome?"}]


def test_a_call_can_be_forced(client: openai.OpenAI) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        answer = client.chat.completions.create(
            model=DEFAULT_MODEL,
            messages=ABOUT_ROME,
            tools=[WEATHER],
            tool_choice=choice,  # type: ignore[arg-type]
            parallel_tool_calls=False,
            max_tokens=64,
            temperature=0,
        )
        assert answer.choices[0].finish_reason == "tool_calls"
        (call,) = answer.choices[0].message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == "weather"
        jsonschema.validate(json.loads(call.function.arguments), CITY)


def test_the_other_apis_can_force_one_too(smollm2: LiveServer, client: openai.OpenAI) -> None:
    with anthropic.Anthropic(base_url=smollm2.url, api_key="unused", max_retries=0, timeout=120) as other:
        message = other.messages.create(
            model=DEFAULT_MODEL,
            max_tokens=64,
            messages=ABOUT_ROME,
            tools=[{"name": "weather", "input_schema": CITY}],  # type: ignore[typeddict-item]
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
        )
    assert [block.type for block in message.content] == ["tool_use"]
    jsonschema.validate(message.content[0].input, CITY)  # type: ignore[union-attr]
    response = client.responses.create(
        model=DEFAULT_MODEL,
        input="How is the weather in Rome?",
        max_output_tokens=64,
        text={"format": {"type": "json_schema", "name": "city", "schema": CITY}},
    )
    assert response.status == "completed"
    jsonschema.validate(json.loads(response.output_text), CITY)


def test_strict_functions_are_held_to_where_the_model_is_free(client: openai.OpenAI) -> None:
    """It may answer in words or call; what it calls is there, with arguments that match."""
    for seed in range(2):
        answer = client.chat.completions.create(
            model=DEFAULT_MODEL, messages=ABOUT_ROME, tools=[WEATHER], max_tokens=32, seed=seed
        )
        calls = answer.choices[0].message.tool_calls or []
        assert calls or answer.choices[0].message.content
        if answer.choices[0].finish_reason != "length":
            for call in calls:
                assert call.type == "function"
                assert call.function.name == "weather"
                jsonschema.validate(json.loads(call.function.arguments), CITY)
