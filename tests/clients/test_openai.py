"""OpenAI's own client on a real model: sync, async, streams, errors, and what its retries make of a full server."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import openai
import pytest

from expediter.assembly.server_process import free_port, running_server
from expediter.engine.default_model import DEFAULT_MODEL

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def ask(client: openai.OpenAI) -> str | None:
    answer = client.chat.completions.create(model=DEFAULT_MODEL, messages=QUESTION, max_tokens=12, temperature=0)
    return answer.choices[0].message.content


def test_chat_is_the_same_streamed(client: openai.OpenAI) -> None:
    text = ask(client)
    assert text is not None
    assert "Paris" in text
    chunks = list(
        client.chat.completions.create(
            model=DEFAULT_MODEL,
            messages=QUESTION,
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 3


def test_the_helper_for_streams(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=DEFAULT_MODEL, messages=QUESTION, max_tokens=12, temperature=0) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert kinds.count("content.delta") > 3
    assert "Paris" in (final.choices[0].message.content or "")


def test_leaving_a_stream_frees_the_client(client: openai.OpenAI) -> None:
    with client.completions.create(
        model=DEFAULT_MODEL, prompt="Once", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
    assert ask(client)


def test_asynchronous(url: str) -> None:
    async def many() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
            answers = await asyncio.gather(
                *(
                    client.chat.completions.create(model=DEFAULT_MODEL, messages=QUESTION, max_tokens=12, temperature=0)
                    for _ in range(6)
                )
            )
            stream = await client.chat.completions.create(
                model=DEFAULT_MODEL, messages=QUESTION, max_tokens=12, temperature=0, stream=True
            )
            streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
        return [*(answer.choices[0].message.content for answer in answers), streamed]

    texts = asyncio.run(many())
    assert len(texts) == 7
    assert len(set(texts)) == 1
    assert "Paris" in (texts[0] or "")


def test_models_and_errors(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [DEFAULT_MODEL]
    with pytest.raises(openai.NotFoundError, match=DEFAULT_MODEL):  # the message lists what there is
        client.completions.create(model="none", prompt="x")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=DEFAULT_MODEL, prompt="x", temperature=9)
    assert caught.value.param == "temperature"
    raw = client.chat.completions.with_raw_response.create(model=DEFAULT_MODEL, messages=QUESTION, max_tokens=1)
    assert raw.request_id


def use_up(client: openai.OpenAI) -> None:
    for _ in range(40):
        client.completions.create(model=DEFAULT_MODEL, prompt="x", max_tokens=1)


def test_retries_wait_for_a_limit_as_long_as_they_are_told(own: str, tmp_path: Path) -> None:
    path = tmp_path / "limits.toml"
    path.write_text("[anonymous]\nmax_requests_per_minute = 30\n")  # 30 at once, then one every two seconds
    with running_server(["--backend", own, "--config", str(path)]) as url:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
            with pytest.raises(openai.RateLimitError) as caught:
                use_up(client)
            wait_s = float(caught.value.response.headers["retry-after"])
            assert 0 < wait_s <= 2
            started_s = time.monotonic()
            client.with_options(max_retries=1).completions.create(model=DEFAULT_MODEL, prompt="x", max_tokens=1)
        assert time.monotonic() - started_s > wait_s / 2


def test_retries_outlive_a_moment_without_backends(own: str) -> None:
    port = free_port()
    with ExitStack() as stack:
        with running_server(["--backend", own], port):
            url = stack.enter_context(running_server(["--backend", f"http://127.0.0.1:{port}"]))
        client = stack.enter_context(openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0))
        with pytest.raises(openai.InternalServerError) as caught:
            ask(client)
        assert caught.value.status_code == 503
        assert 0 < float(caught.value.response.headers["retry-after"]) <= 10
        answers: list[str | None] = []
        asking = threading.Thread(target=lambda: answers.append(ask(client.with_options(max_retries=60))))
        asking.start()
        stack.enter_context(running_server(["--backend", own], port))
        asking.join(60)
        assert answers
        assert "Paris" in (answers[0] or "")
