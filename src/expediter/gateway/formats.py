"""The two shapes in which OpenAI's API reports the same thing: completions and chat completions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from expediter.core.plan import TokenLogprobs
from expediter.gateway.generation import Delta, Generation

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""


class Vocabulary(Protocol):
    """Text of single tokens."""

    def token_text(self, token: int) -> str: ...

    def token_bytes(self, token: int) -> bytes: ...


@dataclass(slots=True)
class Collected:
    """All deltas of one choice, for a response that is not streamed."""

    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason

    def as_delta(self, index: int) -> Delta:
        """Return everything as one delta."""
        return Delta(index, "".join(self.texts), self.tokens, self.logprobs, self.finish_reason)


class ResponseFormat(Protocol):
    """Shapes of one endpoint."""

    id_prefix: str
    full_object: str
    chunk_object: str

    def opening(self) -> list[dict[str, Any]]:
        """Return what each choice's stream starts with, before any token."""
        ...

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """Return a choice of a streamed chunk."""
        ...

    def full(self, delta: Delta) -> dict[str, Any]:
        """Return a choice of a response in one piece; `delta` holds all of it."""
        ...


class CompletionFormat:
    """`/v1/completions`.

    Args:
        echoes: text in front of each choice's own, one per choice; empty strings without `echo`.
        num_alternatives: logprobs asked for, None for none.
    """

    id_prefix = "cmpl-"
    full_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, vocabulary: Vocabulary, echoes: Sequence[str], num_alternatives: int | None) -> None:
        self._vocabulary = vocabulary
        self._echoes = echoes
        self._num_alternatives = num_alternatives
        self._text_offsets = [0] * len(echoes)

    def opening(self) -> list[dict[str, Any]]:
        return [self._choice(Delta(i, echo), echo) for i, echo in enumerate(self._echoes) if echo]

    def chunk(self, delta: Delta) -> dict[str, Any]:
        return self._choice(delta, delta.text)

    def full(self, delta: Delta) -> dict[str, Any]:
        return self._choice(delta, self._echoes[delta.index] + delta.text)

    def _choice(self, delta: Delta, text: str) -> dict[str, Any]:
        return {
            "index": delta.index,
            "text": text,
            "logprobs": self._logprobs(delta),
            "finish_reason": delta.finish_reason,
        }

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if self._num_alternatives is None or not delta.logprobs:
            return None
        token_text = self._vocabulary.token_text
        texts = [token_text(token) for token in delta.tokens]
        offsets: list[int] = []
        for text in texts:
            offsets.append(self._text_offsets[delta.index])
            self._text_offsets[delta.index] += len(text)
        tops = [
            {token_text(token): finite(logprob) for token, logprob in entry.top[: self._num_alternatives]}
            | {text: finite(entry.logprob)}
            for text, entry in zip(texts, delta.logprobs, strict=True)
        ]
        return {
            "tokens": texts,
            "token_logprobs": [finite(entry.logprob) for entry in delta.logprobs],
            "top_logprobs": tops,
            "text_offset": offsets,
        }


class ChatFormat:
    """`/v1/chat/completions`.

    Args:
        num_alternatives: top_logprobs asked for, None for no logprobs at all.
    """

    id_prefix = "chatcmpl-"
    full_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, vocabulary: Vocabulary, num_choices: int, num_alternatives: int | None) -> None:
        self._vocabulary = vocabulary
        self._num_choices = num_choices
        self._num_alternatives = num_alternatives

    def opening(self) -> list[dict[str, Any]]:
        return [
            {"index": i, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            for i in range(self._num_choices)
        ]

    def chunk(self, delta: Delta) -> dict[str, Any]:
        return {
            "index": delta.index,
            "delta": {"content": delta.text} if delta.text else {},
            "logprobs": self._logprobs(delta),
            "finish_reason": delta.finish_reason,
        }

    def full(self, delta: Delta) -> dict[str, Any]:
        return {
            "index": delta.index,
            "message": {"role": "assistant", "content": delta.text, "refusal": None},
            "logprobs": self._logprobs(delta),
            "finish_reason": delta.finish_reason,
        }

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if self._num_alternatives is None or not delta.logprobs:
            return None
        content = [
            self._entry(token, entry.logprob)
            | {"top_logprobs": [self._entry(*other) for other in entry.top[: self._num_alternatives]]}
            for token, entry in zip(delta.tokens, delta.logprobs, strict=True)
        ]
        return {"content": content}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._vocabulary.token_text(token),
            "logprob": finite(logprob),
            "bytes": list(self._vocabulary.token_bytes(token)),
        }


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can carry."""
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB


def usage(generation: Generation) -> dict[str, Any]:
    """Return OpenAI's usage of a generation as of now, in tokens."""
    num_prompt, num_output = generation.num_prompt_tokens, generation.num_output_tokens
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": generation.num_cached_tokens},
    }
