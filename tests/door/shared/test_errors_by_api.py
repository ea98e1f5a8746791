"""Errors have the shape of the API that was asked, whoever tells of them and when (CASE 42)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.door.front_door import FrontDoor, front_door, run
from tests.door.http_client import CHAT, Answer, Connection, ask, chat
from tests.door.mock_backends import MockBackend, all_do

from expediter.gateway.tenants import hash_of

MESSAGES, COUNT, RESPONSES = "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"
KEY, POOR = "sk-exp-one", "sk-exp-two"
CONFIG = f"""
[tenants.one]
key_hashes = ["{hash_of(KEY)}"]
[tenants.poor]
key_hashes = ["{hash_of(POOR)}"]
max_tokens_per_minute = 1
[door]
max_body_bytes = 4096
"""


@pytest.fixture(scope="module")
def strict(mocks: list[MockBackend]) -> Iterator[FrontDoor]:
    """A door with keys, limits, and short bodies."""
    with front_door(mocks, config=CONFIG) as running:
        yield running


def told(answer: Answer) -> tuple[str, str]:
    """Return the type and the message of an error, from whichever shape it has."""
    body = answer.json
    assert set(body["error"]) == ({"type", "message"} if body.get("type") == "error" else {*OPENAI})
    return body["error"]["type"], body["error"]["message"]


OPENAI = ("message", "type", "param", "code")
REFUSED = {
    401: ("authentication_error", "sk-exp-wrong", chat()),
    404: ("not_found_error", KEY, chat(model="unknown")),
    413: ("request_too_large", KEY, chat("x" * 5000)),
    429: ("rate_limit_error", POOR, chat()),
    400: ("invalid_request_error", KEY, b"{"),
}


@pytest.mark.parametrize("status", REFUSED)
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES, COUNT])
def test_what_the_door_refuses(strict: FrontDoor, path: str, status: int) -> None:
    kind, key, body = REFUSED[status]

    async def story() -> None:
        answer = await ask(strict.port, body, path, {"authorization": f"Bearer {key}"})
        assert answer.status == status
        assert ("type" in answer.json) == path.startswith(MESSAGES)
        if path.startswith(MESSAGES):
            assert told(answer)[0] == kind
        else:
            told(answer)

    run(story())


@pytest.mark.parametrize(("path", "is_anthropic"), [(MESSAGES + "/nowhere", True), ("/v1/nowhere", False)])
def test_what_nobody_answers(strict: FrontDoor, path: str, is_anthropic: bool) -> None:
    async def story() -> None:
        answer = await ask(strict.port, chat(), path, {"x-api-key": KEY})
        assert answer.status == 404
        assert (answer.json.get("type") == "error") is is_anthropic
        told(answer)

    run(story())


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_head_that_is_too_large(strict: FrontDoor, path: str) -> None:
    async def story() -> None:
        connection = await Connection.open(strict.port)
        answer = await connection.ask("POST", path, b"{}", {"x-pad": "a" * 200_000})
        connection.leave()
        assert answer.status == 431
        assert (answer.json.get("type") == "error") is (path == MESSAGES)
        told(answer)

    run(story())


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_a_backend_that_fails_before_its_answer(door: FrontDoor, mocks: list[MockBackend], path: str) -> None:
    async def story() -> None:
        all_do(mocks, reset="before_head")
        answer = await ask(door.port, chat(), path)
        assert answer.status in (502, 503)
        assert (answer.json.get("type") == "error") is (path == MESSAGES)
        assert told(answer)[1]

    run(story())


def last_event(answer: Answer) -> tuple[str, Any]:
    """Return the name and the data of the last server-sent event; "" if it has no name."""
    *_, last = answer.body.decode().rstrip("\n").split("\n\n")
    fields = dict(line.split(": ", 1) for line in last.split("\n"))
    return fields.get("event", ""), json.loads(fields["data"])


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_a_stream_that_breaks(door: FrontDoor, mocks: list[MockBackend], path: str) -> None:
    async def story() -> None:
        all_do(mocks, reset="mid_stream", num_chunks=6)
        answer = await ask(door.port, chat(stream=True), path)
        assert answer.status == 200
        assert not answer.is_whole
        name, data = last_event(answer)
        if path == CHAT:
            assert not name
            assert set(data["error"]) == {*OPENAI}
        elif path == MESSAGES:
            assert (name, data["type"], data["error"]["type"]) == ("error", "error", "api_error")
            assert data["error"]["message"]
        else:
            assert (name, data["type"], data["code"], data["param"]) == ("error", "error", "backend_error", None)
            assert data["message"]
            assert data["sequence_number"] >= 3  # behind the three events before it

    run(story())


CLOSED = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0}\n\n'
STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
TEXT = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","sequence_number":1}\n\n'
DONE = (
    b'event: response.completed\ndata: {"type":"response.completed","response":{"output":"%b",'
    b'"usage":{"input_tokens":3,"output_tokens":4}}}\n\n' % (b"x" * 9000)
)
CHUNK = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'


@pytest.mark.parametrize(
    ("path", "part", "end"),
    [(MESSAGES, DELTA, STOP), (RESPONSES, TEXT, DONE), (CHAT, CHUNK, b"data: [DONE]\n\n")],
    ids=["messages", "responses", "chat"],
)
def test_a_stream_whose_end_is_that_of_its_connection(
    door: FrontDoor, mocks: list[MockBackend], path: str, part: bytes, end: bytes
) -> None:
    """Only its last event tells whether it is whole, and each API has another."""

    async def story() -> None:
        all_do(mocks, raw=CLOSED + part + end)
        answer = await ask(door.port, chat(stream=True), path)
        assert answer.is_good
        assert answer.body == part + end
        all_do(mocks, raw=CLOSED + part)
        answer = await ask(door.port, chat(stream=True), path)
        assert not answer.is_whole
        assert b"error" in answer.body

    run(story())
