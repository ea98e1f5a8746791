"""How a generation is told to a client: what every API fills in with its own shapes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import msgspec

from expediter.core.plan import TokenLogprobs
from expediter.gateway.errors import ApiError
from expediter.gateway.generation import Delta
from expediter.gateway.tools.base import CallDelta

LOWEST_LOGPROB: Final = -9999.0
"""Stands for minus infinity, which JSON does not have."""


class Vocabulary(Protocol):
    """Text of single tokens."""

    def token_text(self, token: int) -> str: ...

    def token_bytes(self, token: int) -> bytes: ...


class Rendering(Protocol):
    """One response. Either `whole` is asked for, or the parts of a stream: each is the bytes of its events."""

    @property
    def response_id(self) -> str:
        """What the client may call it by."""
        ...

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        """Return the body of a response in one piece; each delta is all of a choice."""
        ...

    def opening(self) -> Iterable[bytes]:
        """Return what a stream starts with, once its first token is there."""
        ...

    def progress(self, delta: Delta) -> Iterable[bytes]:
        """Return what one delta of a choice adds."""
        ...

    def closing(self) -> Iterable[bytes]:
        """Return what follows when every choice has ended."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """Return what tells a client that the stream is broken; nothing follows."""
        ...


@dataclass(slots=True)
class Collected:
    """All deltas of one choice, for a response that is not streamed."""

    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    calls: list[CallDelta] = field(default_factory=list)
    finish_reason: str | None = None
    stop: str | None = None

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        for call in delta.calls:
            if call.name is not None:
                self.calls.append(call)
            else:
                self.calls[call.index].arguments += call.arguments
        self.finish_reason, self.stop = delta.finish_reason, delta.stop

    def as_delta(self, index: int) -> Delta:
        """Return everything as one delta."""
        text = "".join(self.texts)
        return Delta(index, text, self.tokens, self.logprobs, self.calls, self.finish_reason, self.stop)


def event(content: dict[str, Any], name: str = "") -> bytes:
    """Return a server-sent event, with a name if it has one."""
    head = b"event: " + name.encode() + b"\n" if name else b""
    return head + b"data: " + msgspec.json.encode(content) + b"\n\n"


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can carry."""
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB
