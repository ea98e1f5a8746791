"""Input that cannot be served is a 400 that names the field, and the server goes on (CASES 21, 22, 43, 44)."""

from __future__ import annotations

import json

import pytest
from live_server import LiveServer, Reply

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
PATHS = (COMPLETIONS, CHAT)
INTEGERS = (
    *("max_tokens", "min_tokens", "n", "top_k", "seed", "priority", "stop_token_ids"),
    *("max_completion_tokens", "top_logprobs", "logprobs"),
)
FLOATS = (
    *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    "logit_bias",
)
BAD_NUMBERS = ("NaN", "Infinity", "-Infinity", "1e400", "-1e400", '"0.7"', "true", "[0.7]", "{}")
ONLY_CHAT = {"max_completion_tokens", "top_logprobs"}
MAY_BE_NEGATIVE = {"seed", "priority", "presence_penalty", "frequency_penalty", "logit_bias"}


def body(path: str, **fields: str) -> bytes:
    """A valid body with raw JSON values put in."""
    start = '"prompt": "hi"' if path == COMPLETIONS else '"messages": [{"role": "user", "content": "hi"}]'
    return ("{" + ", ".join([start, *(f'"{name}": {value}' for name, value in fields.items())]) + "}").encode()


def wrapped(field: str, value: str) -> str:
    if field == "logit_bias":
        return '{"3": ' + value + "}"
    return f"[{value}]" if field == "stop_token_ids" else value


def assert_refused(reply: Reply, param: str | None, status: int = 400) -> None:
    assert reply.status == status, reply.body
    error = reply.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert error["param"] == param, error


@pytest.mark.parametrize(
    ("path", "field"),
    [(path, field) for path in PATHS for field in (*INTEGERS, *FLOATS) if path == CHAT or field not in ONLY_CHAT],
)
def test_bad_numbers_are_refused_by_name(server: LiveServer, path: str, field: str) -> None:
    values = list(BAD_NUMBERS)
    if path == CHAT and field == "logprobs":
        values.remove("true")  # a flag there
    if field not in MAY_BE_NEGATIVE:
        values.append("-1" if field != "top_k" else "-2")
    if field in INTEGERS:
        values += ["1.5", "1e3", "99999999999999999999"]
    for value in values:
        reply = server.post(path, body(path, **{field: wrapped(field, value)}))
        assert_refused(reply, field)
    assert server.complete("still alive").json["choices"][0]["text"] == "still alive"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", 2.5), ("top_p", -0.1), ("top_p", 1.1), ("min_p", 1.5), ("repetition_penalty", 0)],
        *[("presence_penalty", 3), ("frequency_penalty", -3), ("logit_bias", {"3": 101})],
        *[("logit_bias", {"three": 1}), ("logit_bias", {"300": 1}), ("logit_bias", {"-1": 1})],
        *[("logit_bias", {str(i): 0 for i in range(2000)})],
        *[("n", 0), ("n", 100_000), ("stop", [""]), ("stop", ""), ("stop", ["x"] * 17), ("stop", "x" * 2000)],
        *[("stop", [1]), ("stop_token_ids", [300]), ("logprobs", 21), ("cache_salt", ""), ("cache_salt", "x" * 1000)],
        *[("stream", "yes"), ("stream", 1), ("stream_options", {"include_usage": 1}), ("ignore_eos", 1)],
        *[
            ("best_of", 0),
            ("best_of", 65),
            ("suffix", "end"),
            ("suffx", "end"),
            ("guided_json", {}),
            ("prompt_logprobs", 1),
        ],
        *[("stream_options", {"include_usage": True}), ("model", 3), ("min_tokens", 65), ("use_beam_search", True)],
        *[
            ("cache_hint", hint)
            for hint in ("pin", "", 3, {}, {"pin_s": 0}, {"pin_s": 3601}, {"pin_s": 9, "drop": True})
        ],
    ],
)
def test_values_out_of_range(server: LiveServer, field: str, value: object) -> None:
    assert_refused(server.complete("hi", **{field: value}), field)


@pytest.mark.parametrize(
    "prompt",
    [
        *["", [], [""], [[]], [["a"]], [1, "a"], [[1], "a"], 7, None, {}, [True], [1.0], [300], [-1], [2**31]],
        *[["x"] * 257, [[5, 300]], [10**30]],
    ],
)
def test_bad_prompts(server: LiveServer, prompt: object) -> None:
    assert_refused(server.complete(prompt), "prompt")


@pytest.mark.parametrize(
    "messages",
    [
        *[None, [], "hi", {}, [{}], [{"role": "user"}], [{"role": "king", "content": "hi"}]],
        *[[{"role": "user", "content": 3}], [{"role": "user", "content": [{"type": "image_url"}]}]],
        *[[{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": ["hi"]}]],
        *[[{"role": "user", "content": ""}]],
    ],
)
def test_bad_messages(server: LiveServer, messages: object) -> None:
    assert_refused(server.post(CHAT, {"messages": messages}), "messages")


@pytest.mark.parametrize("field", ["tools", "functions", "audio", "chat_template", "continue_final_message"])
def test_chat_fields_that_do_not_exist_here(server: LiveServer, field: str) -> None:
    fields = {"messages": [{"role": "user", "content": "hi"}], field: "something"}
    assert_refused(server.post(CHAT, fields), field)


@pytest.mark.parametrize("path", [*PATHS, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "raw",
    [
        *[b"", b"{", b'{"prompt": "hi', b'{"prompt": "hi"', b'{"prompt": "hi"} x', b"[]", b'"hi"', b"null", b"7"],
        *[b'{"prompt": "\\ud800"}', b'{"messages": [{"role": "user", "content": "a\\udc00"}]}'],
        *[b'\xef\xbb\xbf{"prompt": "hi"}', b'{"prompt": "\xff\xfe"}', b'{"prompt": "\xed\xa0\x80"}'],
        *[b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", b'{"unknown": ' + b"[" * 50_000],
        *[b'{"x":' * 50_000, b"\x00", json.dumps({"prompt": "hi"}).encode("utf-16")],
    ],
)
def test_malformed_bodies(server: LiveServer, path: str, raw: bytes) -> None:
    reply = server.post(path, raw)
    assert reply.status == 400, reply.body
    assert reply.json["error"]["type"] == "invalid_request_error"


def test_body_over_the_limit(server: LiveServer) -> None:
    reply = server.post(COMPLETIONS, b'{"prompt": "' + b"x" * (17 << 20) + b'"}')
    assert reply.status == 413
    assert server.complete("ok").status == 200


def test_unknown_model(server: LiveServer) -> None:
    reply = server.complete("hi", model="gpt-9")
    assert_refused(reply, "model", 404)
    assert reply.json["error"]["code"] == "model_not_found"
    assert server.complete("hi", model="also-fake").json["model"] == "also-fake"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("extra", [{}, {"stream": "true"}])
def test_zero_output_tokens(server: LiveServer, path: str, extra: dict[str, str]) -> None:
    assert_refused(server.post(path, body(path, max_tokens="0", **extra)), "max_tokens")


def test_what_can_never_fit_is_refused_with_numbers(server: LiveServer) -> None:
    """The pool has 64 blocks of 16 tokens, less than the model's 2048."""
    limit = server.get("/v1/models").json["data"][0]["max_model_len"]
    assert limit == 1024
    for prompt in ([5] * limit, [5] * (limit + 1), "x" * 5000):
        reply = server.complete(prompt, max_tokens=1)
        assert_refused(reply, "prompt")
        assert str(limit) in reply.json["error"]["message"]
    reply = server.complete([5] * 1000, max_tokens=25)
    assert_refused(reply, "max_tokens")
    assert "1025" in reply.json["error"]["message"]
    reply = server.complete([5] * 1000, max_tokens=24)
    assert reply.json["usage"]["completion_tokens"] == 24
    assert server.complete([5] * (limit - 1), max_tokens=None).json["usage"]["completion_tokens"] == 1


def test_wrong_paths_and_methods(server: LiveServer) -> None:
    for method, path, status in (
        *[("GET", "/", 404), ("GET", "/v1/completions", 405), ("POST", "/v1/models", 405), ("POST", "/v1/x", 404)],
    ):
        reply = server.request(method, path, b"{}" if method == "POST" else None)
        assert reply.status == status
        assert reply.json["error"]["message"]
