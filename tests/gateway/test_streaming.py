"""What comes out, streamed and not (CASES 45, 46, 47). The model repeats its prompt, so the prompt is the output."""

from __future__ import annotations

from typing import Any

import pytest
from live_server import LiveServer

CHAT = "/v1/chat/completions"
SAMPLES = (
    *(
        "plain text",
        "naïve café",
        "日本語のテキスト",
        "🍕👩‍👩‍👧‍👦🏳️‍🌈",
        "a\u0301 \U0001f1e9\U0001f1ea",
        "tab\tnew\nline\r\n",
        "\u2028x",
    ),
)


def streamed(server: LiveServer, prompt: Any, **fields: Any) -> tuple[dict[int, str], dict[int, str], list[Any]]:
    """Texts and finish reasons by choice, and all events."""
    events = server.complete(prompt, stream=True, **fields).events
    assert events.pop() == "[DONE]"
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            assert choice["index"] not in reasons, "nothing may follow a finish reason"
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
            if choice["finish_reason"]:
                reasons[choice["index"]] = choice["finish_reason"]
    return texts, reasons, events


@pytest.mark.parametrize("text", SAMPLES)
def test_characters_arrive_whole(server: LiveServer, text: str) -> None:
    texts, reasons, events = streamed(server, text)
    assert texts == {0: text}
    assert reasons == {0: "stop"}
    assert not any("\ufffd" in choice["text"] for event in events for choice in event["choices"])
    assert server.complete(text).json["choices"][0]["text"] == text


def test_a_character_cut_off_by_length_is_left_out(server: LiveServer) -> None:
    for num_tokens in range(1, 9):
        want = "🍕🍕".encode()[:num_tokens].decode(errors="ignore")
        texts, reasons, _ = streamed(server, "🍕🍕", max_tokens=num_tokens)
        assert texts == {0: want}
        assert reasons == {0: "length" if num_tokens <= 8 else "stop"}
        assert server.complete("🍕🍕", max_tokens=num_tokens).json["choices"][0]["text"] == want


def test_truly_invalid_bytes_become_replacement_characters(server: LiveServer) -> None:
    prompt = [0x61, 0xFF, 0x62]
    texts, _, _ = streamed(server, prompt)
    assert texts == {0: "a\ufffdb"}
    assert server.complete(prompt).json["choices"][0]["text"] == "a\ufffdb"


@pytest.mark.parametrize(
    ("text", "stop", "want", "reason"),
    [
        ("one two three", "two", "one ", "stop"),
        ("one two three", ["thr", "two"], "one ", "stop"),
        ("abcabd", ["abd"], "abc", "stop"),
        ("aaab", ["aab"], "a", "stop"),
        ("xaby", ["ab", "abc"], "x", "stop"),
        ("xabcy", ["bc", "abcd"], "xa", "stop"),
        ("ends with a false pre", ["prefix"], "ends with a false pre", "stop"),
        ("no stop", ["zzz"], "no stop", "stop"),
        ("stop", "stop", "", "stop"),
        ("eat 🍕 now", "🍕", "eat ", "stop"),
        ("eat 🍕 now", ["\U0001f355 n"], "eat ", "stop"),
        ("日本語", "本", "日", "stop"),
        ("a<|im_end|>b", "<|im_end|>", "a", "stop"),
    ],
)
def test_stop_strings(server: LiveServer, text: str, stop: str | list[str], want: str, reason: str) -> None:
    texts, reasons, _ = streamed(server, text, stop=stop)
    assert texts == {0: want}
    assert reasons == {0: reason}
    whole = server.complete(text, stop=stop).json
    assert whole["choices"][0]["text"] == want
    assert whole["choices"][0]["finish_reason"] == reason


def test_stop_strings_over_slow_steps(slow_stop_server: LiveServer) -> None:
    """Each token comes in a chunk of its own, so every stop string spans several."""
    texts, reasons, events = streamed(slow_stop_server, "one two thx three", stop=["three", "thy"])
    assert texts == {0: "one two thx "}
    assert reasons == {0: "stop"}
    assert len(events) > 5
    texts, reasons, _ = streamed(slow_stop_server, "false pre", stop=["prefix"], max_tokens=9)
    assert (texts, reasons) == ({0: "false pre"}, {0: "length"})
    _, _, events = streamed(slow_stop_server, "tick", stream_options={"continuous_usage_stats": True})
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 5
    assert len(counts) > 2
    assert all(event["choices"] for event in events), "include_usage is off: no chunk without choices"


def test_stop_tokens_and_min_tokens(server: LiveServer) -> None:
    reply = server.complete("one two", stop_token_ids=[ord("t")]).json
    assert reply["choices"][0] == {"index": 0, "text": "one ", "logprobs": None, "finish_reason": "stop"}
    assert reply["usage"]["completion_tokens"] == 5
    assert server.complete("aXbXc", stop="X", min_tokens=3).json["choices"][0]["text"] == "aXb"
    assert server.complete("ab", min_tokens=6, max_tokens=8).json["usage"]["completion_tokens"] == 6
    ignoring = server.complete("ab", ignore_eos=True, max_tokens=8).json
    assert ignoring["choices"][0]["text"] == "ab"
    assert ignoring["choices"][0]["finish_reason"] == "length"
    assert ignoring["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
def test_usage_chunk(server: LiveServer, n: int, path: str) -> None:
    fields = {"prompt": "usage"} if path != CHAT else {"messages": [{"role": "user", "content": "usage"}]}
    for options, num_usage_chunks in (
        *[(None, 0), ({}, 0), ({"include_usage": False}, 0), ({"include_usage": True}, 1)],
        ({"include_usage": True, "continuous_usage_stats": True}, 1),
    ):
        events = server.post(path, {**fields, "n": n, "stream": True, "stream_options": options}).events
        assert events.pop() == "[DONE]"
        without_choices = [event for event in events if not event["choices"]]
        assert len(without_choices) == num_usage_chunks
        if num_usage_chunks:
            assert events[-1] is without_choices[0]
            assert events[-1]["usage"]["prompt_tokens"] == 5
            assert events[-1]["usage"]["completion_tokens"] == 6 * n
            assert events[-1]["usage"]["total_tokens"] == 5 + 6 * n
        if options == {"include_usage": True}:
            assert all(event["usage"] is None for event in events[:-1])
        if options in (None, {}):
            assert not any("usage" in event for event in events)
        assert len({event["id"] for event in events}) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_choices_of_one_prompt_are_computed_once(server: LiveServer, stream: bool) -> None:
    before = server.get("/steps").json["steps"]
    prompt = f"all three begin with this and {'stream' if stream else 'wait'}"
    if stream:
        texts, reasons, _ = streamed(server, prompt, n=3, max_tokens=9)
    else:
        answer = server.complete(prompt, n=3, max_tokens=9).json
        texts = {choice["index"]: choice["text"] for choice in answer["choices"]}
        reasons = {choice["index"]: choice["finish_reason"] for choice in answer["choices"]}
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        assert answer["usage"]["completion_tokens"] == 27
    assert texts == dict.fromkeys(range(3), prompt[:9])
    assert reasons == dict.fromkeys(range(3), "length")
    steps = server.get("/steps").json["steps"][len(before) :]
    assert sum(step["num_tokens"] - step["num_decodes"] for step in steps) <= len(prompt)
    assert max(step["num_decodes"] for step in steps) == 3


def test_cached_tokens_count_once_per_prompt(slow_stop_server: LiveServer) -> None:
    prompt = "forty characters that nobody sent before"
    used = [slow_stop_server.complete(prompt, n=3, max_tokens=2).json["usage"] for _ in range(2)]
    assert [usage["prompt_tokens"] for usage in used] == [40, 40]
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in used] == [0, 32]


def test_more_choices_than_can_start_together(server: LiveServer) -> None:
    answer = server.complete("x" * 40, n=64)
    assert answer.status == 400
    assert "64 sequences of one request need 66 blocks" in answer.json["error"]["message"]


def test_usage_after_a_stop_string(slow_stop_server: LiveServer) -> None:
    """The choices are aborted when the string is found; usage counts what was generated until then."""
    _, reasons, events = streamed(
        slow_stop_server, "one two three", n=2, stop="two", stream_options={"include_usage": True}
    )
    assert reasons == {0: "stop", 1: "stop"}
    assert [event["choices"] == [] for event in events] == [False] * (len(events) - 1) + [True]
    assert 14 <= events[-1]["usage"]["completion_tokens"] <= 16
    assert slow_stop_server.metric("vllm:request_success_total", finished_reason="abort") == 0


def test_chat_stream_shape(server: LiveServer) -> None:
    messages = [
        {"role": "developer", "content": "be brief; "},
        {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "text", "text": " there"}]},
    ]
    events = server.post(CHAT, {"messages": messages, "stream": True}).events
    assert events.pop() == "[DONE]"
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == "be brief; hi there"
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    whole = server.post(CHAT, {"messages": messages}).json
    assert whole["object"] == "chat.completion"
    assert whole["choices"][0]["message"]["content"] == "be brief; hi there"
    for name in ("max_tokens", "max_completion_tokens"):
        assert server.post(CHAT, {"messages": messages, name: 2}).json["choices"][0]["message"]["content"] == "be"


def test_several_prompts_and_choices(server: LiveServer) -> None:
    want = dict(enumerate(["a", "a", "bb", "bb"]))
    texts, reasons, events = streamed(server, ["a", "bb"], n=2, stream_options={"include_usage": True})
    assert texts == want
    assert set(reasons) == {0, 1, 2, 3}
    assert events[-1]["usage"]["prompt_tokens"] == 3
    whole = server.complete([[97], [98, 98]], n=2).json
    assert {choice["index"]: choice["text"] for choice in whole["choices"]} == want
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]


def test_echo(server: LiveServer) -> None:
    assert server.complete("ab", echo=True).json["choices"][0]["text"] == "abab"
    assert server.complete([97, 98], echo=True, n=2).json["choices"][1]["text"] == "abab"
    texts, _, _ = streamed(server, ["ab", "c"], echo=True)
    assert texts == {0: "abab", 1: "cc"}
    assert server.complete("ab", echo=True, logprobs=1).json["error"]["param"] == "echo"


def test_logprobs_stay_finite_and_match_the_text(server: LiveServer) -> None:
    reply = server.complete("abc", logprobs=2)
    assert b"nfinity" not in reply.body
    logprobs = reply.json["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "c"]
    assert logprobs["text_offset"] == [0, 1, 2]
    assert logprobs["token_logprobs"] == [-0.5] * 3
    assert all(value == -9999.0 for top in logprobs["top_logprobs"] for text, value in top.items() if text == "\x00")
    fields = {"messages": [{"role": "user", "content": "é"}], "logprobs": True, "top_logprobs": 1}
    content = server.post(CHAT, fields).json["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "é"
    events = server.post(CHAT, {**fields, "stream": True}).events[:-1]
    streamed_content = [x for e in events for x in ((e["choices"][0]["logprobs"] or {}).get("content") or [])]
    assert streamed_content == content


def test_cached_tokens_are_reported(server: LiveServer) -> None:
    fields = {"cache_salt": "cached", "max_tokens": 1}
    prompt = list(range(100, 150))
    counts = [
        server.complete(prompt, **fields).json["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(4)
    ]
    assert counts[0] == 0
    assert counts[-1] == 48  # both replicas have seen it by then
    other = server.complete(prompt, cache_salt="other", max_tokens=1).json
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_tokenize_and_back(server: LiveServer) -> None:
    reply = server.post("/tokenize", {"prompt": "é!", "return_token_strs": True}).json
    assert reply == {
        "count": 3,
        "max_model_len": 1024,
        "tokens": [0xC3, 0xA9, 33],
        "token_strs": ["\ufffd", "\ufffd", "!"],
    }
    assert server.post("/detokenize", {"tokens": reply["tokens"]}).json == {"prompt": "é!"}
    assert server.post("/detokenize", {"tokens": [300]}).json["error"]["param"] == "tokens"
    chat = server.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json
    assert (chat["count"], chat["token_strs"]) == (2, None)
    assert server.post("/tokenize", {}).status == 400
    assert server.post("/tokenize", {"prompt": "x" * 100_000}).json["count"] == 100_000


def test_request_id_is_echoed(server: LiveServer) -> None:
    reply = server.post("/v1/completions", {"prompt": "x"}, headers={"X-Request-Id": "mine-1"})
    assert reply.headers["x-request-id"] == "mine-1"
    assert "mine-1" not in reply.json["id"]
