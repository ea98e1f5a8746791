"""What crosses between a scheduler and whatever runs its steps.

A `StepPlan` is a packed batch: its entries are sequences, decodes first, each with a run of tokens to compute. The
arrays may be views of the scheduler's own state and are valid until `apply`; who keeps a plan longer copies it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from expediter.core.events import Event
from expediter.core.request import RequestState, TokenArray

IntArray = npt.NDArray[np.int32]

NO_COPIES: Final[IntArray] = np.empty((2, 0), np.int32)


class BlockMoves(NamedTuple):
    """Blocks whose contents move between device and host: `sources[i]` to `targets[i]`, int32, shape [num_blocks].

    The targets are distinct.
    """

    sources: IntArray
    targets: IntArray

    @property
    def num_blocks(self) -> int:
        return len(self.sources)


NO_MOVES: Final = BlockMoves(np.empty(0, np.int32), np.empty(0, np.int32))


class StepFeatures(NamedTuple):
    """The numbers that a step's duration depends on (DESIGN: step-time model).

    Attributes:
        num_tokens: tokens computed in the step.
        num_seqs: entries of the batch.
        num_decodes: entries that compute one token after their prompt.
        decode_context_tokens: sum over decodes of the KV tokens they read, the new one included.
        prefill_attention: sum over chunks of chunk * (prefix + chunk / 2), in tokens squared.
        num_prefill_tokens: tokens of all chunks.
    """

    num_tokens: int
    num_seqs: int
    num_decodes: int
    decode_context_tokens: int
    prefill_attention: float

    @property
    def num_prefill_tokens(self) -> int:
        return self.num_tokens - self.num_decodes

    def later(self, num_steps: int) -> StepFeatures:
        """Return those of the same plan that many steps later, if at most one entry is no decode (exactly)."""
        if not num_steps:
            return self
        return self._replace(
            decode_context_tokens=self.decode_context_tokens + num_steps * self.num_decodes,
            prefill_attention=self.prefill_attention + num_steps * self.num_prefill_tokens**2,
        )


class Admission(NamedTuple):
    """A sequence that enters the running set with this plan; the executor sets its slot up anew.

    Attributes:
        slot: row that it occupies until it leaves.
        state: the request; its `output` holds what was generated before a preemption.
        tokens: all known tokens, int32, shape [num_known_tokens].
        num_cached_tokens: leading tokens whose KV is already in its blocks, or moves into them with this plan. All of
            them for a follower: it computes nothing until it samples from its leader's row (`StepPlan.sample_slots`)
            or takes its leader's place.
    """

    slot: int
    state: RequestState
    tokens: TokenArray
    num_cached_tokens: int


@dataclass(slots=True)
class StepPlan:
    """The decision for one forward pass.

    Attributes:
        step_id: increasing; `apply` takes results in this order only.
        num_decodes: entries [0, num_decodes) are one-token decodes, the rest are chunks.
        slots: row of each entry, int32, shape [num_seqs].
        starts: computed tokens before the step = position of the first new token, int32, shape [num_seqs].
        lengths: new tokens per entry, int32, shape [num_seqs]; 1 for decodes.
        tokens: the new tokens, packed in entry order, int32, shape [sum(lengths)].
        sampled: entries whose last token yields an output token, intp, shape [num_sampled]; ascending. The leader of a
            group comes once for each of its sequences, itself first.
        sample_slots: the sequence that each sampled token is for, by slot, int32, shape [num_sampled]: its sampling
            parameters apply. It differs from the entry's own slot where a group forks.
        copies: blocks to copy whole, source and destination ids, int32, shape [2, num_copies]; destinations are
            distinct, and none is a source. They complete the step before, so an executor makes them ahead of anything
            else that this plan asks for.
        block_tables: logical block -> block id, int32, shape [max_num_seqs, max_blocks]; index it by slot. Column c of
            a row is valid for c < ceil((start + length) / block_size).
        admitted: sequences that entered with this plan.
        budget_tokens: most tokens that the step might compute.
        num_steps: consecutive steps that this plan stands for, above 1 only in simulation (`scheduling.runs`): each
            entry goes on by its length in each; who is no decode has its further tokens in its `Admission`.
        events: what planning itself did: admissions and preemptions.
        swap_out: device blocks to host blocks, after the copies and before anything else of the plan: the device
            blocks may be handed out again in the same plan.
        swap_in: host blocks to device blocks, after the swaps out and before the forward pass; no host block is
            written and read in one plan.
    """

    step_id: int
    num_decodes: int
    slots: IntArray
    starts: IntArray
    lengths: IntArray
    tokens: IntArray
    sampled: npt.NDArray[np.intp]
    block_tables: IntArray
    features: StepFeatures
    admitted: tuple[Admission, ...]
    events: list[Event]
    sample_slots: IntArray
    copies: IntArray = field(default_factory=lambda: NO_COPIES)
    budget_tokens: int = 0
    num_steps: int = 1
    swap_out: BlockMoves = NO_MOVES
    swap_in: BlockMoves = NO_MOVES

    @property
    def num_seqs(self) -> int:
        return len(self.slots)

    @property
    def num_swapped_blocks(self) -> int:
        """Blocks that move between device and host, both ways together."""
        return len(self.swap_out.sources) + len(self.swap_in.sources)

    @property
    def is_empty(self) -> bool:
        """Nothing to run; such a plan is not executed and not applied."""
        return not len(self.slots)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one output token: its own, and the best alternatives, best first."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class SequenceFailure:
    """A sequence that cannot go on, through no fault of the others; the message is for its client."""

    request_id: str
    message: str


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced.

    Attributes:
        step_id: of the plan.
        tokens: int32, shape [num_steps, num_sampled], in the order of `plan.sampled`.
        elapsed_s: how long the executor took for all steps (measured, or modelled in simulation).
        durations_s: of each step, if there are several.
        logprobs: per sampled entry, None where not asked for; None when nobody asked.
        failed_host_blocks: host blocks of the plan's moves whose contents did not arrive, out or in. Entries of the
            plan that would have read them have results of no meaning.
        failures: sampled sequences that cannot go on: their tokens mean nothing. Whoever drives the scheduler aborts
            them before it applies the result.
    """

    step_id: int
    tokens: IntArray
    elapsed_s: float
    logprobs: tuple[TokenLogprobs | None, ...] | None = None
    durations_s: tuple[float, ...] | None = None
    failed_host_blocks: tuple[int, ...] = ()
    failures: tuple[SequenceFailure, ...] = ()
