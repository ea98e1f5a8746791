"""A request as its client sees it, for tests that follow one through a scheduler on the toy model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from expediter.core.events import Finished, Rejected
from expediter.core.request import Request
from expediter.testing.fake_executor import toy_generate


def expected_output(request: Request, vocab_size: int) -> list[int]:
    """Return what the toy model answers to `request`, cut where a stop token or `max_tokens` ends it."""
    output = toy_generate(request.prompt, request.max_tokens, vocab_size, request.sampling.seed)
    for count, token in enumerate(output, start=1):
        if token in request.stop_token_ids and count >= request.min_tokens:
            return output[:count]
    return output


def sequences_of(request: Request, n: int) -> list[Request]:
    """Return `n` sequences of a request: itself, and copies with ids "ID.1", "ID.2" and seeds of their own."""
    return [
        request
        if number == 0
        else replace(
            request,
            request_id=f"{request.request_id}.{number}",
            sampling=replace(request.sampling, seed=(request.sampling.seed or 0) + number),
        )
        for number in range(n)
    ]


@dataclass(slots=True, eq=False)
class DrivenRequest:
    """A request as its client sees it, rebuilt from plans and events alone.

    Attributes:
        expected: the whole output that the toy model gives to the prompt.
        output: tokens reported so far.
        admissions: cached tokens at each admission.
        num_computed_tokens: tokens whose KV exists, as of the last applied step.
        num_tokens_run: tokens computed for it in all, repetitions after preemptions included.
        num_bypassed: requests admitted past it while it waited.
        num_failed_swaps: times that its KV did not come back from the host.
        num_restored_tokens: tokens brought back from the host, in all.
        is_decoding: it has caught up, so every step owes it a token.
        leader: who computes its prompt, until the group forks.
        followers: whose prompt it computes.
        heir: who leads its group since it ended.
        finished: its terminal event, None while it lives; a refusal if it was refused while it waited.
    """

    request: Request
    expected: list[int]
    output: list[int] = field(default_factory=list)
    admissions: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_tokens_run: int = 0
    num_preemptions: int = 0
    num_bypassed: int = 0
    num_failed_swaps: int = 0
    num_restored_tokens: int = 0
    is_running: bool = False
    is_decoding: bool = False
    has_first_token: bool = False
    finished: Finished | Rejected | None = None
    leader: DrivenRequest | None = None
    followers: list[DrivenRequest] = field(default_factory=list)
    heir: DrivenRequest | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def members(self) -> list[DrivenRequest]:
        """This one and its followers."""
        return [self, *self.followers]

    @property
    def last_heir(self) -> DrivenRequest:
        """Who does now what this one was planned to do."""
        return self if self.heir is None else self.heir.last_heir

    def fall_out(self) -> None:
        """Leave the group; the next one takes over what was computed if this one led it."""
        if self.leader is not None:
            self.leader.followers.remove(self)
            self.leader = None
        elif self.followers:
            heir, *others = self.followers
            self.followers, self.heir = [], heir
            heir.leader, heir.followers = None, others
            heir.num_computed_tokens, heir.num_bypassed = self.num_computed_tokens, self.num_bypassed
            for other in others:
                other.leader = heir

    def fork(self) -> None:
        """Part with the followers, which have what this one computed."""
        for follower in self.followers:
            follower.leader, follower.num_computed_tokens = None, self.num_computed_tokens
        self.followers = []

    @property
    def known_tokens(self) -> list[int]:
        return [*self.request.prompt.tolist(), *self.output]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrivenStep:
    """A plan as it was made, by request instead of by slot; a jump is one of them.

    Attributes:
        entries: request id -> (first position, new tokens), in batch order.
        decodes: the leading entries that decode.
    """

    step_id: int
    entries: dict[str, tuple[int, int]]
    decodes: tuple[str, ...]
    admitted: tuple[str, ...]
    preempted: tuple[str, ...]

    @property
    def num_tokens(self) -> int:
        return sum(length for _, length in self.entries.values())
