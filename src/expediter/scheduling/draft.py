"""A step while it is being decided, and its composition into a plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from expediter.core.events import Event
from expediter.core.plan import Admission, IntArray, StepFeatures, StepPlan
from expediter.core.request import RequestState
from expediter.scheduling.decoding import DecodingBatch


@dataclass(slots=True)
class Draft:
    """What one call of `plan` has decided so far.

    Attributes:
        budget: tokens that may still be added.
        chunks: planned tokens of prefilling sequences by slot, in batch order; 0 where the budget ran out.
        preempted: requests to queue again once the step is decided, so that they do not return within it.
    """

    now_s: float
    budget: int
    chunks: dict[int, int] = field(default_factory=dict)
    admitted: list[Admission] = field(default_factory=list)
    preempted: list[RequestState] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def add_chunk(self, state: RequestState) -> None:
        """Plan as much of a sequence's uncomputed tokens as the budget allows."""
        chunk = min(state.num_known_tokens - state.num_computed_tokens, self.budget)
        self.chunks[state.slot] = chunk
        self.budget -= chunk


def compose(
    step_id: int, draft: Draft, decoding: DecodingBatch, prefilling: Iterable[RequestState], tables: IntArray
) -> StepPlan:
    """Pack a draft into a plan: decodes first, then the chunks in order of admission.

    The arrays are copies, so that an abort while the plan is in flight cannot change them.
    """
    size = decoding.size
    slots = decoding.slots[:size].copy()
    starts = decoding.counters[DecodingBatch.COMPUTED, :size].copy()
    tokens = decoding.last_tokens[:size].copy()
    lengths = np.ones(size, np.int32)
    sampled = np.arange(size)
    attention = 0.0
    entries = [(state, draft.chunks[state.slot]) for state in prefilling if draft.chunks.get(state.slot)]
    if entries:
        pieces = [tokens]
        last: list[int] = []
        for index, (state, chunk) in enumerate(entries, start=size):
            start = state.num_computed_tokens
            pieces.append(np.frombuffer(state.token_bytes, np.int32, chunk, 4 * start))
            attention += chunk * (start + chunk / 2)
            if start + chunk == state.num_known_tokens:
                last.append(index)
        tokens = np.concatenate(pieces)
        slots = np.concatenate((slots, np.array([state.slot for state, _ in entries], np.int32)))
        starts = np.concatenate((starts, np.array([state.num_computed_tokens for state, _ in entries], np.int32)))
        lengths = np.concatenate((lengths, np.array([chunk for _, chunk in entries], np.int32)))
        sampled = np.concatenate((sampled, np.array(last, np.intp)))
    return StepPlan(
        step_id=step_id,
        num_decodes=size,
        slots=slots,
        starts=starts,
        lengths=lengths,
        tokens=tokens,
        sampled=sampled,
        block_tables=tables,
        features=StepFeatures(len(tokens), len(slots), size, decoding.context_tokens, attention),
        admitted=tuple(draft.admitted),
        events=draft.events,
    )
