"""Tools over HTTP and through OpenAI's own client, with a model that says what it is told to say."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from live_server import LiveServer, make_model_folder

from expediter.engine.tokenizer import Tokenizer
from expediter.gateway.chat_body import CalledFunction, Message, ToolCall
from expediter.gateway.prompts import Prompts
from expediter.gateway.tools.base import Function
from expediter.gateway.tools.choice import ToolUse
from expediter.gateway.tools.hermes import HermesFormat

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather somewhere.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
SAID = (
    'I will look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris 🍕"}}\n</tool_call>\n'
    '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
)


@pytest.fixture
def client(tools_server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=tools_server.url + "/v1", api_key="unused", max_retries=0) as made:
        yield made


def ask(said: str) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": said}], "tools": [WEATHER]}


def test_calls_in_one_piece(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**ask(SAID), n=2)
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I will look.\n"
        calls = choice.message.tool_calls or []
        assert [call.function.name for call in calls] == ["weather", "weather"]
        assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Paris 🍕"}, {"city": "Rome"}]
        assert all(call.type == "function" and call.id.startswith("call_") for call in calls)
    assert len({call.id for choice in answer.choices for call in choice.message.tool_calls or []}) == 4


def test_calls_in_a_stream(client: openai.OpenAI) -> None:
    text, calls, reasons = "", dict[int, dict[str, str]](), []
    for chunk in client.chat.completions.create(**ask(SAID), stream=True):
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        reasons += [choice.finish_reason] if choice.finish_reason else []
        for call in choice.delta.tool_calls or []:
            if call.id is not None:
                assert call.index == len(calls)
                calls[call.index] = {"name": call.function.name or "", "arguments": ""}
            calls[call.index]["arguments"] += call.function.arguments or ""
    assert text == "I will look.\n"
    assert [call["name"] for call in calls.values()] == ["weather", "weather"]
    assert [json.loads(call["arguments"]) for call in calls.values()] == [{"city": "Paris 🍕"}, {"city": "Rome"}]
    assert reasons == ["tool_calls"]


def test_the_beta_helper_accumulates_the_same(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(**ask(SAID)) as stream:
        final = stream.get_final_completion()
    assert [call.function.name for call in final.choices[0].message.tool_calls or []] == ["weather"] * 2


def test_no_calls(client: openai.OpenAI, tools_server: LiveServer) -> None:
    answer = client.chat.completions.create(**ask("no call"))
    assert (answer.choices[0].finish_reason, answer.choices[0].message.content) == ("stop", "no call")
    assert answer.choices[0].message.tool_calls is None
    off = client.chat.completions.create(**ask(SAID), tool_choice="none")
    assert (off.choices[0].finish_reason, off.choices[0].message.content) == ("stop", SAID)
    cut = client.chat.completions.create(**ask(SAID), max_tokens=70)
    assert cut.choices[0].finish_reason == "length"
    assert (cut.choices[0].message.tool_calls or [])[0].function.name == "weather"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "must"}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [{"type": "retrieval"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [WEATHER] * 129}, "tools"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
        ({"functions": [{"name": "f"}]}, "functions"),
    ],
)
def test_what_is_refused(tools_server: LiveServer, fields: dict[str, Any], param: str) -> None:
    reply = tools_server.post("/v1/chat/completions", {**ask("x"), **fields})
    assert reply.status == 400
    assert reply.json["error"]["param"] == param


@pytest.mark.parametrize("depth", [100, 400, 900, 2000])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", '{"messages": [%(user)s], "tools": [{"type": "function", "function": %(function)s}]}'),
        (
            "/v1/chat/completions",
            '{"messages": [%(user)s], "tool_choice": "required", '
            '"tools": [{"type": "function", "function": %(function)s}]}',
        ),
        ("/v1/responses", '{"input": "x", "tools": [{"type": "function", "name": "f", "parameters": %(deep)s}]}'),
        (
            "/v1/messages",
            '{"max_tokens": 5, "messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "c", '
            '"name": "f", "input": %(deep)s}]}, %(user)s]}',
        ),
    ],
)
def test_schemas_and_arguments_nested_deeply(tools_server: LiveServer, path: str, body: str, depth: int) -> None:
    deep = '{"a":' * depth + "1" + "}" * depth
    parts = {
        "deep": deep,
        "function": f'{{"name": "f", "parameters": {deep}}}',
        "user": '{"role": "user", "content": "x"}',
    }
    reply = tools_server.post(path, (body % parts).encode())
    assert reply.status in (200, 400), reply.body
    assert depth < 2000 or reply.status == 400


def test_history_goes_through_the_template(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls or [] %} {{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}"
        "{{ m.tool_call_id or '' }}]{% endfor %}"
    )
    messages = [
        Message(role="user", content="hi"),
        Message(role="assistant", tool_calls=[ToolCall("c1", CalledFunction("weather", '{"city": "Rome"}'))]),
        Message(role="tool", content="sunny", tool_call_id="c1"),
    ]
    use = ToolUse((Function("weather", "The weather.", {"type": "object"}),), "auto")
    knowing = template + "{{ tools | tojson }}"
    text = run(tmp_path, knowing, messages, use)
    assert text.startswith('[user:hi][assistant: weather({"city": "Rome"})][tool:sunnyc1][{"type": "function"')
    text = run(tmp_path, template, messages, use)
    assert text.startswith("[system:These functions")
    assert '"description": "The weather."' in text
    assert '[assistant:<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>]' in text
    assert text.endswith("[user:<tool_response>\nsunny\n</tool_response>]")
    text = run(tmp_path, template, [Message(role="developer", content="Be brief."), messages[0]], use)
    assert text.startswith("[system:Be brief.\n\nThese functions")
    assert run(tmp_path, knowing, messages[:1], ToolUse(use.functions, "none")) == "[user:hi]null"


def run(folder: Path, template: str, messages: list[Message], use: ToolUse) -> str:
    text = Tokenizer.from_folder(make_model_folder(folder, template))
    prompts = Prompts(text, HermesFormat())
    prompt = asyncio.run(prompts.of_chat(messages, use))
    prompts.close()
    assert prompt.tokens.dtype == np.int32
    return text.decode(prompt.tokens.tolist())
