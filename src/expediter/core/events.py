"""Facts that the scheduler reports. Metrics, streams and logs are derived from them, nowhere else.

For each request: one `Queued` or `Rejected`; then any number of `Admitted` and `Preempted` in turn, `FirstToken` once,
`Tokens` as they come; then exactly one `Finished`, after which nothing follows. A request that asked for it may be
`Rejected` as long as it has never been admitted: that is its end, then. A request that goes on in another scheduler is
`Queued` there anew, and `FirstToken` is not repeated; a cluster makes one story of it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from expediter.core.request import FinishReason
from expediter.core.slo import NO_SLO, Slo


class RejectReason(enum.Enum):
    """Why a request was refused."""

    TOO_LONG = "too_long"
    """Prompt plus max_tokens exceeds max_model_len."""
    UNSERVABLE = "unservable"
    """It would not fit the KV cache even alone; with several sequences, all of them at once."""
    TOO_MANY_SEQUENCES = "too_many_sequences"
    """It has more sequences than the replica has slots."""
    SHUTDOWN = "shutdown"
    """The scheduler is draining."""
    NO_REPLICA = "no_replica"
    """No replica is up that could take it."""
    OVERLOADED = "overloaded"
    """Wherever it went, it would miss its targets, or make others miss theirs."""
    LATE = "late"
    """It cannot meet its targets any more, and asked to be refused then."""


class PreemptCause(enum.Enum):
    """What a preempted request had to make room for."""

    GROWTH = "growth"
    """A running request needed a block for its next token."""
    PRIORITY = "priority"
    """A waiting request of strictly higher priority."""
    SWAP_FAILED = "swap_failed"
    """Nothing: its KV did not come back from the host, so it starts over. Not counted among its preemptions."""


@dataclass(frozen=True, slots=True)
class Queued:
    """Came in; what it is judged by comes along."""

    request_id: str
    now_s: float
    tenant: str = ""
    slo_class: str = ""
    slo: Slo = NO_SLO


@dataclass(frozen=True, slots=True)
class Rejected:
    request_id: str
    now_s: float
    reason: RejectReason
    message: str


@dataclass(frozen=True, slots=True)
class Admitted:
    """Entered the running set.

    Attributes:
        num_known_tokens: what has to be computed in all.
        num_cached_tokens: of them, reused from the prefix cache; for a follower all of them: its leader computes them.
        held_s: how long it waited since it was queued or preempted, in seconds by what held it (`Reason` values).
        num_restored_tokens: known tokens brought back from the host, or whose KV came from elsewhere, behind the cached
            ones.
    """

    request_id: str
    now_s: float
    num_known_tokens: int
    num_cached_tokens: int
    resumed: bool
    held_s: Mapping[str, float] = field(default_factory=dict)
    num_restored_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Preempted:
    request_id: str
    now_s: float
    cause: PreemptCause
    num_lost_tokens: int
    """Computed tokens given up; what the prefix cache or the host still holds at resumption comes back."""
    for_request_id: str = ""
    """Who goes before it, or the first of the others that needed a block; "" if it lacked one itself."""
    num_swapped_tokens: int = 0
    """Of the lost ones, those that went to the host."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    request_id: str
    now_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """Output tokens of a whole step, one event for all sequences (a decode step makes no object per request).

    Attributes:
        states: the `RequestState` of each sequence, object array, shape [n].
        tokens: int32, shape [num_steps, n].
        result_index: column of `StepResult.tokens` (and entry of its logprobs) for each sequence, intp, shape [n].
    """

    now_s: float
    states: npt.NDArray[np.object_]
    tokens: npt.NDArray[np.int32]
    result_index: npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Finished:
    request_id: str
    now_s: float
    reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    message: str = ""
    """What went wrong, for the client, where that is known; only with `FinishReason.ERROR`."""


@dataclass(frozen=True, slots=True)
class Routed:
    """A cluster sent it to a replica later than at its arrival, or to another one."""

    request_id: str
    now_s: float


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The replica that had it is gone; it goes on elsewhere with the tokens that its client has."""

    request_id: str
    now_s: float
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class HandedOff:
    """Left a replica, which keeps its KV until that has been sent.

    Attributes:
        target_id: who goes on with it.
        num_tokens: computed so far.
    """

    request_id: str
    now_s: float
    target_id: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Transferred:
    """Its KV has come.

    Attributes:
        source_id: from which replica.
        num_bytes: sent; what the target had cached already was not.
        exposed_s: for how long it waited for the bytes, room on the target and the queue of the network included.
    """

    request_id: str
    now_s: float
    source_id: int
    num_bytes: int
    exposed_s: float


@dataclass(frozen=True, slots=True)
class TransferLost:
    """Its KV did not come within the lease."""

    request_id: str
    now_s: float
    source_id: int


@dataclass(frozen=True, slots=True)
class Fetched:
    """The beginning of its prompt has come from elsewhere, before it starts.

    Attributes:
        source: the replica's number, or the name of a tier of storage.
        num_tokens: that came.
    """

    request_id: str
    now_s: float
    source: str
    num_tokens: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ReplicaDown:
    """A replica is gone, with its cache; `until_s` is when it will be back, infinite for never."""

    now_s: float
    until_s: float


@dataclass(frozen=True, slots=True)
class ReplicaUp:
    """A replica is back."""

    now_s: float


ClusterEvent = Routed | Interrupted | HandedOff | Transferred | TransferLost | Fetched | ReplicaDown | ReplicaUp
"""What a cluster adds: for requests on their way between replicas, and of the replicas themselves."""
Event = Queued | Rejected | Admitted | Preempted | FirstToken | Tokens | Finished
"""What a scheduler reports."""
