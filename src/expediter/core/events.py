"""Facts that the scheduler reports. Metrics, streams and logs are derived from them, nowhere else.

For each request: one `Queued` or `Rejected`; then any number of `Admitted` and `Preempted` in turn, `FirstToken` once,
`Tokens` as they come; then exactly one `Finished`, after which nothing follows.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from expediter.core.request import FinishReason


class RejectReason(enum.Enum):
    """Why a request was refused at once."""

    TOO_LONG = "too_long"
    """Prompt plus max_tokens exceeds max_model_len."""
    UNSERVABLE = "unservable"
    """It would not fit the KV cache even alone; with several sequences, all of them at once."""
    TOO_MANY_SEQUENCES = "too_many_sequences"
    """It has more sequences than the replica has slots."""
    SHUTDOWN = "shutdown"
    """The scheduler is draining."""


class PreemptCause(enum.Enum):
    """What a preempted request had to make room for."""

    GROWTH = "growth"
    """A running request needed a block for its next token."""
    PRIORITY = "priority"
    """A waiting request of strictly higher priority."""


@dataclass(frozen=True, slots=True)
class Queued:
    request_id: str
    now_s: float


@dataclass(frozen=True, slots=True)
class Rejected:
    request_id: str
    now_s: float
    reason: RejectReason
    message: str


@dataclass(frozen=True, slots=True)
class Admitted:
    """Entered the running set; `num_cached_tokens` are reused, `num_known_tokens` is what has to be computed in all.

    For a follower all tokens count as reused: its leader computes them.
    """

    request_id: str
    now_s: float
    num_known_tokens: int
    num_cached_tokens: int
    resumed: bool


@dataclass(frozen=True, slots=True)
class Preempted:
    request_id: str
    now_s: float
    cause: PreemptCause
    num_lost_tokens: int
    """Computed tokens given up; what the prefix cache still holds at resumption comes back."""


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


Event = Queued | Rejected | Admitted | Preempted | FirstToken | Tokens | Finished
