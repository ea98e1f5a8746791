"""What clients of the two APIs send, as their own packages describe it: honoured, ignored or refused by name."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from typing import Any

import anthropic
import msgspec
import openai
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from live_server import LiveServer
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params, response_includable

from expediter.gateway.api.completions import CompletionBody
from expediter.gateway.api.messages_body import MessagesBody, PromptBody
from expediter.gateway.api.responses_body import Includable, ResponsesBody
from expediter.gateway.chat_body import ChatBody

TOOL: Any = {"type": "function", "function": {"name": "weather", "description": None, "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
NO_ARGUMENTS = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'


@pytest.fixture
def client(tools_server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=tools_server.url + "/v1", api_key="unused", max_retries=0) as made:
        yield made


@pytest.fixture
def claude(tools_server: LiveServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=tools_server.url, api_key="unused", max_retries=0) as made:
        yield made


def say(text: str) -> Any:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (chat_params.CompletionCreateParamsNonStreaming, ChatBody),
        (completion_create_params.CompletionCreateParamsNonStreaming, CompletionBody),
        (response_create_params.ResponseCreateParamsNonStreaming, ResponsesBody),
        (message_create_params.MessageCreateParamsNonStreaming, MessagesBody),
        (message_count_tokens_params.MessageCountTokensParams, PromptBody),
    ],
)
def test_every_parameter_of_the_clients_is_known(theirs: type, ours: type[msgspec.Struct]) -> None:
    """None is "no such parameter": each has a rule in docs/api.md."""
    assert set(typing.get_type_hints(theirs)) <= set(ours.__struct_fields__)


def test_everything_that_can_be_included_is_known() -> None:
    assert set(typing.get_args(response_includable.ResponseIncludable)) <= set(typing.get_args(Includable))


USUAL: dict[str, dict[str, Any]] = {
    "langchain": {
        "temperature": 0.7,
        "n": 1,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 50,
        "parallel_tool_calls": True,
        "tools": [TOOL],
        "tool_choice": "auto",
    },
    "open webui": {
        "stream_options": {"include_usage": True},
        "stop": ["<|eot|>", "###"],
        "seed": 0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0,
        "top_p": 1,
        "max_tokens": 50,
        "logit_bias": {},
    },
    "litellm": {"user": "u-1", "metadata": {"tags": "x"}, "service_tier": "auto", "store": False, "timeout": 30},
    "aider": {"temperature": 0, "reasoning_effort": None},
    "continue": {"max_tokens": 50, "stop": None, "top_p": 0, "prediction": None, "tools": []},
    "an encoder of nulls": dict.fromkeys(
        [
            *("functions", "function_call", "logprobs", "top_logprobs", "n", "seed", "stop", "tools", "tool_choice"),
            *("response_format", "metadata", "modalities", "audio", "moderation", "verbosity", "web_search_options"),
        ]
    ),
    "of caches": {
        "prompt_cache_key": "k",
        "prompt_cache_retention": "in_memory",
        "prompt_cache_options": {"mode": "implicit", "ttl": None},
        "safety_identifier": "s",
    },
}


@pytest.mark.parametrize("who", USUAL)
def test_chat_completions_as_they_are_sent(client: openai.OpenAI, who: str) -> None:
    fields = dict(USUAL[who])
    timeout = fields.pop("timeout", 30)
    messages: Any = [
        {"role": "developer", "content": [{"type": "text", "text": "Repeat."}]},
        {"role": "user", "content": [{"type": "text", "text": "as "}, {"type": "text", "text": "sent"}], "name": "ann"},
    ]
    if "stream_options" in fields:
        chunks = list(
            client.chat.completions.create(model="fake", messages=messages, stream=True, timeout=timeout, **fields)
        )
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "as sent"
        assert chunks[-1].usage is not None
        return
    answer = client.chat.completions.create(
        model="fake", messages=messages, timeout=timeout, extra_body={k: v for k, v in fields.items() if v is None},
        **{k: v for k, v in fields.items() if v is not None},
    )  # fmt: skip
    assert answer.choices[0].message.content == "as sent"


@pytest.mark.parametrize("call", [CALL, NO_ARGUMENTS])
def test_a_conversation_with_tools_is_given_back(client: openai.OpenAI, call: str) -> None:
    """The message of the client's own package, with all its nulls, and what others write beside it."""
    first = client.chat.completions.create(model="fake", messages=say(call), tools=[TOOL])
    message = first.choices[0].message
    assert message.tool_calls
    given = message.model_dump()
    given.update({"refusal": None, "annotations": [], "audio": None, "function_call": None, "reasoning_content": None})
    given["tool_calls"][0]["index"] = 0
    for arguments in (given["tool_calls"][0]["function"]["arguments"], ""):
        given["tool_calls"][0]["function"]["arguments"] = arguments
        results: Any = [{"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": f"it is {call}"}]
        answer = client.chat.completions.create(model="fake", messages=[*say("q"), given, *results], tools=[TOOL])
        assert answer.choices[0].finish_reason == "tool_calls"


def test_responses_as_they_are_sent(client: openai.OpenAI) -> None:
    """As agents send them: nothing kept, reasoning left to the model, what there was given back as input."""
    tool: Any = {"type": "function", **TOOL["function"], "strict": False}
    fields: Any = {
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": None, "summary": None},
        "tools": [tool],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "truncation": "disabled",
        "prompt_cache_key": "session",
        "metadata": {"a": "b"},
        "user": "u",
        "service_tier": "auto",
    }
    first = client.responses.create(model="fake", input=f"hm\n{CALL}", **fields)
    assert [item.type for item in first.output] == ["message", "function_call"]
    history: Any = [item.model_dump() for item in first.output]
    output = {"type": "function_call_output", "call_id": history[1]["call_id"], "output": "sunny"}
    second = client.responses.create(model="fake", input=[*say("q"), *history, output], **fields)
    assert second.output_text == "sunny"


def test_logprobs_of_responses_as_their_documentation_asks_for_them(client: openai.OpenAI) -> None:
    for fields, num_top in (({}, 0), ({"top_logprobs": 2}, 2)):
        answer = client.responses.create(
            model="fake", input="ab", include=["message.output_text.logprobs"], **fields  # type: ignore[arg-type]
        )  # fmt: skip
        entries = answer.output[0].content[0].logprobs  # type: ignore[union-attr]
        assert entries is not None
        assert [entry.token for entry in entries] == ["a", "b"]
        assert all(len(entry.top_logprobs) == num_top for entry in entries)


def test_messages_as_they_are_sent(claude: anthropic.Anthropic) -> None:
    tool: Any = {"name": "weather", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}
    fields: Any = {
        "model": "fake",
        "max_tokens": 99,
        "extra_body": {"temperature": 1},
        "system": [{"type": "text", "text": "Repeat.", "cache_control": {"type": "ephemeral"}}],
        "metadata": {"user_id": "u"},
        "thinking": {"type": "adaptive"},
        "tools": [tool],
        "service_tier": "auto",
        "speed": "standard",
        "cache_control": {"type": "ephemeral"},
    }
    first = claude.messages.create(messages=say(f"hm\n{CALL}"), **fields)
    content: Any = [block.model_dump() for block in first.content]
    result = {"type": "tool_result", "tool_use_id": content[1]["id"], "content": [{"type": "text", "text": "sunny"}]}
    turns: Any = [*say("q"), {"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
    second = claude.messages.create(messages=turns, **fields)
    assert second.content[0].text == "sunny"  # type: ignore[union-attr]


def test_the_text_of_a_message_is_held_to_a_schema(tools_server: LiveServer) -> None:
    """`output_config.format` is what `response_format` is elsewhere; a schema that is none is refused in its name."""
    asked = {"max_tokens": 20, "messages": say("x")}

    def answer(schema: Any) -> Any:
        config = {"format": {"type": "json_schema", "schema": schema}, "effort": None}
        return tools_server.post("/v1/messages", {**asked, "output_config": config})

    assert answer({"type": "integer"}).status == 200
    refused = answer({"type": "nothing"})
    assert refused.status == 400
    assert "output_config" in refused.json["error"]["message"]
    config = {"effort": "high"}
    assert tools_server.post("/v1/messages", {**asked, "output_config": config}).status == 400


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("chat/completions", {"prompt_cache_retention": "24h"}, "prompt_cache_retention"),
        ("chat/completions", {"prompt_cache_options": {"mode": "explicit"}}, "prompt_cache_options"),
        ("chat/completions", {"moderation": {"model": "m"}}, "moderation"),
        ("chat/completions", {"reasoning_effort": "high"}, "reasoning_effort"),
        ("chat/completions", {"store": True}, "store"),
        ("chat/completions", {"stream": True, "stream_options": {"include_usge": True}}, "stream_options"),
        ("responses", {"reasoning": {"effort": "high", "summary": None}}, "reasoning"),
        ("responses", {"include": ["something.else"]}, "include"),
        ("responses", {"image": {"detail": "high"}}, "image"),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(
    tools_server: LiveServer, path: str, fields: dict[str, Any], param: str
) -> None:
    prompt = {"input": "x"} if path == "responses" else {"messages": say("x")}
    reply = tools_server.post(f"/v1/{path}", {**prompt, **fields})
    assert (reply.status, reply.json["error"]["param"]) == (400, param), reply.body


def test_the_least_top_p_leaves_the_best_token(client: openai.OpenAI) -> None:
    answers = [
        client.chat.completions.create(model="fake", messages=say("best"), top_p=0, temperature=2, seed=seed)
        for seed in (1, 2, 3)
    ]
    assert {answer.choices[0].message.content for answer in answers} == {"best"}
    assert json.loads(answers[0].model_dump_json())["object"] == "chat.completion"
