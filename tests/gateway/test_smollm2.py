"""`expediter serve` with the real default model, end to end."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import openai
import pytest
from live_server import LiveServer, start_process

from expediter.core.errors import ConfigurationError
from expediter.engine.default_model import DEFAULT_MODEL, resolve_model

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
FLAGS = ("--port", "0", "--num-gpu-blocks-override", "128", "--max-num-batched-tokens", "256")


@pytest.fixture(scope="module")
def smollm2() -> Iterator[LiveServer]:
    try:
        resolve_model()
    except ConfigurationError as error:
        pytest.skip(f"the default model is not to be had here: {error}")
    with start_process(sys.executable, "-m", "expediter.cli.main", "serve", *FLAGS) as live:
        yield live
        assert live.stop() == 0


@pytest.fixture
def client(smollm2: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=smollm2.url + "/v1", api_key="unused", max_retries=0, timeout=120) as made:
        yield made


def test_chat_knows_the_capital_of_france(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=DEFAULT_MODEL, messages=QUESTION, temperature=0, max_tokens=24)
    text = answer.choices[0].message.content or ""
    assert "Paris" in text
    assert answer.choices[0].finish_reason == "stop"
    streamed = client.chat.completions.create(
        model=DEFAULT_MODEL, messages=QUESTION, temperature=0, max_tokens=24, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == text


def test_seeds_decide_whatever_else_runs(client: openai.OpenAI) -> None:
    """Alone, then with three others around and a cached prefix: the same text for the same seed."""

    def ask(n: int, seed: int) -> list[str]:
        answer = client.completions.create(
            model=DEFAULT_MODEL, prompt="Once upon a time", max_tokens=12, temperature=0.9, n=n, seed=seed
        )
        return [choice.text for choice in answer.choices]

    alone = ask(1, 7)
    among = ask(4, 5)
    assert among[2] == alone[0]
    assert len(set(among)) > 1


def test_limits_follow_the_pool(smollm2: LiveServer) -> None:
    model = smollm2.get("/v1/models").json["data"][0]
    assert (model["id"], model["max_model_len"]) == (DEFAULT_MODEL, 128 * 16)
    assert smollm2.complete("x", max_tokens=5000).json["error"]["param"] == "max_tokens"
    assert smollm2.complete([49152]).json["error"]["param"] == "prompt"
    text = "Zürich 日本 🍕"
    tokens = smollm2.post("/tokenize", {"prompt": text}).json["tokens"]
    assert smollm2.post("/detokenize", {"tokens": tokens}).json == {"prompt": text}


def test_steps_are_logged_for_fitting(smollm2: LiveServer, client: openai.OpenAI) -> None:
    client.completions.create(model=DEFAULT_MODEL, prompt="The sky is", max_tokens=3)
    steps = smollm2.get("/steps").json["steps"]
    assert all(step["elapsed_s"] > 0 and step["num_tokens"] >= 1 for step in steps)
    assert [step["sequence"] for step in steps] == list(range(len(steps)))
    assert smollm2.get(f"/steps?since={len(steps) - 1}").json["steps"] == steps[-1:]
    assert smollm2.get("/steps?since=x").status == 400
