"""From logits to tokens. Parameters live per slot and are overwritten when the slot is given to another request.

The order of operations is vLLM's: logprobs of the raw logits; logit_bias, min_tokens, penalties; the grammar's mask;
greedy, or temperature, min-p, top-k, top-p and the draw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from expediter.core.errors import InvariantError
from expediter.core.plan import Admission, IntArray, SequenceFailure, TokenLogprobs
from expediter.core.request import Request, TokenArray
from expediter.engine.matching import MaskArray, Matchers
from expediter.engine.noise import gumbel, noise_keys
from expediter.engine.sampling_params import MIN_TEMPERATURE

_IntpArray = npt.NDArray[np.intp]

_RANDOM: Final = 1
_ADJUSTED: Final = 2
_LOGPROBS: Final = 4
_CONSTRAINED: Final = 8

_NOTHING_ALLOWED: Final = "the model gives no token that the grammar allows"

_NUCLEUS_WIDTH: Final = 256
"""Candidates looked at first for top-p alone; rows whose nucleus is wider are sorted as a whole."""

_LOWEST_LOGPROB: Final = -9999.0
"""Stands for minus infinity, which JSON cannot carry (vLLM's number)."""


@dataclass(slots=True, eq=False)
class _Adjustments:
    """What changes a request's logits before the draw.

    Attributes:
        seen: tokens of prompt or output, bool, shape [vocab_size].
        counts: of output tokens, float32, shape [vocab_size].
    """

    bias_ids: torch.Tensor
    biases: torch.Tensor
    min_tokens: int
    stop_ids: torch.Tensor
    repetition: float
    presence: float
    frequency: float
    seen: torch.Tensor | None
    counts: torch.Tensor | None


class _Constraint(NamedTuple):
    """Rows that have a grammar, their masks, and what went wrong with some, by position among them."""

    rows: _IntpArray
    masks: MaskArray
    errors: dict[int, str]


class Sampled(NamedTuple):
    """What a step drew.

    Attributes:
        tokens: int32, shape [num_rows].
        logprobs: of each row, None where not asked for; None in place of all when nobody asked.
        failures: sequences whose grammar allows nothing that could be drawn; their rows' tokens mean nothing.
    """

    tokens: TokenArray
    logprobs: tuple[TokenLogprobs | None, ...] | None
    failures: tuple[SequenceFailure, ...] = ()


class Sampler:
    """Draws one token per sampled entry of a step.

    Args:
        seed: source of the seeds of requests that bring none.
        matchers: of requests with a grammar; None if there are none.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device,
        seed: int | None = None,
        matchers: Matchers | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._rng = np.random.default_rng(seed)
        self._flags = np.zeros(max_num_seqs, dtype=np.uint8)
        self._num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._seeds = np.zeros(max_num_seqs, dtype=np.uint64)
        # temperature, min_p, top_p; top_k apart because float32 would round it
        self._settings = np.ones((max_num_seqs, 3), dtype=np.float32)
        self._top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_logprobs = np.zeros(max_num_seqs, dtype=np.int64)
        self._adjustments: dict[int, _Adjustments] = {}
        self._matchers = matchers
        self._constrained_ids: dict[int, str] = {}
        self._all_ids = torch.arange(vocab_size, dtype=torch.int32, device=device)[None]

    def admit(self, admission: Admission) -> None:
        """Set a slot up for a request that enters or, after a preemption, re-enters the running set."""
        slot, request = admission.slot, admission.state.request
        params = request.sampling
        flags = _RANDOM if params.temperature >= MIN_TEMPERATURE else 0
        if params.logprobs is not None:
            flags |= _LOGPROBS
            self._num_logprobs[slot] = min(params.logprobs, self._vocab_size)
        self._adjustments.pop(slot, None)
        if _is_adjusted(request):
            flags |= _ADJUSTED
            self._adjustments[slot] = self._adjust_of(request, admission.tokens)
        if request.grammar is not None:
            if self._matchers is None:
                raise InvariantError(f"request {request.request_id} has a grammar, and this sampler no matchers")
            flags |= _CONSTRAINED
            self._constrained_ids[slot] = request.request_id
            self._matchers.admit(slot, request.grammar, admission.tokens[request.num_prompt_tokens :].tolist())
        self._flags[slot] = flags
        self._num_prompt_tokens[slot] = request.num_prompt_tokens
        if flags & _RANDOM:
            self._settings[slot] = params.temperature, params.min_p, params.top_p
            self._top_k[slot] = params.top_k if 0 < params.top_k < self._vocab_size else 0
            seed = int(self._rng.integers(2**63)) if params.seed is None else params.seed
            self._seeds[slot] = np.uint64(seed % 2**64)

    def sample(self, logits: torch.Tensor, slots: IntArray, num_known: npt.NDArray[np.int64]) -> Sampled:
        """Draw the next token of each row.

        Args:
            logits: of each sampled entry's last token, shape [n, vocab_size]; may be overwritten.
            slots: of each row, shape [n].
            num_known: tokens of each sequence so far, prompt and output, shape [n].
        """
        flags = self._flags[slots]
        if not flags.any():
            return Sampled(_to_numpy(_argmax(logits)), None)
        logits = logits.float()
        with_logprobs = np.flatnonzero(flags & _LOGPROBS)
        raw = torch.log_softmax(logits[self._index(with_logprobs)], dim=-1) if len(with_logprobs) else None
        output_indices = num_known - self._num_prompt_tokens[slots]
        adjusted = np.flatnonzero(flags & _ADJUSTED)
        for row in adjusted:
            _adjust(logits[row], self._adjustments[int(slots[row])], int(output_indices[row]))
        constrained = np.flatnonzero(flags & _CONSTRAINED)
        constraint = self._constrain(logits, constrained, slots) if len(constrained) else None
        chosen = _argmax(logits)
        random = np.flatnonzero(flags & _RANDOM)
        if len(random):
            rows = self._index(random)
            chosen[rows] = self._draw(logits[rows], slots[random], output_indices[random])
        tokens = _to_numpy(chosen)
        for row in adjusted:
            _count(self._adjustments[int(slots[row])], int(tokens[row]))
        failures = () if constraint is None else self._advance(constraint, slots, tokens)
        return Sampled(tokens, None if raw is None else self._report(raw, with_logprobs, slots, tokens), failures)

    def _constrain(self, logits: torch.Tensor, rows: _IntpArray, slots: IntArray) -> _Constraint:
        """Rule out, in these rows of the logits, what their grammars do not allow."""
        assert self._matchers is not None
        masks, errors = self._matchers.masks(slots[rows].tolist())
        intact = np.array([i for i in range(len(rows)) if i not in errors], dtype=np.intp)
        ruled_out = np.unpackbits(~masks[intact], axis=1, bitorder="little", count=self._vocab_size).view(np.bool_)
        for row, columns in zip(rows[intact].tolist(), torch.from_numpy(ruled_out).to(self._device), strict=True):
            logits[row].masked_fill_(columns, -torch.inf)
        return _Constraint(rows, masks, errors)

    def _advance(self, constraint: _Constraint, slots: IntArray, tokens: TokenArray) -> tuple[SequenceFailure, ...]:
        """Tell the matchers what was drawn; return who got nothing that its grammar allows."""
        assert self._matchers is not None
        rows, masks, errors = constraint
        drawn = tokens[rows]
        is_allowed = masks[np.arange(len(rows)), drawn >> 3] >> (drawn & 7) & 1
        errors |= {i: _NOTHING_ALLOWED for i in np.flatnonzero(is_allowed == 0).tolist() if i not in errors}
        intact = [i for i in range(len(rows)) if i not in errors]
        self._matchers.advance(slots[rows[intact]].tolist(), drawn[intact].tolist())
        return tuple(SequenceFailure(self._constrained_ids[int(slots[rows[i]])], errors[i]) for i in sorted(errors))

    def _index(self, rows: _IntpArray) -> torch.Tensor:
        return torch.from_numpy(rows).to(self._device)

    def _adjust_of(self, request: Request, tokens: TokenArray) -> _Adjustments:
        params = request.sampling
        seen = counts = None
        if _is_penalised(request):
            known = torch.from_numpy(tokens.astype(np.int64)).to(self._device)
            seen = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device)
            seen[known] = True
            counts = torch.bincount(known[request.num_prompt_tokens :], minlength=self._vocab_size).float()
        stop_ids = [token for token in request.stop_token_ids if 0 <= token < self._vocab_size]
        return _Adjustments(
            bias_ids=torch.tensor([token for token, _ in params.logit_bias], dtype=torch.int64, device=self._device),
            biases=torch.tensor([bias for _, bias in params.logit_bias], dtype=torch.float32, device=self._device),
            min_tokens=request.min_tokens,
            stop_ids=torch.tensor(stop_ids, dtype=torch.int64, device=self._device),
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            seen=seen,
            counts=counts,
        )

    def _draw(self, logits: torch.Tensor, slots: IntArray, output_indices: npt.NDArray[np.int64]) -> torch.Tensor:
        """Return one random token per row, int64, shape [n]."""
        settings = torch.from_numpy(self._settings[slots]).to(self._device)
        top_k = self._top_k[slots]
        keys = torch.from_numpy(noise_keys(self._seeds[slots], output_indices)).to(self._device)
        scaled = logits / settings[:, :1]
        if (self._settings[slots, 1] > 0).any():
            # min_p is relative to the best token: p >= min_p * p_max, which needs no normalisation.
            scaled.masked_fill_(scaled < scaled.amax(dim=-1, keepdim=True) + settings[:, 1:2].log(), -torch.inf)
        is_filtered = (top_k > 0) | (self._settings[slots, 2] < 1)
        if not is_filtered.any():
            return _argmax(scaled + gumbel(keys, self._all_ids))
        drawn = torch.empty(len(slots), dtype=torch.int64, device=self._device)
        plain = self._index(np.flatnonzero(~is_filtered))
        if len(plain):
            drawn[plain] = _argmax(scaled[plain] + gumbel(keys[plain], self._all_ids))
        rows = self._index(np.flatnonzero(is_filtered))
        drawn[rows] = _draw_filtered(scaled[rows], keys[rows], top_k[is_filtered], settings[rows, 2:], _NUCLEUS_WIDTH)
        return drawn

    def _report(
        self, raw: torch.Tensor, rows: _IntpArray, slots: IntArray, tokens: TokenArray
    ) -> tuple[TokenLogprobs | None, ...]:
        own = raw.gather(1, self._index(tokens[rows].astype(np.intp))[:, None])
        ranks = (raw > own).sum(dim=-1).add_(1).tolist()
        wanted = self._num_logprobs[slots[rows]].tolist()
        best, best_ids = raw.topk(max(wanted), dim=-1)
        own_values, best_values = _finite(own[:, 0]).tolist(), _finite(best).tolist()
        reports: list[TokenLogprobs | None] = [None] * len(slots)
        for i, (row, num_top, ids) in enumerate(zip(rows.tolist(), wanted, best_ids.tolist(), strict=True)):
            top = tuple(zip(ids[:num_top], best_values[i][:num_top], strict=True))
            reports[row] = TokenLogprobs(logprob=own_values[i], rank=ranks[i], top=top)
        return tuple(reports)


def _is_penalised(request: Request) -> bool:
    params = request.sampling
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def _is_adjusted(request: Request) -> bool:
    holds_back_stops = request.min_tokens > 0 and len(request.stop_token_ids) > 0
    return holds_back_stops or bool(request.sampling.logit_bias) or _is_penalised(request)


def _adjust(row: torch.Tensor, change: _Adjustments, output_index: int) -> None:
    """Change one row of logits, shape [vocab_size], in place."""
    if len(change.bias_ids):
        row.index_add_(0, change.bias_ids, change.biases)
    if output_index < change.min_tokens:
        row[change.stop_ids] = -torch.inf
    if change.seen is None or change.counts is None:
        return
    if change.repetition != 1:
        row.copy_(torch.where(change.seen, torch.where(row > 0, row / change.repetition, row * change.repetition), row))
    row.sub_(change.counts, alpha=change.frequency)
    row.sub_((change.counts > 0).float(), alpha=change.presence)


def _count(change: _Adjustments, token: int) -> None:
    if change.seen is not None and change.counts is not None:
        change.seen[token] = True
        change.counts[token] += 1


def _draw_filtered(
    scaled: torch.Tensor, keys: torch.Tensor, top_k: npt.NDArray[np.int64], top_p: torch.Tensor, nucleus_width: int
) -> torch.Tensor:
    """Draw among the top-k tokens and, of those, the smallest set whose probability reaches top-p.

    Args:
        scaled: logits over temperature, shape [n, vocab_size].
        top_k: 0 for none, shape [n].
        top_p: shape [n, 1].
        nucleus_width: candidates to consider for rows without top-k; they are redone in full if that does not do.
    """
    vocab_size = scaled.shape[1]
    width = min(vocab_size, max(int(top_k.max()), nucleus_width if (top_k == 0).any() else 1))
    values, ids = scaled.topk(width, dim=-1)
    limit = torch.from_numpy(np.where(top_k > 0, top_k, vocab_size)).to(scaled.device)[:, None]
    inside = torch.arange(width, device=scaled.device) < limit
    among_top_k = values.masked_fill(~inside, -torch.inf).logsumexp(dim=-1, keepdim=True)
    total = torch.where(limit < vocab_size, among_top_k, scaled.logsumexp(dim=-1, keepdim=True))
    probabilities = (values - total).double().exp()
    cumulated = probabilities.cumsum(dim=-1)
    inside &= cumulated - probabilities < top_p
    inside[:, 0] = True  # the best token always stays, however small top_p is
    scores = (values + gumbel(keys, ids.int())).masked_fill_(~inside, -torch.inf)
    drawn = ids.gather(1, scores.argmax(dim=-1, keepdim=True))[:, 0]
    if width < vocab_size:
        short = torch.nonzero((limit[:, 0] == vocab_size) & (cumulated[:, -1] < top_p[:, 0]))[:, 0]
        if len(short):
            drawn[short] = _draw_filtered(scaled[short], keys[short], top_k[_to_numpy(short)], top_p[short], vocab_size)
    return drawn


def _argmax(scores: torch.Tensor) -> torch.Tensor:
    """Return the first best column of each row, int64, shape [n]."""
    if scores.device.type == "cpu":  # numpy's argmax is vectorised, torch's on CPU is not: 0.1 ms against 1.3
        return torch.from_numpy(scores.float().numpy().argmax(axis=-1))
    return scores.argmax(dim=-1)


def _finite(logprobs: torch.Tensor) -> torch.Tensor:
    return logprobs.nan_to_num(nan=_LOWEST_LOGPROB, neginf=_LOWEST_LOGPROB).clamp_(min=_LOWEST_LOGPROB)


def _to_numpy(tokens: torch.Tensor) -> TokenArray:
    return tokens.to("cpu", torch.int32).numpy()
