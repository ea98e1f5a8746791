"""One backend with its load as the door counts it, and one request there."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from expediter.control.fleet import MIXED, Fleet, ReplicaProfile, ReplicaSnapshot
from expediter.control.health import Failure
from expediter.gateway.backends.config import Address, BackendConfig
from expediter.telemetry.exchanges import Outcome

_NEVER: Final = -1.0


class Usage(NamedTuple):
    """What a backend said of a request, in its own tokens.

    Attributes:
        num_cached_tokens: of the prompt; None if it did not say.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int | None = None


class Kind(enum.Enum):
    """Whose server a backend is, as far as it can be told."""

    OWN = "own"
    EXPEDITER = "expediter"
    VLLM = "vllm"
    SGLANG = "sglang"
    LLAMA_CPP = "llama.cpp"
    OTHER = "other"


class Counts(NamedTuple):
    """What some process of this gateway has at a backend."""

    num_requests: int = 0
    num_pending_tokens: int = 0
    num_context_tokens: int = 0


NOTHING: Final = Counts()


@dataclass(slots=True, eq=False)
class Reported:
    """What a backend's own metrics said when they were last read.

    Attributes:
        at_s: when they were asked for.
        num_running, num_waiting: requests of everybody, not only ours.
        kv_use: share of its KV cache that is in use, 0 to 1; None if it does not say.
        num_others: requests there that this door did not send.
    """

    at_s: float
    num_running: int
    num_waiting: int
    kv_use: float | None
    num_others: int


class Seat(Protocol):
    """A model's fleet that a backend is in.

    Attributes:
        is_stale: who may get a request has changed, or may have.
    """

    fleet: Fleet
    is_stale: bool


@dataclass(slots=True, eq=False)
class Backend:
    """One backend while it is known.

    Attributes:
        replica_id: its number in fleets; never used again for another.
        slot: its place in fleets and in the index of prefixes.
        profile: what is known of its speed and the size of its cache.
        authorization: value of the Authorization header that it wants, None for none.
        models: that it serves now; empty before it was asked.
        max_model_len: longest sequence in tokens that it takes, None if it does not say.
        max_requests: most requests at once; None for no limit.
        num_cache_tokens: that its KV cache keeps, as its events say, in its own tokens; None if they do not.
        seats: in the fleets of these models.
        is_draining: it gets no new requests.
        is_gone: it was removed; what is in flight there goes on, and counts for nothing.
        is_ready: whether an own pool takes requests; None for a foreign backend, whose health tells.
        up_in_s: when an own pool is likely to take requests if it does not; None for a foreign backend.
        live: its dispatches that have not ended.
        num_pending_tokens: of their prompts, not computed yet and not expected to be cached.
        num_context_tokens: of all their prompts.
        num_answered: of them, those whose prompt is computed.
        progress_s: when it last sent anything of a response, or was first sent something after being idle.
        worked_s: when its metrics last showed that it had computed something, for anybody.
        elsewhere: what the other processes of this gateway have there.
        reported: what its metrics said, if that is not too old.
        outcomes: dispatches that have ended, by how.
    """

    replica_id: int
    slot: int
    config: BackendConfig
    name: str
    address: Address
    profile: ReplicaProfile = MIXED
    authorization: bytes | None = None
    kind: Kind = Kind.OTHER
    models: tuple[str, ...] = ()
    max_model_len: int | None = None
    max_requests: int | None = None
    num_cache_tokens: int | None = None
    seats: list[Seat] = field(default_factory=list)
    is_draining: bool = False
    is_gone: bool = False
    is_ready: Callable[[], bool] | None = None
    up_in_s: Callable[[], float] | None = None
    live: set[Dispatch] = field(default_factory=set)
    num_pending_tokens: int = 0
    num_context_tokens: int = 0
    num_answered: int = 0
    progress_s: float = _NEVER
    worked_s: float = _NEVER
    elsewhere: Counts = NOTHING
    reported: Reported | None = None
    num_dispatched: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)

    @property
    def is_own(self) -> bool:
        return self.kind is Kind.OWN

    @property
    def num_in_flight(self) -> int:
        """Requests that were dispatched to it, by any process of this gateway, and have not ended."""
        return len(self.live) + self.elsewhere.num_requests

    @property
    def has_room(self) -> bool:
        return self.max_requests is None or self.num_in_flight < self.max_requests

    @property
    def counts(self) -> Counts:
        """What this process has there."""
        return Counts(len(self.live), self.num_pending_tokens, self.num_context_tokens)

    @property
    def takes_requests(self) -> bool:
        """Whether it would take requests if it were well and had room."""
        return not self.is_draining and (self.is_ready is None or self.is_ready())

    @property
    def num_running(self) -> int:
        """Requests that decode there, those of others too as far as it reports them."""
        return self.num_answered + (0 if self.reported is None else self.reported.num_others)

    def load_changed(self) -> None:
        """Say that routers have to look at its load again."""
        for seat in self.seats:
            seat.fleet.mark(self.replica_id)

    def standing_changed(self) -> None:
        """Say that it may get requests and could not before, or the other way round."""
        for seat in self.seats:
            seat.is_stale = True

    def heard_s(self) -> float:
        """Return when it last gave a sign of working: a response, its metrics, or getting work after idling."""
        began = (dispatch.progress_s for dispatch in self.live if dispatch.first_byte_s is not None)
        return max(self.progress_s, self.worked_s, max(began, default=self.progress_s))

    def snapshot(self) -> ReplicaSnapshot:
        """Return what a router sees of it."""
        others = 0 if self.reported is None else self.reported.num_others
        num_requests, num_pending_tokens, num_context_tokens = self.elsewhere
        return ReplicaSnapshot(
            self.replica_id,
            len(self.live) + num_requests + others,
            self.num_pending_tokens + num_pending_tokens,
            self.num_context_tokens + num_context_tokens,
            self.num_answered + others,
        )


class Book(Protocol):
    """Keeps account of dispatches."""

    def answered(self, dispatch: Dispatch, now_s: float) -> None:
        """Hear of the first byte, once."""
        ...

    def done(self, dispatch: Dispatch, outcome: Outcome, usage: Usage | None, now_s: float) -> None:
        """Hear of an end that the backend is not to blame for; this or `failed`, once."""
        ...

    def failed(self, dispatch: Dispatch, failure: Failure, now_s: float) -> None:
        """Hear that the backend has failed it."""
        ...


@dataclass(slots=True, eq=False)
class Dispatch:
    """A request at a backend. Made by `Dispatcher.dispatched`.

    Attributes:
        num_tokens: of its prompt, as the door counts. `num_new`: of them, expected not to be cached.
        num_ahead: tokens that were pending there before it.
        num_beside: requests that ran there.
        is_trial: it tries whether a backend that was ejected is well again.
        progress_s: whoever copies the response sets this to the time of the last bytes; an attribute, for speed.
        first_byte_s: of the response's body; None before.
        is_settled: its prompt no longer counts as pending.
    """

    backend: Backend
    model: str
    is_stream: bool
    at_s: float
    num_tokens: int
    num_new: int
    num_ahead: int
    num_beside: int
    is_trial: bool
    predicted_ttft_s: float | None
    book: Book
    progress_s: float
    first_byte_s: float | None = None
    is_settled: bool = False
    is_over: bool = False

    def first_byte(self, now_s: float) -> None:
        """Say that the response's body has begun, with a status below 500. Later calls change nothing."""
        self.progress_s = now_s
        if self.first_byte_s is None and not self.is_over:
            self.first_byte_s = now_s
            self.book.answered(self, now_s)

    def ended(self, how: Outcome | Failure, now_s: float, usage: Usage | None = None) -> None:
        """Say that it is over: how the exchange went, or how the backend failed it. Later calls change nothing."""
        if self.is_over:
            return
        self.is_over = True
        if isinstance(how, Failure):
            self.book.failed(self, how, now_s)
        else:
            self.book.done(self, how, usage, now_s)
