"""Plans made by hand: drives an `Executor` without a scheduler, block ids and chunk sizes chosen by the test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from expediter.core.errors import InvariantError
from expediter.core.plan import NO_MOVES, Admission, BlockMoves, StepFeatures, StepPlan, StepResult, TokenLogprobs
from expediter.core.ports import Executor
from expediter.core.request import GREEDY, Request, RequestState, SamplingParams, TokenArray


@dataclass(slots=True, eq=False)
class DrivenSequence:
    """A sequence under a `PlanDriver`'s hand.

    Attributes:
        state: as the executor sees it; `output` grows with every sampled token.
        blocks: logical block -> block id.
        num_computed: tokens whose KV exists.
        followers: sequences that fork from this one once it has caught up.
        logprobs: one entry per output token sampled through the driver.
    """

    state: RequestState
    slot: int
    blocks: list[int]
    num_computed: int
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    followers: list[DrivenSequence] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [*self.state.request.prompt.tolist(), *self.state.output]

    @property
    def output(self) -> list[int]:
        return self.state.output

    @property
    def members(self) -> list[DrivenSequence]:
        """This one and its followers."""
        return [self, *self.followers]

    @property
    def num_missing(self) -> int:
        """Known tokens whose KV does not exist yet; 1 while decoding."""
        return len(self.tokens) - self.num_computed


class PlanDriver:
    """Builds `StepPlan`s for an executor and appends what it samples.

    Blocks are handed out from the lowest free id, unless the caller names them; releasing a sequence returns its
    blocks but leaves their contents, as a prefix cache would.
    """

    def __init__(self, executor: Executor) -> None:
        limits = executor.limits
        self._executor = executor
        self._block_size = limits.block_size
        self._free_blocks = list(range(limits.num_blocks))
        self._free_slots = list(range(limits.max_num_seqs))
        columns = min(-(-limits.max_model_len // limits.block_size), limits.num_blocks)
        self._block_tables = np.full((limits.max_num_seqs, columns), -1, dtype=np.int32)
        self._admitted: list[Admission] = []
        self._swap_out = self._swap_in = NO_MOVES
        self._copies: list[tuple[int, int]] = []
        self._num_requests = 0
        self._step_id = 0
        self.last_plan: StepPlan | None = None

    def admit(
        self,
        prompt: Sequence[int] | TokenArray,
        sampling: SamplingParams = GREEDY,
        *,
        output: Sequence[int] = (),
        cached_blocks: Sequence[int] = (),
        min_tokens: int = 0,
        stop_token_ids: tuple[int, ...] = (),
    ) -> DrivenSequence:
        """Enter a sequence; it is part of the next plan's `admitted`.

        Args:
            output: tokens generated before a preemption.
            cached_blocks: ids whose contents are the leading whole blocks of prompt + output.
        """
        prompt = np.asarray(prompt, dtype=np.int32)
        request = Request(
            request_id=f"driven-{self._num_requests}",
            prompt=prompt,
            max_tokens=1_000_000,
            min_tokens=min_tokens,
            stop_token_ids=stop_token_ids,
            sampling=sampling,
        )
        tokens = np.concatenate([prompt, np.asarray(output, dtype=np.int32)])
        state = RequestState(request=request, sequence=self._num_requests, token_bytes=tokens.tobytes())
        state.output = list(output)
        self._num_requests += 1
        num_cached = len(cached_blocks) * self._block_size
        sequence = DrivenSequence(state, self._free_slots.pop(0), list(cached_blocks), num_cached)
        self._free_blocks = [block for block in self._free_blocks if block not in cached_blocks]
        self._block_tables[sequence.slot] = -1
        self._block_tables[sequence.slot, : len(cached_blocks)] = cached_blocks
        self._admitted.append(Admission(sequence.slot, state, tokens, num_cached))
        return sequence

    def swap_out(self, sequence: DrivenSequence, host_blocks: Sequence[int]) -> None:
        """Release a sequence; its computed tokens' blocks go to `host_blocks` with the next plan."""
        blocks = sequence.blocks[: -(-sequence.num_computed // self._block_size)]
        self._swap_out = _appended(self._swap_out, blocks, host_blocks)
        self.release(sequence)

    def swap_in(self, sequence: DrivenSequence, host_blocks: Sequence[int], *, num_reused: int = 0) -> DrivenSequence:
        """Enter a swapped-out sequence again; its computed tokens come from `host_blocks` with the next plan.

        Args:
            num_reused: leading blocks that are still in the pool; `host_blocks` are those behind them.
        """
        prompt, kept = sequence.state.request.prompt, sequence.blocks[:num_reused]
        resumed = self.admit(prompt, sequence.state.request.sampling, output=sequence.output, cached_blocks=kept)
        self._grow(resumed, sequence.num_computed)
        resumed.num_computed = sequence.num_computed
        self._admitted[-1] = self._admitted[-1]._replace(num_cached_tokens=sequence.num_computed)
        self._swap_in = _appended(self._swap_in, host_blocks, resumed.blocks[num_reused:])
        return resumed

    def follow(self, leader: DrivenSequence, sampling: SamplingParams = GREEDY) -> DrivenSequence:
        """Enter a sequence with the prompt of another that has not caught up: they fork when it does."""
        follower = self.admit(leader.state.request.prompt, sampling)
        self._admitted[-1] = self._admitted[-1]._replace(num_cached_tokens=len(leader.tokens))
        leader.followers.append(follower)
        return follower

    def _fork(self, leader: DrivenSequence) -> None:
        full = leader.num_computed // self._block_size
        for follower in leader.followers:
            follower.num_computed = leader.num_computed
            follower.blocks = leader.blocks[:full]
            self._block_tables[follower.slot, :full] = follower.blocks
            if leader.num_computed % self._block_size:
                self._grow(follower, leader.num_computed)
                self._copies.append((leader.blocks[full], follower.blocks[full]))
        leader.followers = []

    def release(self, sequence: DrivenSequence, *, shared: Sequence[int] = ()) -> None:
        """Free the slot and the blocks of a sequence that ended or is preempted, but for those still `shared`."""
        self._free_slots.insert(0, sequence.slot)
        self._free_blocks = sorted({*self._free_blocks, *sequence.blocks} - set(shared))

    def step(self, *entries: tuple[DrivenSequence, int], num_steps: int = 1) -> StepResult:
        """Run one plan; each entry computes so many tokens of its sequence. Outputs are appended.

        Raises:
            InvariantError: the result does not have the shape that the plan demands, or there are no blocks left.
        """
        plan, ordered = self.plan(*entries, num_steps=num_steps)
        result = self._executor.execute(plan)
        if result.step_id != plan.step_id or result.tokens.shape != (num_steps, len(plan.sampled)):
            raise InvariantError(f"result of step {plan.step_id} has shape {result.tokens.shape}")
        by_slot = {member.slot: member for sequence, _ in ordered for member in sequence.members}
        for sequence, num_new in ordered:
            sequence.num_computed += num_new + num_steps - 1
            if not sequence.num_missing:
                self._fork(sequence)
        for column, slot in enumerate(plan.sample_slots.tolist()):
            sequence = by_slot[slot]
            sequence.state.output += result.tokens[:, column].tolist()
            sequence.logprobs.append(None if result.logprobs is None else result.logprobs[column])
        return result

    def plan(
        self, *entries: tuple[DrivenSequence, int], num_steps: int = 1
    ) -> tuple[StepPlan, list[tuple[DrivenSequence, int]]]:
        """Return the plan of a step and its entries in plan order (decodes first); `step` runs it."""
        decodes = [entry for entry in entries if entry[1] == 1 and entry[0].output and entry[0].num_missing == 1]
        ordered = decodes + [entry for entry in entries if entry not in decodes]
        for sequence, num_new in ordered:
            self._grow(sequence, sequence.num_computed + num_new + num_steps - 1)
        starts = [sequence.num_computed for sequence, _ in ordered]
        lengths = [num_new for _, num_new in ordered]
        tokens = [t for s, n in ordered for t in s.tokens[s.num_computed : s.num_computed + n]]
        samples = [(i, m.slot) for i, (s, n) in enumerate(ordered) if n == s.num_missing for m in s.members]
        chunks = range(len(decodes), len(ordered))
        features = StepFeatures(
            num_tokens=len(tokens),
            num_seqs=len(ordered),
            num_decodes=len(decodes),
            decode_context_tokens=sum(s + 1 for s in starts[: len(decodes)]),
            prefill_attention=float(sum(lengths[i] * (starts[i] + lengths[i] / 2) for i in chunks)),
        )
        plan = StepPlan(
            step_id=self._step_id,
            num_decodes=len(decodes),
            slots=np.array([sequence.slot for sequence, _ in ordered], dtype=np.int32),
            starts=np.array(starts, dtype=np.int32),
            lengths=np.array(lengths, dtype=np.int32),
            tokens=np.array(tokens, dtype=np.int32),
            sampled=np.array([entry for entry, _ in samples], dtype=np.intp),
            block_tables=self._block_tables,
            features=features,
            admitted=tuple(self._admitted),
            events=[],
            sample_slots=np.array([slot for _, slot in samples], dtype=np.int32),
            copies=np.array(self._copies, dtype=np.int32).reshape(-1, 2).T,
            num_steps=num_steps,
            swap_out=self._swap_out,
            swap_in=self._swap_in,
        )
        self._admitted.clear()
        self._swap_out = self._swap_in = NO_MOVES
        self._copies.clear()
        self._step_id += 1
        self.last_plan = plan
        return plan, ordered

    def generate(self, sequence: DrivenSequence, num_tokens: int, *, chunk: int | None = None) -> list[int]:
        """Run the sequence alone until it has `num_tokens` outputs more, in chunks of at most `chunk` tokens."""
        wanted = len(sequence.output) + num_tokens
        while len(sequence.output) < wanted:
            self.step((sequence, min(sequence.num_missing, chunk or sequence.num_missing)))
        return sequence.output[wanted - num_tokens :]

    def _grow(self, sequence: DrivenSequence, num_tokens: int) -> None:
        while len(sequence.blocks) * self._block_size < num_tokens:
            if not self._free_blocks:
                raise InvariantError("the test uses more blocks than the executor has")
            sequence.blocks.append(self._free_blocks.pop(0))
            self._block_tables[sequence.slot, len(sequence.blocks) - 1] = sequence.blocks[-1]


def _appended(moves: BlockMoves, sources: Sequence[int], targets: Sequence[int]) -> BlockMoves:
    return BlockMoves(
        np.concatenate((moves.sources, np.array(sources, np.int32))),
        np.concatenate((moves.targets, np.array(targets, np.int32))),
    )
