"""What the gateway learns of real vLLM servers, what it hands on, and where it sends prompts that share a beginning."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import openai
import pytest
from benchmarks.peers.vllm_server import VllmServer
from tests.engines.engine_door import asked, get, post, stream_lines, text, wait_until
from vllm_door import MODEL, VllmDoor

from expediter.runtime.load_client import LoadClient, Outcome, TimedPrompt

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
CHAT = {"model": MODEL, "messages": QUESTION, "max_tokens": 12}
COMPLETION = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 24, "logprobs": 1, "return_token_ids": True}
ENDPOINTS = [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)]


def answered(servers: Sequence[VllmServer]) -> list[float]:
    return [server.metric("vllm:request_success_total") for server in servers]


def comparable(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer without what differs between any two: its id, when, and what was cached."""
    usage = {key: value for key, value in (answer.get("usage") or {}).items() if not key.endswith("_details")}
    return {key: value for key, value in answer.items() if key not in ("id", "created", "usage")} | {"usage": usage}


def streamed(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return what a stream says in all; where its chunks end is a matter of timing."""
    said = stream_lines(url, path, {"stream_options": {"include_usage": True}, **body})
    lines = [line.removeprefix("data: ") for line in said]
    assert lines.pop() == "[DONE]"
    *chunks, last = [comparable(json.loads(line)) for line in lines]
    choices = [chunk["choices"][0] for chunk in chunks]
    return {
        "text": "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices),
        "token_ids": [token for choice in choices for token in choice.get("token_ids") or ()],
        "finish_reason": choices[-1]["finish_reason"],
        "last": last,
    }


def endless(url: str, *, is_stream: bool) -> AbstractContextManager[http.client.HTTPConnection]:
    """Ask for far more tokens than anybody waits for, and leave when the block ends."""
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 3500, "ignore_eos": True, "stream": is_stream}
    return asked(url, "/v1/completions", body)


def test_it_finds_out_what_they_serve(door: VllmDoor, pair: Sequence[VllmServer]) -> None:
    (model,) = get(door.url, "/v1/models")["data"]
    assert model["id"] == MODEL
    for backend in door.backends():
        assert backend["kind"] == "vllm"
        assert backend["state"] == "up"
        assert backend["models"] == [MODEL]
        assert backend["max_model_len"] == 4096


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
def test_answers_are_those_of_vllm(door: VllmDoor, pair: Sequence[VllmServer], path: str, body: dict[str, Any]) -> None:
    greedy = {**body, "temperature": 0}
    direct = [comparable(post(server.url, path, greedy)) for server in pair]
    assert direct[0] == direct[1]
    for _ in range(3):
        assert comparable(post(door.url, path, greedy)) == direct[0]


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
def test_streams_are_those_of_vllm(door: VllmDoor, pair: Sequence[VllmServer], path: str, body: dict[str, Any]) -> None:
    greedy = {**body, "temperature": 0}
    direct = [streamed(server.url, path, greedy) for server in pair]
    assert direct[0] == direct[1]
    assert direct[0]["text"]
    for _ in range(3):
        assert streamed(door.url, path, greedy) == direct[0]


def test_openai_client(door: VllmDoor) -> None:
    with openai.OpenAI(base_url=f"{door.url}/v1", api_key="unused", max_retries=0) as client:
        started_s = time.monotonic()
        arrivals_s, parts = [], []
        for chunk in client.completions.create(
            model=MODEL, prompt="Once", max_tokens=64, temperature=0, stream=True, extra_body={"ignore_eos": True}
        ):
            arrivals_s.append(time.monotonic() - started_s)
            parts.append(chunk.choices[0].text)
        assert len(parts) > 30
        assert arrivals_s[0] < arrivals_s[-1] / 2  # token by token, not all at the end
        with pytest.raises(openai.BadRequestError, match="max"):
            client.completions.create(model=MODEL, prompt="Once", max_tokens=100_000)
        with pytest.raises(openai.NotFoundError, match=MODEL):
            client.completions.create(model="another", prompt="Once")


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_leaves_is_gone_from_vllm(door: VllmDoor, pair: Sequence[VllmServer], is_stream: bool) -> None:
    def num_running() -> float:
        return sum(server.metric("vllm:num_requests_running") for server in pair)

    with endless(door.url, is_stream=is_stream) as connection:
        wait_until(lambda: num_running() == 1, "the request runs")
        if is_stream:
            connection.getresponse().read(20)
    assert wait_until(lambda: num_running() == 0, "the request is gone") < 2
    assert sum(backend["num_in_flight"] for backend in door.backends()) == 0


def test_their_metrics_are_read(door: VllmDoor, pair: Sequence[VllmServer]) -> None:
    """Requests that did not come through the gateway are seen, and avoided."""
    busy, idle = pair[0], pair[1]
    streams = [endless(busy.url, is_stream=True) for _ in range(4)]
    for stream in streams:
        stream.__enter__().getresponse().read(20)
    try:
        wait_until(lambda: door.backends()[0]["num_running"] == 4, "the gateway sees them run")
        assert door.backends()[0]["kv_use"] > 0
        assert door.backends()[1]["num_running"] == 0
        # They count as others' once several pages agree; until then ours alternate between two that seem idle.
        num_in_a_row = 0
        for seed in range(40):
            before = answered([idle])
            door.complete(text(seed, 40))
            num_in_a_row = num_in_a_row + 1 if answered([idle]) > before else 0
            if num_in_a_row == 5:
                break
        assert num_in_a_row == 5, "it goes on sending to the busy one"
    finally:
        for stream in streams:
            stream.__exit__(None, None, None)
    wait_until(lambda: door.backends()[0]["num_running"] == 0, "the gateway sees them gone")


def shared_prefix_load(url: str, seed: int) -> list[Outcome]:
    """Five times six prompts at once, each with a prefix of its own; the same prefixes every time, in another order."""
    prefixes = [text(seed + place, 256) for place in range(6)]
    outcomes: list[Outcome] = []
    for turn in range(5):
        order = random.Random(seed + turn).sample(prefixes, 6)
        prompts = [
            TimedPrompt(arrival_s=0.05 * place, prompt=f"{prefix} {text(turn, 12)}", max_tokens=4)
            for place, prefix in enumerate(order)
        ]
        outcomes += asyncio.run(LoadClient(url).replay(MODEL, prompts, lambda _: None))
    return outcomes


def hit_rate(outcomes: Sequence[Outcome]) -> float:
    assert [outcome.error for outcome in outcomes] == [None] * len(outcomes)
    return sum(o.num_cached_tokens for o in outcomes) / sum(o.num_prompt_tokens for o in outcomes)


def test_a_shared_prefix_goes_where_it_is_cached(
    door: VllmDoor, start_door: Callable[..., VllmDoor], pair: Sequence[VllmServer]
) -> None:
    best = 0.8 * 256 / 268  # each prefix is computed once
    before = answered(pair)
    routed = hit_rate(shared_prefix_load(door.url, seed=100))
    shares = [(now - then) / 30 for now, then in zip(answered(pair), before, strict=True)]
    in_turn = hit_rate(shared_prefix_load(start_door("--routing", "round_robin").url, seed=200))
    assert routed > 0.9 * best
    assert in_turn < routed - 0.1
    assert max(shares) < 0.85  # both are of use: six cold prompts at once are more than one server's share


def test_kv_events_tell_what_vllm_dropped(start_door: Callable[..., VllmDoor], pair: Sequence[VllmServer]) -> None:
    door = start_door(kv_events=True)
    for seed in range(4):
        door.complete(text(300 + seed, 320))
    # What is cached really, in vLLM's tokens, and what each is taken to hold, in the gateway's.
    wait_until(lambda: sum(b["num_cache_tokens"] or 0 for b in door.backends()) >= 4 * 320, "vllm's blocks are counted")
    assert sum(backend["num_known_tokens"] for backend in door.backends()) > 0
    for server in pair:
        server.reset_prefix_cache()
        # Events go out with a step.
        post(server.url, "/v1/completions", {"model": MODEL, "prompt": "x", "max_tokens": 1})
    wait_until(lambda: sum(backend["num_known_tokens"] for backend in door.backends()) == 0, "all of it is forgotten")


def test_kv_events_tell_what_others_made_vllm_cache(
    start_door: Callable[..., VllmDoor], pair: Sequence[VllmServer]
) -> None:
    """With a tokenizer, prompts that never came through the gateway count too, chats by the model's template."""
    door = start_door(kv_events=True, tokenizer=True)

    def bodies(seed: int) -> list[tuple[str, dict[str, Any]]]:
        prompt = text(seed, 320)
        chat = [{"role": "user", "content": text(seed + 50, 320)}]
        return [
            ("/v1/completions", {"model": MODEL, "prompt": prompt, "max_tokens": 2}),
            ("/v1/chat/completions", {"model": MODEL, "messages": chat, "max_tokens": 2}),
        ]

    for place, server in enumerate(pair):
        for path, body in bodies(400 + place):
            post(server.url, path, body)
    wait_until(lambda: min(b["num_known_tokens"] for b in door.backends()) >= 600, "what was cached is known")
    for place, server in enumerate(pair):
        for path, body in bodies(400 + place):
            before = server.metric("vllm:prefix_cache_hits_total")
            post(door.url, path, body)
            assert server.metric("vllm:prefix_cache_hits_total") - before >= 288, f"{path} went elsewhere"
