"""`/v1/responses`, with OpenAI's own client and event by event."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from live_server import LiveServer, start_fake_server
from openai.types.responses import (
    Response,
    ResponseErrorEvent,
    ResponseFailedEvent,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
)

PATH = "/v1/responses"
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture
def client(tools_server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=tools_server.url + "/v1", api_key="unused", max_retries=0) as made:
        yield made


def test_text(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="fake", input="say 🍕", instructions="Repeat.", metadata={"a": "b"})
    assert answer.output_text == "say 🍕"
    assert (answer.status, answer.object, answer.model, answer.store) == ("completed", "response", "fake", False)
    assert (answer.instructions, answer.metadata) == ("Repeat.", {"a": "b"})
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (8, 9, 17)
    assert answer.id.startswith("resp_")


def test_what_max_output_tokens_cuts_is_incomplete(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="fake", input="a long text", max_output_tokens=6)
    assert answer.output_text == "a long"
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output[-1].status == "incomplete"


def test_items_of_a_conversation(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model="fake",
        input=[
            {"role": "developer", "content": "Be brief."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "let me look"}]},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        ],  # type: ignore[arg-type]
        tools=[WEATHER],  # type: ignore[list-item]
    )
    assert answer.output_text == "sunny", "the model repeats the last message"


def test_calls(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="fake", input=f"hm\n{CALL}\n{CALL}", tools=[WEATHER])  # type: ignore[list-item]
    message, *calls = answer.output
    assert isinstance(message, ResponseOutputMessage)
    assert answer.output_text == "hm\n"
    assert len(calls) == 2
    for call in calls:
        assert isinstance(call, ResponseFunctionToolCall)
        assert (call.name, call.arguments, call.status) == ("weather", '{"city": "Rome"}', "completed")
        assert call.call_id.startswith("call_")


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="fake", input="ab", top_logprobs=2)
    (message,) = answer.output
    assert isinstance(message, ResponseOutputMessage)
    logprobs = message.content[0].logprobs  # type: ignore[union-attr]
    assert logprobs is not None
    assert [entry.token for entry in logprobs] == ["a", "b"]
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs)


def test_events_come_in_order_and_make_the_response(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model="fake", input=f"hm\n{CALL}", tools=[WEATHER], stream=True))  # type: ignore[call-overload]
    kinds = [event.type for event in events]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    collapsed = [kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before]
    assert collapsed == [
        *("response.created", "response.in_progress"),
        *("response.output_item.added", "response.content_part.added", "response.output_text.delta"),
        *("response.output_text.done", "response.content_part.done", "response.output_item.done"),
        *("response.output_item.added", "response.function_call_arguments.delta"),
        *("response.function_call_arguments.done", "response.output_item.done", "response.completed"),
    ]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    arguments = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    assert (text, arguments) == ("hm\n", '{"city": "Rome"}')
    final: Response = events[-1].response
    assert final.output_text == text
    assert isinstance(final.output[1], ResponseFunctionToolCall)
    assert final.output[1].arguments == arguments
    ids = {event.item_id for event in events if hasattr(event, "item_id")}
    assert ids == {item.id for item in final.output}
    assert final.usage is not None


def test_the_stream_helper_accepts_it(client: openai.OpenAI) -> None:
    with client.responses.stream(model="fake", input="stream this") as stream:
        final = stream.get_final_response()
    assert final.output_text == "stream this"


def test_an_empty_answer_is_an_empty_text(tools_server: LiveServer) -> None:
    body = {"input": "ab", "text": {"format": {"type": "text"}}}
    answer = tools_server.post(PATH, {**body, "max_output_tokens": 1}).json
    assert answer["output"][0]["content"][0]["text"] == "a"
    raw = tools_server.post(PATH, {**body, "stream": True}).body.decode()
    assert "[DONE]" not in raw
    assert raw.startswith("event: response.created\ndata: {")
    assert raw.rstrip().rsplit("event: ", 1)[1].startswith("response.completed\n")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"type": "message", "role": "user"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": {"type": "function", "name": "none"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "s", "schema": {"type": "nothing"}}}}, "text"),
        ({"temperature": 3}, "temperature"),
        ({"n": 2}, "n"),
    ],
)
def test_what_is_refused(tools_server: LiveServer, fields: dict[str, Any], param: str) -> None:
    reply = tools_server.post(PATH, {"input": "x", **fields})
    assert reply.status == 400, reply.body
    assert reply.json["error"]["param"] == param, reply.json


@pytest.mark.parametrize(
    "fields",
    [
        {"store": False, "truncation": "disabled", "background": False, "include": [], "reasoning": {}},
        {"text": {"format": {"type": "json_object"}, "verbosity": "medium"}, "user": "u", "service_tier": "auto"},
        {"priority": 3, "prompt_cache_key": "k", "deadline_ms": 60000, "cache_salt": "s"},
    ],
)
def test_what_is_taken(tools_server: LiveServer, fields: dict[str, Any]) -> None:
    reply = tools_server.post(PATH, {"input": "x", **fields})
    assert reply.status == 200, reply.body
    assert json.loads(reply.body)["output"][0]["role"] == "assistant"


def test_a_stream_that_breaks_says_so_in_both_ways(model_folder: Path) -> None:
    """Some clients look for the event `error`, others for the last event of a response, `response.failed`."""
    flags = ("--model", "toy", "--step-s", "0.02", "--num-blocks", "1024", "--shutdown-timeout", "0.2")
    with start_fake_server(model_folder, *flags) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
        events: list[Any] = []

        def read() -> None:
            for event in client.responses.create(model="fake", input="x", max_output_tokens=1000, stream=True):
                events.append(event)
                if len(events) == 8:
                    server.process.send_signal(signal.SIGTERM)

        with pytest.raises(openai.APIConnectionError):  # never a clean end
            read()
        error, failed = events[-2:]
        assert isinstance(error, ResponseErrorEvent)
        assert error.message
        assert isinstance(failed, ResponseFailedEvent)
        assert failed.response.status == "failed"
        assert failed.response.error is not None
        assert failed.response.error.code == "server_error"
        assert [event.sequence_number for event in events] == list(range(len(events)))
