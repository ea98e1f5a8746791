"""A toy language model whose tokens depend on what its KV blocks hold, so that a wrong or stale block shows."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from expediter.core.clock import VirtualClock
from expediter.core.errors import InvariantError, RequestError
from expediter.core.plan import IntArray, StepPlan, StepResult
from expediter.core.ports import ExecutorLimits, StepTimeModel, run_s
from expediter.core.request import Grammar, TokenArray

_U64 = npt.NDArray[np.uint64]
_MASK: Final = (1 << 64) - 1
_TOKEN_FACTOR: Final = 0x9E3779B97F4A7C15
_POSITION_FACTOR: Final = 0xC2B2AE3D27D4EB4F
_MIX_1: Final = 0xBF58476D1CE4E5B9
_MIX_2: Final = 0x94D049BB133111EB
_ANYWHERE: Final = -2
"""Where a follower goes on: behind its leader, wherever that one stands."""


def toy_generate(
    prompt: TokenArray | list[int], num_tokens: int, vocab_size: int, seed: int | None = None
) -> list[int]:
    """Return what the toy model generates after `prompt`, computed from the prompt alone.

    Shares no code with the blocks of `FakeExecutor`: plain integers, one token at a time. The KV content of position p
    is content(p - 1) + mix(token, p); the next token is mix(sum of (2p + 1) * content(p) + seed) modulo the vocabulary.

    Args:
        prompt: token ids, at least one.
        num_tokens: how many tokens to generate, stop tokens ignored.
        vocab_size: of the `FakeExecutor` to compare with.
        seed: of the request's sampling; no seed counts as 0.
    """
    tokens = [int(token) for token in prompt]
    output: list[int] = []
    content = digest = 0
    position = 0
    while len(output) < num_tokens:
        for token in tokens:
            content = (content + _mix_int(token * _TOKEN_FACTOR + (position + 1) * _POSITION_FACTOR)) & _MASK
            digest = (digest + (2 * position + 1) * content) & _MASK
            position += 1
        tokens = [_mix_int(digest + (seed or 0) * _TOKEN_FACTOR) % vocab_size]
        output += tokens
    return output


def _mix_int(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def _mix(values: _U64) -> _U64:
    """splitmix64's finalizer on an array; uint64 arrays wrap silently."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_MIX_1)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_MIX_2)
    return values ^ (values >> np.uint64(31))


class FakeExecutor:
    """`Executor` over the toy model of `toy_generate`: deterministic, numpy only. Of the sampling only the seed counts.

    Each KV slot holds the chained content of its position. A step reads the content before its first token and the
    whole context through the block table; a block that is missing, stale, shared by mistake or in the wrong order
    therefore changes the tokens. The pool starts out full of garbage for the same reason; so does the host tier, and
    what was read from it is garbage again afterwards.

    Plans with `num_steps > 1` feed each decode its own token back, as so many single plans would.

    Args:
        limits: what it claims to hold; `block_swap_s` is added to a step for every block that moves.
        step_time: fills `elapsed_s`; without it every step takes 0 s.
        clock: advanced by each step's duration, step by step.
    Raises:
        InvariantError: from `execute`, when the plan itself is inconsistent: a slot twice, an entry that does not go
            on where its sequence stopped, a block id or token out of range, one KV slot written by two entries, a
            copy whose source is overwritten or whose destination is named twice, a move to one block twice.
    Attributes:
        broken_host_blocks: moves from and to these fail, and the result says so; for tests to fill.
    """

    def __init__(
        self, limits: ExecutorLimits, *, step_time: StepTimeModel | None = None, clock: VirtualClock | None = None
    ) -> None:
        self._limits = limits
        self._step_time = step_time
        self._clock = clock
        num_kv_slots = limits.num_blocks * limits.block_size
        self._kv: _U64 = _mix(np.arange(1, num_kv_slots + 1, dtype=np.uint64))
        num_host_slots = limits.num_host_blocks * limits.block_size
        self._host: _U64 = _mix(np.arange(1, num_host_slots + 1, dtype=np.uint64) << np.uint64(32))
        self.broken_host_blocks: set[int] = set()
        self._computed = np.full(limits.max_num_seqs, -1, dtype=np.int64)
        self._known: dict[int, TokenArray] = {}
        self._seeds: _U64 = np.zeros(limits.max_num_seqs, dtype=np.uint64)
        self.num_steps_executed = 0
        """Single steps run so far; a plan counts for its `num_steps`."""

    @property
    def limits(self) -> ExecutorLimits:
        return self._limits

    def execute(self, plan: StepPlan) -> StepResult:
        """Run the plan on the toy model; see the class for what makes it raise InvariantError."""
        self._check(plan)
        self._copy(plan.copies)
        failed = self._swap(plan)
        tokens = np.empty((plan.num_steps, len(plan.sampled)), dtype=np.int32)
        tokens[0] = self._sample(plan, self._forward(plan, plan.starts, plan.tokens))
        for step in range(1, plan.num_steps):
            starts = plan.starts + step * plan.lengths
            inputs = np.concatenate((tokens[step - 1], self._chunk(plan, starts)))
            tokens[step] = self._sample(plan, self._forward(plan, starts, inputs))
        ends = plan.starts + plan.lengths * plan.num_steps
        self._computed[plan.slots] = ends
        self._computed[plan.sample_slots] = ends[plan.sampled]
        self.num_steps_executed += plan.num_steps
        durations_s = self._elapse(plan)
        return StepResult(
            step_id=plan.step_id,
            tokens=tokens,
            elapsed_s=sum(durations_s),
            failed_host_blocks=failed,
            durations_s=durations_s if plan.num_steps > 1 else None,
        )

    def prepare(self, grammar: Grammar) -> None:  # noqa: ARG002 - the protocol's signature
        """Refuse: the toy model's tokens follow no grammar."""
        raise RequestError("the toy model follows no grammar", param="grammar")

    def close(self) -> None:
        self._kv = np.zeros(0, dtype=np.uint64)

    def _elapse(self, plan: StepPlan) -> tuple[float, ...]:
        if self._step_time is None:
            return (0.0,) * plan.num_steps
        if plan.num_steps == 1:
            moving_s = plan.num_swapped_blocks * (self._limits.block_swap_s or 0.0)
            durations = [self._step_time.step_time_s(plan.features) + moving_s]
        else:
            durations = run_s(self._step_time, plan.features, plan.num_steps)
        if self._clock is not None:
            for duration_s in durations:
                self._clock.advance_to(self._clock.now() + duration_s)
        return tuple(durations)

    def _check(self, plan: StepPlan) -> None:
        limits = self._limits
        if not len(self._kv):
            raise InvariantError("executor is closed")
        for admission in plan.admitted:
            self._known[admission.slot] = admission.tokens
            self._seeds[admission.slot] = (admission.state.request.sampling.seed or 0) & _MASK
            is_follower = admission.num_cached_tokens == len(admission.tokens)
            self._computed[admission.slot] = _ANYWHERE if is_follower else admission.num_cached_tokens
        if len(np.unique(plan.slots)) != plan.num_seqs:
            raise InvariantError("a slot appears twice in one plan")
        if plan.slots.min() < 0 or plan.slots.max() >= limits.max_num_seqs:
            raise InvariantError("slot out of range")
        stopped = self._computed[plan.slots]
        if ((stopped != plan.starts) & (stopped != _ANYWHERE)).any():
            raise InvariantError(
                f"entries start at {plan.starts.tolist()}, their sequences stopped at {stopped.tolist()}"
            )
        if (
            len(plan.tokens) != plan.lengths.sum()
            or plan.lengths.min() < 1
            or (plan.lengths[: plan.num_decodes] > 1).any()
        ):
            raise InvariantError("lengths do not describe the packed tokens")
        if plan.tokens.min() < 0 or plan.tokens.max() >= limits.vocab_size:
            raise InvariantError("token out of vocabulary")
        if (plan.starts + plan.lengths * plan.num_steps).max() > limits.max_model_len:
            raise InvariantError("sequence exceeds max_model_len")
        if plan.num_steps > 1 and not (plan.num_seqs - 1 <= plan.num_decodes == len(plan.sampled)):
            raise InvariantError("only sampled decodes, and one chunk that samples nothing, can be repeated")
        if plan.sample_slots.shape != plan.sampled.shape or len(np.unique(plan.sample_slots)) != len(plan.sampled):
            raise InvariantError("a plan samples twice for one slot, or for none")

    def _chunk(self, plan: StepPlan, starts: IntArray) -> TokenArray:
        """Return the tokens of the entry that is no decode, if there is one, from `starts` on."""
        if plan.num_decodes == plan.num_seqs:
            return np.empty(0, np.int32)
        start = int(starts[-1])
        return self._known[int(plan.slots[-1])][start : start + int(plan.lengths[-1])]

    def _copy(self, copies: IntArray) -> None:
        sources, destinations = copies
        if len(np.unique(destinations)) != len(destinations) or np.isin(sources, destinations).any():
            raise InvariantError("a copy overwrites another's source or destination")
        blocks = self._kv.reshape(-1, self._limits.block_size)
        blocks[destinations] = blocks[sources]

    def _sample(self, plan: StepPlan, digests: _U64) -> TokenArray:
        seeds = self._seeds[plan.sample_slots] * np.uint64(_TOKEN_FACTOR)
        return (_mix(digests[plan.sampled] + seeds) % np.uint64(self._limits.vocab_size)).astype(np.int32)

    def _swap(self, plan: StepPlan) -> tuple[int, ...]:
        """Move blocks between pool and host; return the host blocks of the moves that failed."""
        out, into, size = plan.swap_out, plan.swap_in, self._limits.block_size
        if not plan.num_swapped_blocks:
            return ()
        self._check_moves(out.sources, out.targets, targets=out.targets)
        self._check_moves(into.targets, into.sources, targets=into.targets)
        if np.isin(out.targets, into.sources).any():
            raise InvariantError("a host block is written and read in one plan")
        pool, host = self._kv.reshape(-1, size), self._host.reshape(-1, size)
        works = ~np.isin(out.targets, list(self.broken_host_blocks))
        host[out.targets[works]] = pool[out.sources[works]]
        works = ~np.isin(into.sources, list(self.broken_host_blocks))
        pool[into.targets[works]] = host[into.sources[works]]
        host[into.sources] = _mix(host[into.sources])
        moved = {*out.targets.tolist(), *into.sources.tolist()}
        return tuple(sorted(moved & self.broken_host_blocks))

    def _check_moves(self, device: IntArray, host: IntArray, *, targets: IntArray) -> None:
        for name, blocks, count in (
            ("device", device, self._limits.num_blocks),
            ("host", host, self._limits.num_host_blocks),
        ):
            if len(blocks) and (blocks.min() < 0 or blocks.max() >= count):
                raise InvariantError(f"a move names a {name} block out of range")
        if len(np.unique(targets)) != len(targets):
            raise InvariantError("two moves go to one block")
        if len(device) != len(host):
            raise InvariantError("a move has a block at one end only")

    def _forward(self, plan: StepPlan, starts: IntArray, tokens: TokenArray) -> _U64:
        """Write the new tokens' KV and return the digest of every entry's context, uint64, shape [num_seqs]."""
        ends = starts + plan.lengths
        slots_of_context = self._kv_slots(plan, int(ends.max()))
        row_of_token = np.repeat(np.arange(plan.num_seqs), plan.lengths)
        first_of_entry = np.cumsum(plan.lengths) - plan.lengths
        position = np.arange(len(tokens)) - first_of_entry[row_of_token] + starts[row_of_token]
        written = slots_of_context[row_of_token, position]
        if written.min() < 0 or written.max() >= len(self._kv) or len(np.unique(written)) != len(written):
            raise InvariantError("a plan writes outside the pool, or one KV slot twice")

        previous = self._kv[slots_of_context[np.arange(plan.num_seqs), np.maximum(starts - 1, 0)]]
        previous = np.where(starts > 0, previous, np.uint64(0))
        added = _mix(
            tokens.astype(np.uint64) * np.uint64(_TOKEN_FACTOR)
            + (position + 1).astype(np.uint64) * np.uint64(_POSITION_FACTOR)
        )
        running = np.cumsum(added, dtype=np.uint64)
        before_entry = (running - added)[first_of_entry]
        self._kv[written] = running - before_entry[row_of_token] + previous[row_of_token]

        positions = np.arange(slots_of_context.shape[1], dtype=np.uint64)
        known = positions[None, :] < ends[:, None].astype(np.uint64)
        if (slots_of_context[known] < 0).any() or (slots_of_context[known] >= len(self._kv)).any():
            raise InvariantError("block id out of range")
        contents = self._kv[np.where(known, slots_of_context, 0)]
        weights = np.uint64(2) * positions + np.uint64(1)
        digests: _U64 = np.where(known, contents * weights, np.uint64(0)).sum(axis=1, dtype=np.uint64)
        return digests

    def _kv_slots(self, plan: StepPlan, num_positions: int) -> npt.NDArray[np.int64]:
        """Return where each position of each entry lies in the pool, int64, shape [num_seqs, >= num_positions].

        Entries beyond a sequence's own end are whatever the block table holds there.
        """
        block_size = self._limits.block_size
        num_columns = -(-num_positions // block_size)
        blocks = plan.block_tables[plan.slots, :num_columns].astype(np.int64)
        kv_slots = blocks[:, :, None] * block_size + np.arange(block_size)
        return kv_slots.reshape(plan.num_seqs, num_columns * block_size)
