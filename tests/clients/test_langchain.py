"""LangChain's client for OpenAI: chats, streams, batches, structured output and tools."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.peers.environments import LANGCHAIN
from client_runs import run
from tests.engines.engine_door import interpreter

from expediter.engine.default_model import DEFAULT_MODEL

SESSION = Path(__file__).with_name("langchain_session.py")


@pytest.fixture
def langchain() -> Path:
    return interpreter(LANGCHAIN, "test-clients")


def test_langchain(langchain: Path, url: str) -> None:
    found = json.loads(run([langchain, SESSION, url, DEFAULT_MODEL]).splitlines()[-1])
    assert "Paris" in found["plain"]
    assert found["model"] == DEFAULT_MODEL
    assert found["usage"]["total_tokens"] == found["usage"]["input_tokens"] + found["usage"]["output_tokens"]
    assert found["stream"] == found["plain"]
    assert found["num_chunks"] > 3
    assert found["stream_usage"]["output_tokens"] > 3
    assert found["batch"] == [found["plain"]] * 2
    assert found["async"] == [found["plain"]] * 4
    assert found["async_stream"] == found["plain"]
    assert found["completion"]
    assert found["json_schema"].keys() == found["function_calling"].keys() == {"name", "country"}
    assert found["tool"] == "weather"
    assert found["after_tool"]
