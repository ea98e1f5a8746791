"""What generated requests ask for: lengths, and which tokens they share."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from expediter.core.errors import ConfigurationError
from expediter.sim.synthetic_tokens import MAX_NUMBERS
from expediter.sim.trace_arrivals import check_positive
from expediter.sim.trace_rows import MAX_LENGTH, TraceRow

BLOCK_TOKENS: Final = 16
"""Tokens per prefix id of generated traces."""
_DRAWN_AT_ONCE: Final = 1024

Lengths = Iterator[tuple[int, int]]
"""(new input tokens, output tokens) of one request after the other."""


class Shape(Protocol):
    """Makes requests of arrivals."""

    def rows(self, times: Iterator[float], lengths: Lengths, rng: np.random.Generator) -> Iterator[TraceRow]:
        """Yield requests in order of arrival."""
        ...


def lognormal_lengths(
    rng: np.random.Generator, *, input_mean: float, input_cv: float, output_mean: float, output_cv: float
) -> Lengths:
    """Yield lengths from two independent lognormal distributions, rounded, at least 1 and at most 2**24.

    Raises:
        ConfigurationError: a mean or a coefficient of variation is not above 0.
    """
    check_positive(input_mean=input_mean, input_cv=input_cv, output_mean=output_mean, output_cv=output_cv)

    def drawn(mean: float, cv: float) -> list[int]:
        variance = math.log(1 + cv**2)
        values = rng.lognormal(math.log(mean) - variance / 2, math.sqrt(variance), _DRAWN_AT_ONCE)
        lengths: list[int] = np.clip(np.rint(values), 1, MAX_LENGTH).astype(np.int64).tolist()
        return lengths

    def pairs() -> Lengths:
        while True:
            yield from zip(drawn(input_mean, input_cv), drawn(output_mean, output_cv), strict=True)

    return pairs()


def sampled_lengths(rng: np.random.Generator, inputs: npt.NDArray[np.int32], outputs: npt.NDArray[np.int32]) -> Lengths:
    """Yield pairs drawn from recorded requests with replacement; input and output of one request stay together."""
    while True:
        chosen = rng.integers(0, len(inputs), _DRAWN_AT_ONCE)
        yield from zip(inputs[chosen].tolist(), outputs[chosen].tolist(), strict=True)


@dataclass(frozen=True, slots=True)
class Independent:
    """Requests that share nothing."""

    def rows(
        self,
        times: Iterator[float],
        lengths: Lengths,
        rng: np.random.Generator,  # noqa: ARG002 - every shape is called alike
    ) -> Iterator[TraceRow]:
        """Yield requests in order of arrival."""
        for time, (num_input, num_output) in zip(times, lengths, strict=False):
            yield TraceRow(time, num_input, num_output)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixTree:
    """Prompts that begin with a path through a tree of shared texts, and go on with tokens of their own.

    All share the root. Below it, a node's children are chosen with probability in proportion to 1 / rank.

    Args:
        depth: nodes on a path, the root included.
        branches: children of a node.
        node_tokens: length of a node's text, a multiple of BLOCK_TOKENS.
    Raises:
        ConfigurationError: a number is out of range, or the tree has more blocks than can be told apart.
    """

    depth: int = 3
    branches: int = 4
    node_tokens: int = 512

    def __post_init__(self) -> None:
        check_positive(depth=self.depth, branches=self.branches, node_tokens=self.node_tokens)
        if self.node_tokens % BLOCK_TOKENS:
            raise ConfigurationError(f"node tokens must be a multiple of {BLOCK_TOKENS}, not {self.node_tokens}")
        num_nodes = sum(self.branches**level for level in range(self.depth))
        if num_nodes * self.node_tokens // BLOCK_TOKENS >= MAX_NUMBERS:
            raise ConfigurationError(f"a tree of {num_nodes} nodes has too many blocks")

    def rows(self, times: Iterator[float], lengths: Lengths, rng: np.random.Generator) -> Iterator[TraceRow]:
        """Yield requests in order of arrival."""
        shares = 1 / np.arange(1, self.branches + 1)
        steps = np.cumsum(shares / shares.sum())
        node_blocks = self.node_tokens // BLOCK_TOKENS
        for time, (num_own, num_output) in zip(times, lengths, strict=False):
            node, ids = 0, list(range(node_blocks))
            for place in rng.random(self.depth - 1).tolist():
                child = min(int(np.searchsorted(steps, place, side="right")), self.branches - 1)
                node = node * self.branches + 1 + child
                ids.extend(range(node * node_blocks, (node + 1) * node_blocks))
            num_input = min(self.depth * self.node_tokens + num_own, MAX_LENGTH)
            yield TraceRow(time, num_input, num_output, ids[: num_input // BLOCK_TOKENS], BLOCK_TOKENS)


@dataclass(slots=True)
class _Session:
    turns_left: int
    num_tokens: int
    ids: list[int]
    begun: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sessions:
    """Sessions of several turns; each turn's prompt is all that was said before and its new input.

    All sessions begin with the same system prompt. Arrivals are the sessions' starts. The next turn comes when the
    answer is there and a pause is over; as no server is asked here, answers are taken to come at a constant speed. With
    short pauses and a long system prompt these are agents that call tools, with long pauses people who chat.

    Args:
        turns_mean: of a geometric distribution.
        pause_mean_s: of an exponential distribution; reading and thinking, or a tool's run.
        system_tokens: length of the common prompt.
        max_context: a session ends before a turn whose prompt and answer would exceed this.
        answer_tokens_per_s: assumed speed of answers.
    Raises:
        ConfigurationError: a number is out of range.
    """

    turns_mean: float
    pause_mean_s: float
    system_tokens: int
    max_context: int = 32_768
    answer_tokens_per_s: float = 50.0

    def __post_init__(self) -> None:
        check_positive(
            pause_mean_s=self.pause_mean_s,
            max_context=self.max_context,
            answer_tokens_per_s=self.answer_tokens_per_s,
        )
        if not 1 <= self.turns_mean < float("inf"):
            raise ConfigurationError(f"turns mean must be at least 1, not {self.turns_mean}")
        if not 2 <= self.system_tokens + 2 <= self.max_context <= MAX_LENGTH:
            raise ConfigurationError("system tokens must be 0 or more, and 2 below max context, and that at most 2**24")

    def rows(self, times: Iterator[float], lengths: Lengths, rng: np.random.Generator) -> Iterator[TraceRow]:
        """Yield requests in order of arrival; holds the sessions under way.

        Raises:
            ConfigurationError: prefix ids run out.
        """
        due: list[tuple[float, int, _Session]] = []  # the number keeps the order of equal times
        system = list(range(self.system_tokens // BLOCK_TOKENS))
        next_id, number = len(system), 0
        start_s = next(times, float("inf"))
        while due or start_s < float("inf"):
            if due and due[0][0] <= start_s:
                time, _, session = heapq.heappop(due)
            else:
                time, session = (
                    start_s,
                    _Session(int(rng.geometric(1 / self.turns_mean)), self.system_tokens, system[:]),
                )
                start_s = next(times, float("inf"))
            num_new, num_output = next(lengths)
            room = self.max_context - session.num_tokens
            if num_new + num_output > room and session.begun:
                continue
            # A first turn is cut to the context instead, so that no session is without one.
            num_new = max(1, min(num_new, room - num_output))
            num_output = max(1, min(num_output, room - num_new))
            num_input = session.num_tokens + num_new
            num_ids = num_input // BLOCK_TOKENS - len(session.ids)
            session.ids.extend(range(next_id, next_id + num_ids))
            next_id += num_ids
            if next_id >= MAX_NUMBERS:
                raise ConfigurationError(f"more than {MAX_NUMBERS} distinct prefix blocks; make a shorter trace")
            yield TraceRow(time, num_input, num_output, session.ids[:], BLOCK_TOKENS)
            session.num_tokens = num_input + num_output
            session.turns_left -= 1
            session.begun = True
            if session.turns_left and session.num_tokens + 2 <= self.max_context:
                number += 1
                pause_s = num_output / self.answer_tokens_per_s + rng.exponential(self.pause_mean_s)
                heapq.heappush(due, (time + pause_s, number, session))
