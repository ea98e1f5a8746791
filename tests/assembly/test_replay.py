"""Replaying a trace: texts with its prefixes, a client that counts failures, a rate that fits, clear refusals."""

import asyncio
import socket

import numpy as np
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from expediter.assembly.replay import Replay, ReplayConfig
from expediter.assembly.traces import load_trace
from expediter.cli.main import main
from expediter.core.errors import ConfigurationError, ReplicaError
from expediter.core.slo import Slo
from expediter.runtime.load_client import LoadClient, TimedPrompt
from expediter.sim.prompt_text import prompt_text, trace_texts


def num_tokens(text):
    """Words and full stops: one token each for most tokenizers."""
    return len(text.split()) + text.count(".")


IDS = st.lists(st.integers(0, 3), max_size=6)


@given(IDS, IDS, st.integers(2, 9))
def test_texts_share_exactly_the_prefixes_that_ids_share(first, second, words_per_id):
    pairs = zip(first, second, strict=False)
    common = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
    texts = [
        prompt_text(number, words_per_id * len(ids) + 3, ids, words_per_id)
        for number, ids in enumerate((first, second))
    ]
    sentences = [text.split(". ") for text in texts]
    assert sentences[0][:common] == sentences[1][:common]
    assert [num_tokens(text) for text in texts] == [words_per_id * len(ids) + 3 for ids in (first, second)]
    assert prompt_text(7, 5, first, words_per_id) == prompt_text(7, 5, first, words_per_id)


def test_scaled_texts_have_about_the_scaled_lengths():
    trace = load_trace("demo")
    lengths = [num_tokens(text) for text in trace_texts(trace, 1 / 32)]
    assert np.allclose(lengths, trace.input_tokens / 32, atol=1)


def serve_and(run, *, status=200, lines=()):
    """Run `run(url)` beside a server that answers completions with these event lines."""

    async def completions(request):
        if status != 200:
            return web.Response(status=status, text="busy")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for line in lines:
            await response.write(f"data: {line}\n\n".encode())
        return response

    async def main_task():
        app = web.Application()
        app.router.add_post("/v1/completions", completions)
        runner = web.AppRunner(app)
        await runner.setup()
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            await web.SockSite(runner, sock).start()
            try:
                return await run(f"http://127.0.0.1:{sock.getsockname()[1]}")
            finally:
                await runner.cleanup()

    return asyncio.run(main_task())


def outcome_of(**server):
    async def run(url):
        prompts = [TimedPrompt(arrival_s=0.0, prompt="x", max_tokens=3)]
        return await LoadClient(url).replay("m", prompts, lambda _: None)

    (outcome,) = serve_and(run, **server)
    return outcome


CHUNK = '{"choices": [{"text": "a"}]}'
USAGE = (
    '{"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2, '
    '"prompt_tokens_details": {"cached_tokens": 4}}}'
)


def test_a_stream_is_timed_and_counted_by_the_servers_own_usage():
    outcome = outcome_of(lines=(CHUNK, CHUNK, USAGE, "[DONE]"))
    assert outcome.error is None
    assert (outcome.num_prompt_tokens, outcome.num_output_tokens, outcome.num_cached_tokens) == (5, 2, 4)
    assert outcome.sent_s <= outcome.token_times_s[0] <= outcome.end_s
    assert outcome.ttft_s is not None
    assert outcome.tpot_s == outcome.end_s - outcome.token_times_s[0]


@pytest.mark.parametrize(
    ("server", "error"),
    [
        ({"status": 503}, "503: busy"),
        ({"lines": (CHUNK, '{"error": {"message": "the replica died"}}')}, "the replica died"),
        ({"lines": (CHUNK,)}, r"ended before \[DONE\]"),
        ({"lines": ("{",)}, "malformed chunk"),
    ],
)
def test_failures_are_outcomes_not_exceptions(server, error):
    outcome = outcome_of(**server)
    with pytest.raises(AssertionError, match=error):
        raise AssertionError(outcome.error)


def test_a_server_that_is_not_there_is_named():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    config = ReplayConfig(trace=load_trace("demo"), slos=(Slo(),), rate_scale=1.0)
    with pytest.raises(ReplicaError, match=url):
        asyncio.run(Replay(config, LoadClient(url)).run())


@pytest.mark.parametrize("name", ["rate_scale", "load", "prompt_scale", "output_scale"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_must_be_numbers_above_0(name, value):
    with pytest.raises(ConfigurationError, match=name):
        ReplayConfig(trace=load_trace("demo"), slos=(Slo(),), **{name: value})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--trace", "demo", "--url", "http://127.0.0.1:1", "--replicas", "2"], "--replicas goes with --start"),
        (["--trace", "no-such-trace", "--start"], "no-such-trace"),
        (["--trace", "demo", "--start", "--slo", "soon"], "ttft=SECONDS"),
    ],
)
def test_the_command_says_what_is_wrong(words, message, capsys):
    assert main(["replay", *words]) == 2
    assert message in capsys.readouterr().err
