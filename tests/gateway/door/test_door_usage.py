"""What engines say of tokens at the end of their answers, in their own words, is read; anything else is nothing."""

from __future__ import annotations

import pytest

from expediter.gateway.backends.backend import Usage
from expediter.gateway.door.usage import Answered, usage_of

LLAMA_CPP_CHAT = (
    b'"object":"chat.completion","usage":{"completion_tokens":22,"prompt_tokens":34,"total_tokens":56,'
    b'"prompt_tokens_details":{"cached_tokens":24}},"id":"chatcmpl-9A","timings":{"cache_n":24,"prompt_n":10}}'
)
LLAMA_CPP_MESSAGE = (
    b'{"content":[{"type":"text","text":"Hello!"}],"stop_reason":"max_tokens","stop_sequence":null,'
    b'"usage":{"cache_read_input_tokens":24,"input_tokens":7,"output_tokens":8}}'
)
LLAMA_CPP_RESPONSE = (
    b'"status":"completed","usage":{"input_tokens":31,"output_tokens":8,"total_tokens":39,'
    b'"input_tokens_details":{"cached_tokens":30}}}'
)
VLLM_STREAM = (
    b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":9,"total_tokens":21,"completion_tokens":12,'
    b'"prompt_tokens_details":null}}\n\ndata: [DONE]\n\n'
)
NEW_CACHE = b'"usage":{"input_tokens":1,"cache_read_input_tokens":0,"cache_creation_input_tokens":9,"output_tokens":2}}'


@pytest.mark.parametrize(
    ("tail", "usage"),
    [
        (LLAMA_CPP_CHAT, Usage(34, 22, 24)),
        (LLAMA_CPP_MESSAGE, Usage(31, 8, 24)),
        (LLAMA_CPP_RESPONSE, Usage(31, 8, 30)),
        (VLLM_STREAM, Usage(9, 12, None)),
        (NEW_CACHE, Usage(10, 2, 0)),
        (b'{"usage":{"prompt_tokens":3,"completion_tokens":1}}{"usage":null}', Usage(3, 1, None)),
        (b'{"usage":{"prompt_tokens":3,"completion_tokens":-1}}', Usage(3, 0, None)),
    ],
)
def test_usage_is_read_in_every_format(tail: bytes, usage: Usage) -> None:
    assert usage_of(tail) == usage


@pytest.mark.parametrize(
    "tail", [b"", b'{"usage":', b'{"usage":{"prompt_tokens":"3"}}', b'{"usage":{}}', b'"usage":null']
)
def test_what_says_nothing_is_no_usage(tail: bytes) -> None:
    assert usage_of(tail) is None


@pytest.mark.parametrize(
    ("answered", "is_stream", "num_tokens"),
    [
        (Answered(200, Usage(3, 5, None), 9999, 77), True, 5),
        (Answered(200, None, 9999, 77), True, 77),
        (Answered(200, None, 720, 0), False, 100),
        (Answered(200, None, 10, 0), False, 1),
        (Answered(404, None, 720, 0), False, 0),
    ],
)
def test_tokens_are_counted_by_size_where_nothing_is_said(answered: Answered, is_stream: bool, num_tokens: int) -> None:
    assert answered.num_output_tokens(is_stream=is_stream) == num_tokens
