"""What a trace asks for, request by request, as far as it does not depend on who serves it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from expediter.core.slo import NO_SLO, Slo, SloClass
from expediter.sim.trace import SeenPrefixes, Trace

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_NEVER: Final = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """A row per sequence, in order of arrival; all arrays of shape [n].

    Attributes:
        arrival_s: times.
        input_tokens, output_tokens: lengths.
        reusable_tokens: longest beginning of the prompt that another request has, too: the most that a prefix cache can
            hold when the request starts, whoever came first.
        repeated_tokens: beginning of the prompt that an earlier request has. Over any set of requests, what is left of
            their prompts is computed at least once somewhere.
        ttft_s, tpot_s, e2e_s: targets; infinite where there is none.
    """

    arrival_s: Floats
    input_tokens: Ints
    output_tokens: Ints
    reusable_tokens: Ints
    repeated_tokens: Ints
    ttft_s: Floats
    tpot_s: Floats
    e2e_s: Floats

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def latest_end_s(self) -> Floats:
        """When each must have ended to meet its targets; infinite where nothing says so."""
        # An output of one token has no gaps, so its TPOT cannot be missed: 0 gaps take 0 s, not 0 * inf.
        gaps = self.output_tokens - 1
        gaps_s = np.where(gaps > 0, np.where(gaps > 0, self.tpot_s, 0.0) * gaps, 0.0)
        return self.arrival_s + np.minimum(self.e2e_s, self.ttft_s + gaps_s)


def demand_of(trace: Trace, slo: Slo, classes: Mapping[str, SloClass]) -> Demand:
    """Return what a trace asks for.

    Args:
        slo: of requests that have neither targets nor a class.
        classes: by name; names without an entry give nothing.
    """
    targets = _targets(trace, slo, classes)
    reusable, repeated = _reuse(trace)
    copies = np.ones(len(trace), np.int64) if trace.num_sequences is None else trace.num_sequences.astype(np.int64)
    leads = np.zeros(int(copies.sum()), bool)
    leads[np.cumsum(copies) - copies] = True
    inputs = np.repeat(trace.input_tokens.astype(np.int64), copies)
    return Demand(
        arrival_s=np.repeat(trace.arrival_s, copies),
        input_tokens=inputs,
        output_tokens=np.repeat(trace.output_tokens.astype(np.int64), copies),
        reusable_tokens=np.repeat(reusable, copies),
        # The sequences of a request share its prompt: only the first computes it.
        repeated_tokens=np.where(leads, np.repeat(repeated, copies), inputs),
        ttft_s=np.repeat(targets[:, 0], copies),
        tpot_s=np.repeat(targets[:, 1], copies),
        e2e_s=np.repeat(targets[:, 2], copies),
    )


def _targets(trace: Trace, slo: Slo, classes: Mapping[str, SloClass]) -> Floats:
    """Return TTFT, TPOT and E2E targets as a simulation gives them out, float64, shape [requests, 3]."""
    rows: dict[tuple[str, Slo], tuple[float, ...]] = {}
    names, slos = trace.slo_classes or ("",) * len(trace), trace.slos or (NO_SLO,) * len(trace)
    out = np.empty((len(trace), 3))
    for row, key in enumerate(zip(names, slos, strict=True)):
        if key not in rows:
            name, own = key
            chosen = classes[name].with_targets(own) if name in classes else slo if own == NO_SLO else own
            rows[key] = tuple(_NEVER if t is None else t for t in (chosen.ttft_s, chosen.tpot_s, chosen.e2e_s))
        out[row] = rows[key]
    return out


def _reuse(trace: Trace) -> tuple[Ints, Ints]:
    """Return reusable and repeated tokens of each request."""
    num = len(trace)
    reusable, repeated = np.zeros(num, np.int64), np.zeros(num, np.int64)
    if not len(trace.prefix_ids):
        return reusable, repeated
    _, places, counts = np.unique(trace.prefix_ids, return_inverse=True, return_counts=True)
    is_shared = counts[places] > 1
    seen = SeenPrefixes()
    ids, offsets, block = trace.prefix_ids.tolist(), trace.prefix_offsets.tolist(), trace.prefix_block_tokens
    for row in range(num):
        begin, end = offsets[row], offsets[row + 1]
        shared = is_shared[begin:end]
        num_shared = int(shared.argmin()) if not shared.all() else end - begin
        num_input = int(trace.input_tokens[row])
        reusable[row] = min(num_shared * block, num_input)
        repeated[row] = seen.reused_tokens(ids[begin:end], block, num_input)
    return reusable, repeated
