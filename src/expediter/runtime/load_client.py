"""Sends recorded arrivals to an OpenAI-compatible server and times what comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TypeVar

import aiohttp
import msgspec

from expediter.core.errors import ReplicaError

_Answer = TypeVar("_Answer")
JsonBody = dict[str, object]


class _TokenDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: _TokenDetails | None = None


class _Error(msgspec.Struct):
    message: str = "error"


class _Chunk(msgspec.Struct):
    choices: list[msgspec.Raw] = []
    usage: _Usage | None = None
    error: _Error | None = None


_CHUNKS = msgspec.json.Decoder(_Chunk)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedPrompt:
    """One request to send: `arrival_s` counts from the start of the run, `fields` go into the body as they are."""

    arrival_s: float
    prompt: str
    max_tokens: int
    fields: Mapping[str, object] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of a request. Times count from the start of the run; tokens are the server's own counts.

    Attributes:
        error: why it failed, None if it came to its end.
        token_times_s: when each chunk with text arrived.
    """

    sent_s: float
    end_s: float = 0.0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    error: str | None = None
    token_times_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float | None:
        return self.token_times_s[0] - self.sent_s if self.token_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None where there is none."""
        if self.num_output_tokens < 2 or not self.token_times_s:
            return None
        return (self.end_s - self.token_times_s[0]) / (self.num_output_tokens - 1)


class LoadClient:
    """A client of one server.

    Args:
        url: of the server, without a path.
        api_key: sent as a bearer token, if given.
        timeout_s: for a whole request.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def get(self, path: str, answer: type[_Answer]) -> _Answer:
        """Return what a GET answers, as a type of msgspec's.

        Raises:
            ReplicaError: the server cannot be reached, or answers an error.
        """
        async with self._session() as session:
            return await self._read(session.get(self._url + path), path, answer)

    async def post(self, path: str, body: JsonBody, answer: type[_Answer]) -> _Answer:
        """Return what a POST answers, as a type of msgspec's.

        Raises:
            ReplicaError: the server cannot be reached, or answers an error.
        """
        async with self._session() as session:
            return await self._read(session.post(self._url + path, json=body), path, answer)

    async def replay(
        self, model: str, prompts: Sequence[TimedPrompt], on_end: Callable[[Outcome], None]
    ) -> list[Outcome]:
        """Send each prompt at its time, whatever is still open, and return the outcomes in the order of `prompts`.

        Outputs are as long as asked for (`ignore_eos`), greedy, streamed. Failures are outcomes, not exceptions.
        """
        loop = asyncio.get_running_loop()
        async with self._session() as session:
            start_s = loop.time()

            async def send(prompt: TimedPrompt) -> Outcome:
                await asyncio.sleep(max(0.0, start_s + prompt.arrival_s - loop.time()))
                outcome = await self._stream(session, model, prompt, lambda: loop.time() - start_s)
                on_end(outcome)
                return outcome

            return list(await asyncio.gather(*(send(prompt) for prompt in prompts)))

    def _session(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=0)
        return aiohttp.ClientSession(headers=self._headers, timeout=self._timeout, connector=connector)

    async def _read(
        self, request: AbstractAsyncContextManager[aiohttp.ClientResponse], path: str, answer: type[_Answer]
    ) -> _Answer:
        try:
            async with request as response:
                if response.status != 200:
                    raise ReplicaError(f"{self._url}{path} answered {response.status}: {(await response.text())[:300]}")
                return msgspec.json.decode(await response.read(), type=answer)
        except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError) as error:
            raise ReplicaError(f"{self._url}{path}: {error or type(error).__name__}") from error

    async def _stream(
        self, session: aiohttp.ClientSession, model: str, prompt: TimedPrompt, now: Callable[[], float]
    ) -> Outcome:
        outcome = Outcome(sent_s=now())
        body = {
            "model": model,
            "prompt": prompt.prompt,
            "max_tokens": prompt.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **prompt.fields,
        }
        ended = False
        try:
            async with session.post(f"{self._url}/v1/completions", json=body) as response:
                if response.status != 200:
                    outcome.error = f"{response.status}: {(await response.text())[:300]}"
                else:
                    async for line in response.content:
                        if line.startswith(b"data: "):
                            ended = _take_in(outcome, line[6:].strip(), now()) or ended
                    if not ended and outcome.error is None:
                        outcome.error = "the stream ended before [DONE]"
        except (aiohttp.ClientError, TimeoutError) as error:
            outcome.error = str(error) or type(error).__name__
        except msgspec.MsgspecError as error:
            outcome.error = f"the server sent a malformed chunk: {error}"
        outcome.end_s = outcome.token_times_s[-1] if outcome.token_times_s else now()
        return outcome


def _take_in(outcome: Outcome, data: bytes, now_s: float) -> bool:
    """Add one server-sent event to the outcome; return whether it is the last."""
    if data == b"[DONE]":
        return True
    chunk = _CHUNKS.decode(data)
    if chunk.error is not None:
        outcome.error = chunk.error.message
    # A step may yield no text yet (half a character); its token still counts as one.
    if chunk.choices:
        outcome.token_times_s.append(now_s)
    if chunk.usage is not None:
        details = chunk.usage.prompt_tokens_details
        outcome.num_prompt_tokens = chunk.usage.prompt_tokens
        outcome.num_output_tokens = chunk.usage.completion_tokens
        outcome.num_cached_tokens = (details.cached_tokens or 0) if details else 0
    return False
