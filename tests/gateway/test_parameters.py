"""Parameters of completions that are honoured in ways worth a test; what is not honoured is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from live_server import LiveServer

from expediter.core.plan import TokenLogprobs
from expediter.gateway.api.completions import CompletionFormat
from expediter.gateway.generation import Delta

CHAT = "/v1/chat/completions"


def test_echo_without_output(server: LiveServer) -> None:
    before = server.metric("vllm:generation_tokens_total")
    reply = server.complete([[97, 98], [99, 100]], max_tokens=0, echo=True, n=2)
    assert [(c["index"], c["text"], c["finish_reason"]) for c in reply.json["choices"]] == [
        *[(0, "ab", "length"), (1, "ab", "length"), (2, "cd", "length"), (3, "cd", "length")],
    ]
    assert reply.json["usage"]["prompt_tokens"] == 4
    assert reply.json["usage"]["completion_tokens"] == 0
    events = server.complete("ab", max_tokens=0, echo=True, stream=True, stream_options={"include_usage": True}).events
    assert [event["choices"] for event in events[:-1]][-1] == []
    assert "".join(c["text"] for event in events[:-1] for c in event["choices"]) == "ab"
    assert [c["finish_reason"] for event in events[:-1] for c in event["choices"]][-1] == "length"
    assert events[-1] == "[DONE]"
    assert server.complete([5] * 1024, max_tokens=0, echo=True).status == 200, (
        "as long as the context, as 1 token is not"
    )
    for prompt in ([5] * 1025, [], ""):
        refused = server.complete(prompt, max_tokens=0, echo=True)
        assert (refused.status, refused.json["error"]["param"]) == (400, "prompt")
    assert server.metric("vllm:generation_tokens_total") == before, "no replica saw any of this"


def test_best_of_shows_the_likeliest() -> None:
    class Letters:
        def token_text(self, token: int) -> str:
            return chr(token)

        def token_bytes(self, token: int) -> bytes:
            return bytes([token])

    def delta(index: int, text: str, *logprobs: float) -> Delta:
        told = [TokenLogprobs(value, 1, ()) for value in logprobs]
        return Delta(index, text, list(text.encode()), told, finish_reason="stop")

    form = CompletionFormat(Letters(), [">", ">", "", ""], 0, num_shown=2, num_per_prompt=3)
    candidates = [delta(0, "aa", -3, -3), delta(1, "bbb", -2, -2, -2), delta(2, "c", -2.5)]
    others = [delta(3, "", *()), delta(4, "d", -9), delta(5, "e", float("-inf"))]
    shown = form.full([*candidates, *others])
    assert [(choice["index"], choice["text"]) for choice in shown] == [(0, ">bbb"), (1, ">c"), (2, "d"), (3, "e")]
    assert shown[0]["logprobs"]["token_logprobs"] == [-2, -2, -2]
    assert shown[3]["logprobs"]["token_logprobs"] == [-9999.0]


def test_best_of(server: LiveServer) -> None:
    reply = server.complete("ab", best_of=4, n=2)
    assert [choice["text"] for choice in reply.json["choices"]] == ["ab", "ab"]
    assert reply.json["choices"][0]["logprobs"] is None
    assert reply.json["usage"]["completion_tokens"] == 12, "all candidates count"
    assert server.complete("ab", best_of=1, stream=True).status == 200
    for fields in ({"best_of": 1, "n": 2}, {"best_of": 2, "stream": True}):
        refused = server.complete("ab", **fields)
        assert (refused.status, refused.json["error"]["param"]) == (400, "best_of")


def test_stop_strings_may_be_shown(server: LiveServer) -> None:
    assert server.complete("abcdef", stop="cd").json["choices"][0]["text"] == "ab"
    shown = server.complete("abcdef", stop="cd", include_stop_str_in_output=True)
    assert shown.json["choices"][0]["text"] == "abcd"


def test_special_tokens_may_be_shown(server: LiveServer) -> None:
    fields: dict[str, Any] = {"max_tokens": 3, "ignore_eos": True}
    assert server.complete([97, 256, 98], **fields).json["choices"][0]["text"] == "ab"
    shown = server.complete([97, 256, 98], **fields, skip_special_tokens=False)
    assert shown.json["choices"][0]["text"] == "a<|end|>b"


@pytest.mark.parametrize("name", ["suffx", "top_a", "bestof", "logprob", "mirostat"])
def test_what_is_not_known_is_refused_by_name(server: LiveServer, name: str) -> None:
    for reply in (
        server.complete("x", **{name: 1}),
        server.post(CHAT, {"messages": [{"role": "user", "content": "x"}], name: 1}),
    ):
        assert reply.status == 400
        assert reply.json["error"]["param"] == name
        assert name in reply.json["error"]["message"]


def test_what_says_who_the_client_is_changes_nothing(server: LiveServer) -> None:
    fields = {"user": "u", "metadata": {"a": 1}, "safety_identifier": "s", "service_tier": "auto", "store": False}
    assert server.complete("ab", **fields).json["choices"][0]["text"] == "ab"
