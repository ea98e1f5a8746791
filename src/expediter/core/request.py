"""A request as the client sent it, and its state while the scheduler owns it.

The lifecycle is the table `_MOVES`; every change of status goes through `RequestState.move`, so an illegal move
raises instead of leaving a request in two places at once.
"""

from __future__ import annotations

import enum
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from expediter.core.errors import InvariantError, RequestError
from expediter.core.slo import NO_SLO, Slo

TokenArray = npt.NDArray[np.int32]
"""Token ids, int32, shape [num_tokens]."""


class Status(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(enum.Enum):
    """Why a request ended. The first two are successes and OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


_MOVES: Final[Mapping[Status, frozenset[Status]]] = {
    Status.WAITING: frozenset({Status.RUNNING, Status.FINISHED}),
    Status.RUNNING: frozenset({Status.PREEMPTED, Status.FINISHED}),
    Status.PREEMPTED: frozenset({Status.RUNNING, Status.FINISHED}),
    Status.FINISHED: frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is drawn. Ranges follow vLLM's and OpenAI's API; the gateway has checked them.

    `temperature == 0` is greedy. `top_k <= 0` and `min_p == 0` switch those filters off. `logprobs` is the number of
    alternatives to report per token, None for none at all.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None


MAX_PIN_S: Final = 3600.0
"""Longest time, in seconds, for which a client may pin its blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheHint:
    """What a client expects of a request's KV once it has ended. It moves evictions, never results.

    Args:
        pin_s: keep it for so long, in seconds, at most MAX_PIN_S: it will be needed again.
        drop: free what no other request shares: it will not.
    Raises:
        RequestError: neither or both, or the time is out of range.
    """

    pin_s: float = 0.0
    drop: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.pin_s <= MAX_PIN_S:
            raise RequestError(f"pin_s must lie above 0 and be at most {MAX_PIN_S:g}", param="cache_hint")
        if bool(self.pin_s) is self.drop:
            raise RequestError("cache_hint is either pin_s above 0 or drop", param="cache_hint")


GREEDY: Final = SamplingParams(temperature=0.0)

MAX_GRAMMAR_BYTES: Final = 256 << 10
"""Longest grammar, in bytes of UTF-8."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Grammar:
    """What a request's output has to match. Only the engine looks into the text (`engine/structured.py`).

    Two grammars are equal only if they are one object: an engine keeps what it has compiled as long as that lives.

    Args:
        text: as the engine's compiler takes it.
    Raises:
        RequestError: it is empty or longer than MAX_GRAMMAR_BYTES.
    """

    text: str

    def __post_init__(self) -> None:
        num_bytes = len(self.text.encode())
        if not 0 < num_bytes <= MAX_GRAMMAR_BYTES:
            raise RequestError(f"a grammar must have between 1 and {MAX_GRAMMAR_BYTES} bytes, not {num_bytes}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """A client's job, immutable.

    Args:
        request_id: unique among live requests; the driver makes it, never the client.
        prompt: token ids, int32, shape [num_tokens], at least one.
        max_tokens: most output tokens, at least 1.
        min_tokens: output tokens before a stop token counts.
        stop_token_ids: tokens that end the request, end-of-sequence ids included; empty to ignore them all.
        grammar: what the output has to match; None for anything. It ends with an end-of-sequence token, so that one has
            to be among the stop tokens.
        priority: lower runs first (vLLM's convention).
        cache_salt: root of the prefix cache; requests under different salts never share blocks.
        cache_hint: what to do with its KV when it ends; None to leave that to the eviction policy.
        session: what it belongs to, such as a conversation: requests of one session of a tenant are likely to share a
            beginning; "" for none.
        slo: its targets.
        slo_class: name of the class that they come from, for metrics; "" for none.
        value: weight in goodput, relative to other requests.
        refuse_late: if it cannot be in time any more before it has started, refuse it instead of serving it late.
        arrival_s: when it came in, in the driver's clock.
    Raises:
        RequestError: a field is out of range.
    """

    request_id: str
    prompt: TokenArray
    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    sampling: SamplingParams = GREEDY
    grammar: Grammar | None = None
    priority: int = 0
    cache_salt: str = ""
    cache_hint: CacheHint | None = None
    tenant: str = ""
    session: str = ""
    slo: Slo = NO_SLO
    slo_class: str = ""
    value: float = 1.0
    refuse_late: bool = False
    arrival_s: float = 0.0

    def __post_init__(self) -> None:
        if self.prompt.dtype != np.int32 or self.prompt.ndim != 1:
            raise RequestError("prompt must be a one-dimensional int32 array", param="prompt")
        if not len(self.prompt):
            raise RequestError("prompt must hold at least one token", param="prompt")
        if self.max_tokens < 1:
            raise RequestError("max_tokens must be at least 1", param="max_tokens")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise RequestError("min_tokens must lie between 0 and max_tokens", param="min_tokens")
        if not (math.isfinite(self.value) and self.value > 0):
            raise RequestError("value must be a finite number above 0", param="value")

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def max_total_tokens(self) -> int:
        """Prompt plus the longest possible output, in tokens."""
        return len(self.prompt) + self.max_tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Carried:
    """What a request brings along from the replica that had it before.

    Attributes:
        output: tokens that its client has already.
        first_scheduled_s, first_token_s: when that was; None if it never came to it.
        num_cached_tokens: reused at its first admission.
        num_preemptions: so far.
    """

    output: tuple[int, ...] = ()
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0


@dataclass(slots=True, eq=False)
class RequestState:
    """What the scheduler knows of a live request. Only the scheduler writes to it.

    While a request runs, its newest output tokens lie in the scheduler's arrays; `output` is complete whenever the
    request is not running.

    Attributes:
        sequence: order of arrival at this scheduler; breaks every tie.
        token_bytes: the known tokens as raw int32 bytes, which the prefix cache slices and compares in C.
        slot: row in the scheduler's arrays and in the block table while running, else -1.
        num_computed_tokens: tokens whose KV exists (cached ones included), as of the last applied step.
        num_cached_tokens: tokens reused from the prefix cache at the first admission; what the client is told.
        pace_s: time per output token that it can afford after the first.
        num_bypassed: requests admitted past this one while it did not fit.
        leader: who computes the prompt for this one too, until the group forks; None for anybody else. A follower
            waits, runs and is preempted with its leader and is in no queue or batch of its own.
        followers: whose leader this one is, in order.
        is_kept: its KV is kept for a transfer when it ends.
    """

    request: Request
    sequence: int
    token_bytes: bytes
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    slot: int = -1
    output: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_bypassed: int = 0
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    pace_s: float = math.inf
    leader: RequestState | None = None
    followers: list[RequestState] = field(default_factory=list)
    is_kept: bool = False

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_known_tokens(self) -> int:
        """Prompt and output tokens; exact only while the request is not running."""
        return len(self.token_bytes) >> 2

    def has_missed(self, now_s: float) -> bool:
        """Return whether a target is missed for certain, so that serving it now or later makes no difference."""
        slo, arrival_s = self.request.slo, self.request.arrival_s
        if slo.ttft_s is not None:
            first_s = now_s if self.first_token_s is None else self.first_token_s
            if first_s > arrival_s + slo.ttft_s:
                return True
        return slo.e2e_s is not None and now_s > arrival_s + slo.e2e_s

    @property
    def members(self) -> list[RequestState]:
        """This one and its followers."""
        return [self, *self.followers]

    def fall_out(self) -> RequestState | None:
        """Leave the group; return who leads it from now on if this one did and somebody is left."""
        if self.leader is not None:
            self.leader.followers.remove(self)
            self.leader = None
            return None
        if not self.followers:
            return None
        successor, *others = self.followers
        self.followers = []
        successor.leader, successor.followers = None, others
        successor.num_bypassed = self.num_bypassed
        for other in others:
            other.leader = successor
        return successor

    def part(self) -> list[RequestState]:
        """Dissolve the group; return the former followers, who are on their own from now on."""
        followers, self.followers = self.followers, []
        for follower in followers:
            follower.leader = None
        return followers

    @property
    def has_stopped(self) -> bool:
        """Whether its last output token is one that ends it; exact only while the request is not running."""
        request = self.request
        return self.output[-1] in request.stop_token_ids and len(self.output) >= request.min_tokens

    def append(self, token: int) -> None:
        """Append an output token."""
        self.output.append(token)
        self.token_bytes += token.to_bytes(4, sys.byteorder, signed=True)

    def move(self, status: Status) -> None:
        """Change the status.

        Raises:
            InvariantError: the lifecycle table does not allow the move.
        """
        if status not in _MOVES[self.status]:
            raise InvariantError(f"request {self.request_id}: {self.status.value} -> {status.value} is not a move")
        self.status = status
