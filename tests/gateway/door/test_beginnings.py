"""What engines send in a stream before its first token is told from that token."""

from __future__ import annotations

import pytest

from expediter.gateway.door.beginnings import says_something

TRANSFORMERS_ROLE = (
    b'data: {"id":"9","choices":[{"delta":{"role":"assistant"},"index":0}],"created":1,"model":"m",'
    b'"object":"chat.completion.chunk","system_fingerprint":""}\n\n'
)
LLAMA_CPP_ROLE = (
    b'data: {"choices":[{"finish_reason":null,"index":0,"delta":{"role":"assistant","content":null}}],"created":1}\n\n'
)
VLLM_ROLE = b'data: {"id":"c","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null}]}\n\n'
TOKEN = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":"Paris"}}]}\n\n'
CREATED = b'event: response.created\ndata: {"response":{"id":"r"},"sequence_number":0,"type":"response.created"}\n\n'
IN_PROGRESS = b'event: response.in_progress\ndata: {"sequence_number":1,"type":"response.in_progress"}\n\n'
DELTA = b'event: response.output_text.delta\ndata: {"delta":"P","type":"response.output_text.delta"}\n\n'
MESSAGE_START = b'event: message_start\ndata: {"type":"message_start","message":{"id":"m","content":[]}}\n\n'


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@pytest.mark.parametrize(
    "piece",
    [
        b"",
        b":\n\n",
        b": working\n\n",
        TRANSFORMERS_ROLE,
        LLAMA_CPP_ROLE,
        VLLM_ROLE,
        CREATED + IN_PROGRESS,
        MESSAGE_START,
    ],
)
def test_what_comes_before_the_first_token_says_nothing(piece: bytes) -> None:
    assert not says_something(piece)
    assert not says_something(chunked(piece))


@pytest.mark.parametrize(
    "piece",
    [
        TOKEN,
        DELTA,
        VLLM_ROLE + TOKEN,
        b":\n\n" + TOKEN,
        b'data: {"choices":[{"delta":{},"finish_reason":"stop","index":0}]}\n\n',
        b'data: {"choices":[{"text":"a","index":0}]}\n\n',
        b'data: {"choices":[{"delta":{"role":"assistant","tool_calls":[{"index":0}]},"index":0}]}\n\n',
        b'data:{"error":{"message":"no"}}\n\n',
        b"data: [DONE]\n\n",
    ],
)
def test_whatever_else_comes_is_taken_for_it(piece: bytes) -> None:
    assert says_something(piece)
    assert says_something(chunked(piece))
