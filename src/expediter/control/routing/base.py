"""What goes into a routing decision, and what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from expediter.control.fleet import Fleet
from expediter.core.events import RejectReason
from expediter.core.request import Request, TokenArray
from expediter.core.slo import Slo


class RouteQuery(NamedTuple):
    """What a router may know of a request.

    Attributes:
        request: the first of its sequences.
        num_sequences: all of them; they stay together.
        now_s: the driver's clock.
    """

    request: Request
    now_s: float
    num_sequences: int = 1

    @classmethod
    def of(cls, group: Sequence[Request], now_s: float) -> RouteQuery:
        """Return the question where a group, as `Scheduler.add_group` takes it, shall go."""
        return cls(group[0], now_s, len(group))

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt)

    @property
    def prompt(self) -> TokenArray:
        return self.request.prompt

    @property
    def slo(self) -> Slo:
        return self.request.slo


class Candidate(NamedTuple):
    """A replica that was looked at.

    Attributes:
        cost: what the policy compares, less is better; its unit is the policy's.
        num_cached_tokens: of the prompt, taken to be cached there.
    """

    replica_id: int
    cost: float
    num_cached_tokens: int = 0


class Placement(NamedTuple):
    """Where a request goes.

    Attributes:
        replica_id: who computes its prompt, and the rest too unless that is handed off.
        because: what spoke for it, a clause of plain English.
        is_held_back: a better one was to be had, and a bound kept the request from it.
        candidates: those that were compared, the chosen one first; not all of a large fleet.
        decode_id: who yields its tokens, where that is decided together with the prompt; None if it is not handed off,
            or `Router.hand_off` shall say so when the prompt is done.
        num_cached_tokens: of the prompt, taken to be cached on `replica_id`.
        fetch_from_id, num_fetched_tokens: a replica whose KV is copied to `replica_id` first, so that so many leading
            tokens need no computing there.
    """

    replica_id: int
    because: str
    is_held_back: bool = False
    candidates: Sequence[Candidate] = ()
    decode_id: int | None = None
    num_cached_tokens: int = 0
    fetch_from_id: int | None = None
    num_fetched_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Nobody gets the request; the client hears so at once and can try elsewhere.

    Attributes:
        message: for the client.
        candidates: as in `Placement`, the best first.
        retry_after_s: when a request like it may be taken, if none comes meanwhile.
    """

    reason: RejectReason
    message: str
    candidates: Sequence[Candidate] = ()
    retry_after_s: float = 1.0


NO_REPLICA = Refusal(reason=RejectReason.NO_REPLICA, message="no replica is up")

Decision = Placement | Refusal


class Router(Protocol):
    """Chooses among the replicas of a fleet. It may remember what it chose; the driver sends every placement."""

    def route(self, query: RouteQuery, fleet: Fleet) -> Decision:
        """Return who gets a request that has just come in."""
        ...

    def hand_off(self, query: RouteQuery, fleet: Fleet) -> Decision:
        """Return who goes on with a request whose prompt is done; asked where decode replicas are there."""
        ...
