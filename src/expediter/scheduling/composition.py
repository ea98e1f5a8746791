"""A step that is decided, packed into the arrays of a plan."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from expediter.core.plan import IntArray, StepFeatures, StepPlan
from expediter.core.request import RequestState
from expediter.scheduling.decoding import DecodingBatch
from expediter.scheduling.draft import Draft


class Chunks(NamedTuple):
    """Whom a plan's chunks are for: of each chunk, and of each token sampled from one."""

    states: list[RequestState]
    sampled: list[RequestState]


def compose(draft: Draft, step_id: int) -> tuple[StepPlan, Chunks]:
    """Pack a draft into a plan: decodes first, then the chunks; also return whom the chunks are for.

    The arrays are copies, so that an abort while the plan is in flight cannot change them.
    """
    running = draft.running
    decoding, kv = running.decoding, running.kv
    size = decoding.size if draft.has_decodes else 0
    entries = [(s, draft.chunks[s.slot]) for s in running.prefilling if draft.chunks.get(s.slot)]
    columns = np.empty((3, size + len(entries)), np.int32)
    slots, starts, lengths = columns
    slots[:size] = decoding.slots[:size]
    starts[:size] = decoding.counters[DecodingBatch.COMPUTED, :size]
    lengths[:size] = 1
    tokens = decoding.last_tokens[:size].copy()
    sampled, sample_slots = decoding.rows[:size], slots[:size]
    chunks = Chunks([], [])
    attention = 0.0
    if entries:
        pieces, rows, attention = _pack_chunks(entries, columns, size, chunks)
        tokens = np.concatenate((tokens, *pieces))
        if rows:
            sampled = np.concatenate((sampled, np.array(rows, np.intp)))
            sample_slots = np.concatenate((sample_slots, np.array([s.slot for s in chunks.sampled], np.int32)))
    swap_out, swap_in = kv.swaps.take(is_carried=len(slots) > 0)
    context = decoding.context_tokens if size else 0
    features = StepFeatures(len(tokens), len(slots), size, context, attention)
    if draft.pad_to:
        features = _padded(features, draft.pad_to, lengths, starts)
    plan = StepPlan(
        step_id=step_id,
        num_decodes=size,
        slots=slots,
        starts=starts,
        lengths=lengths,
        tokens=tokens,
        sampled=sampled,
        block_tables=kv.tables.ids,
        features=features,
        admitted=tuple(draft.admitted),
        events=draft.events,
        sample_slots=sample_slots,
        copies=running.take_copies(),
        budget_tokens=draft.full_budget,
        swap_out=swap_out,
        swap_in=swap_in,
    )
    return plan, chunks


def _pack_chunks(
    entries: list[tuple[RequestState, int]], columns: IntArray, first: int, chunks: Chunks
) -> tuple[list[IntArray], list[int], float]:
    """Fill in slot, start and length of each chunk from column `first` on, and whom they are for.

    Returns:
        The tokens of each; the column of each token that is sampled; the work of attention, as in `StepFeatures`.
    """
    pieces: list[IntArray] = []
    rows: list[int] = []
    attention = 0.0
    for index, (state, chunk) in enumerate(entries, start=first):
        start = state.num_computed_tokens
        columns[:, index] = (state.slot, start, chunk)
        pieces.append(np.frombuffer(state.token_bytes, np.int32, chunk, 4 * start))
        attention += chunk * (start + chunk / 2)
        chunks.states.append(state)
        if start + chunk == state.num_known_tokens:
            rows += [index] * len(state.members)
            chunks.sampled.extend(state.members)
    return pieces, rows, attention


def _padded(features: StepFeatures, count: int, lengths: IntArray, starts: IntArray) -> StepFeatures:
    """Count every sequence of a static batch, ended ones included, at the length of the longest."""
    longest, context = int(lengths.max(initial=0)), int((starts + 1).max(initial=0))
    if features.num_decodes:
        return StepFeatures(count, count, count, count * context, 0.0)
    return StepFeatures(count * longest, count, 0, 0, count * longest * longest / 2)
