"""`/v1/messages`, with Anthropic's own client and event by event."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from live_server import LiveServer

PATH = "/v1/messages"
WEATHER: Any = {"name": "weather", "description": "The weather.", "input_schema": {"type": "object"}}
USE = {"id": "x", "name": "y", "input": {}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture
def client(tools_server: LiveServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=tools_server.url, api_key="unused", max_retries=0) as made:
        yield made


def say(text: str) -> Any:
    return [{"role": "user", "content": text}]


def test_text(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(model="fake", max_tokens=64, messages=say("say 🍕"), system="Repeat.")
    assert [block.text for block in answer.content if block.type == "text"] == ["say 🍕"]
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "fake")
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == 8
    assert answer.usage.output_tokens == 9


def test_how_it_ends(client: anthropic.Anthropic) -> None:
    cut = client.messages.create(model="fake", max_tokens=3, messages=say("abcdef"))
    assert cut.stop_reason == "max_tokens"
    stopped = client.messages.create(model="fake", max_tokens=30, messages=say("abcdef"), stop_sequences=["x", "de"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "de")
    assert stopped.content[0].text == "abc"  # type: ignore[union-attr]


def test_calls_and_their_results(client: anthropic.Anthropic) -> None:
    asked = say(f"hm\n{CALL}")
    answer = client.messages.create(model="fake", max_tokens=99, messages=asked, tools=[WEATHER])
    assert answer.stop_reason == "tool_use"
    text, call = answer.content
    assert (text.type, call.type) == ("text", "tool_use")
    assert call.type == "tool_use"
    assert (call.name, call.input) == ("weather", {"city": "Rome"})
    assert call.id.startswith("toolu_")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    turns = [*asked, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    final = client.messages.create(model="fake", max_tokens=99, messages=turns, tools=[WEATHER])
    assert final.content[0].text == "sunny"  # type: ignore[union-attr]


def test_events_come_in_order_and_make_the_message(client: anthropic.Anthropic) -> None:
    fields: Any = {"model": "fake", "max_tokens": 99, "messages": say(f"hm\n{CALL}"), "tools": [WEATHER]}
    kinds = [event.type for event in client.messages.create(**fields, stream=True)]
    collapsed = [kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert collapsed == ["message_start", *block, *block, "message_delta", "message_stop"], "a ping is not told on"
    with client.messages.stream(**fields) as stream:
        final = stream.get_final_message()
    assert [item.type for item in final.content] == ["text", "tool_use"]
    assert final.content[1].input == {"city": "Rome"}  # type: ignore[union-attr]
    assert final.stop_reason == "tool_use"
    assert final.usage.output_tokens == len(f"hm\n{CALL}") + 1


def test_raw_events(tools_server: LiveServer) -> None:
    reply = tools_server.post(PATH, {"max_tokens": 9, "messages": say("hi"), "stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    names = [line[7:] for line in reply.body.decode().splitlines() if line.startswith("event: ")]
    assert names[:2] == ["message_start", "ping"]
    assert names[-2:] == ["message_delta", "message_stop"]
    assert b"[DONE]" not in reply.body
    start = reply.events[0]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)


def test_counting(client: anthropic.Anthropic, tools_server: LiveServer) -> None:
    counted = client.messages.count_tokens(model="fake", messages=say("hello"), tools=[WEATHER])
    assert counted.input_tokens == 5
    answer = client.messages.create(model="fake", max_tokens=9, messages=say("hello"), tools=[WEATHER])
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == 5
    assert tools_server.post(PATH + "/count_tokens", {"messages": say("hello"), "max_tokens": 5}).status == 400


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 10**7}, "max_model_len"),
        ({"temperature": 1.5}, "temperature"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"unheard_of": 1}, "unheard_of"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "x", "name": "y", "input": {}}]}]},
            "tool_use",
        ),
        ({"tools": [{"name": "bash", "type": "bash_20250124"}]}, "tools"),
        ({"tool_choice": {"type": "tool"}, "tools": [WEATHER]}, "name"),
        ({"tool_choice": {"type": "tool", "name": "other"}, "tools": [WEATHER]}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ],
)
def test_what_is_refused_and_how(tools_server: LiveServer, fields: dict[str, Any], words: str) -> None:
    reply = tools_server.post(PATH, {"max_tokens": 5, "messages": say("x"), **fields})
    assert reply.status == 400, reply.body
    told = reply.json
    assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
    assert words in told["error"]["message"]


def test_errors_of_the_client(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="none", max_tokens=5, messages=say("x"))
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(model="fake", max_tokens=5, messages=[])


def test_a_turn_of_the_assistant_is_continued(client: anthropic.Anthropic, tools_server: LiveServer) -> None:
    turns = [*say("a question"), {"role": "assistant", "content": "The answer "}]
    answer = client.messages.create(model="fake", max_tokens=99, messages=turns)
    assert answer.content[0].text == "The answer"  # type: ignore[union-attr]
    asked = {"messages": [*say("q")], "continue_final_message": True}
    refused = tools_server.post("/v1/chat/completions", asked)
    assert (refused.status, refused.json["error"]["param"]) == (400, "messages")
