"""OpenAI's own client, unchanged."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from live_server import LiveServer


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0) as made:
        yield made


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "say this"}], max_completion_tokens=20, n=2, logprobs=True
    )
    assert [choice.message.content for choice in answer.choices] == ["say this"] * 2
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is not None
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 18
    assert answer.usage.prompt_tokens_details is not None


def test_chat_stream(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "stream 🍕"}],
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "stream 🍕"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == 11
    assert chunks[-1].choices == []


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt=["one", "two"], stop="e", seed=1, logit_bias={"5": 1})
    assert [choice.text for choice in answer.choices] == ["on", "two"]
    parts = client.completions.create(model="fake", prompt=[104, 105], stream=True)
    assert "".join(part.choices[0].text for part in parts) == "hi"


def test_models_and_errors(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake", "also-fake"]
    assert client.models.retrieve("also-fake").id == "also-fake"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("a/b")
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="none", prompt="x")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="fake", prompt="x", temperature=9)
    assert caught.value.param == "temperature"
