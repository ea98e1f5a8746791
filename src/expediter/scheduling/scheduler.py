"""One replica's decisions: what the next step runs, who waits, who is preempted.

There is no prefill phase and no decode phase. A request has computed tokens and known tokens, and a step lets the
former catch up with the latter inside the token budget. Chunked prefill, prefix hits, recomputation after a preemption
and decoding are that one rule. A step is composed stall-free (Sarathi-Serve, 2403.02310): every decode, then prompts
under way, then new requests, while budget, slots and blocks last.

Blocks for all known tokens of a request are taken when it is admitted, so only decoding can run out of them; then the
running request of lowest value is preempted and recomputed later, least computed first.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from expediter.core.errors import InvariantError
from expediter.core.events import (
    Admitted,
    Event,
    Finished,
    FirstToken,
    PreemptCause,
    Preempted,
    Queued,
    Rejected,
    RejectReason,
    Tokens,
)
from expediter.core.plan import Admission, StepPlan, StepResult
from expediter.core.request import FinishReason, Request, RequestState, Status
from expediter.kvcache.manager import KVCacheManager
from expediter.kvcache.radix import PrefixMatch
from expediter.scheduling.config import SchedulerConfig
from expediter.scheduling.decoding import DecodingBatch
from expediter.scheduling.draft import Draft, compose
from expediter.scheduling.ordering import Ordering
from expediter.scheduling.preemption import running_by_value
from expediter.scheduling.waiting import WaitingQueue


class Scheduler:
    """Plans steps for one replica. Pure: time comes in with each call, nothing else varies.

    Calls: `add` and `abort` at any time; `plan` and `apply` in turn. A plan is in flight from `plan` to its `apply`;
    a request that is aborted meanwhile is over at once, and its part of the result is ignored.

    Args:
        config: limits.
        kv: the replica's KV blocks, with as many slots as `config.max_num_seqs`.
        ordering: order of the waiting queue.
    """

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager, ordering: Ordering) -> None:
        self.config = config
        self.kv = kv
        self.ordering = ordering
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self._requests: dict[str, RequestState] = {}
        self._waiting = WaitingQueue(ordering)
        self._decoding = DecodingBatch(config.max_num_seqs)
        self._prefilling: list[RequestState] = []
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._in_flight: StepPlan | None = None
        self._in_flight_chunks: list[RequestState] = []
        self._dropped: set[int] = set()  # slots of the plan in flight whose requests have been aborted
        self._next_step = 0
        self._next_sequence = 0
        self._queue_is_stuck = False
        self._draining = False

    # -- looking ------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        return self._decoding.size + len(self._prefilling)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_pending_tokens(self) -> int:
        """Known tokens without KV, of the queue (cached prefixes counted in full) and of prompts under way."""
        return self._waiting.num_tokens + sum(s.num_known_tokens - s.num_computed_tokens for s in self._prefilling)

    def find(self, request_id: str) -> RequestState | None:
        """Return a live request's state, or None."""
        return self._requests.get(request_id)

    # -- requests -----------------------------------------------------------------------------------------------------

    def add(self, request: Request, now_s: float) -> list[Event]:
        """Queue a request, or reject it at once if it can never run.

        Raises:
            InvariantError: a live request has the same id.
        """
        if request.request_id in self._requests:
            raise InvariantError(f"request id {request.request_id!r} is in use")
        refusal = self._refusal(request)
        if refusal is not None:
            return [Rejected(request.request_id, now_s, *refusal)]
        state = RequestState(request, self._next_sequence, request.prompt.tobytes())
        self._next_sequence += 1
        self._requests[request.request_id] = state
        self._waiting.push(state)
        self._queue_is_stuck = False
        return [Queued(request.request_id, now_s)]

    def abort(self, request_id: str, now_s: float, reason: FinishReason = FinishReason.ABORT) -> list[Event]:
        """End a request in any state; its blocks come back once. An unknown id is no error: it may have ended."""
        state = self._requests.get(request_id)
        if state is None:
            return []
        if state.status is Status.RUNNING:
            if self._in_flight is not None:
                self._dropped.add(state.slot)
            self._stop_running(state)
        else:
            self._waiting.discard(state)
        self._queue_is_stuck = False
        return [self._finish(state, now_s, reason)]

    def drain(self) -> None:
        """Refuse new requests from now on; those that are here run to their end."""
        self._draining = True

    def _refusal(self, request: Request) -> tuple[RejectReason, str] | None:
        total = request.max_total_tokens
        if self._draining:
            return RejectReason.SHUTDOWN, "the replica is shutting down"
        if total > self.config.max_model_len:
            return RejectReason.TOO_LONG, f"prompt and max_tokens are {total} tokens, max_model_len is " + str(
                self.config.max_model_len
            )
        # The last output token is never fed back, so its KV is never stored.
        if self.kv.blocks_for(total - 1) > self.kv.num_blocks:
            capacity = self.kv.num_blocks * self.kv.block_size
            return RejectReason.UNSERVABLE, f"{total - 1} tokens of KV exceed the cache's {capacity}"
        return None

    # -- planning -----------------------------------------------------------------------------------------------------

    def plan(self, now_s: float) -> StepPlan:
        """Decide the next step.

        Returns:
            The plan, which is in flight until `apply`, or an empty one, which is not.
        Raises:
            InvariantError: a plan is in flight already.
        """
        if self._in_flight is not None:
            raise InvariantError(f"step {self._in_flight.step_id} has not been applied")
        draft = Draft(now_s, self.config.max_num_batched_tokens)
        self._grow(draft)
        draft.budget -= self._decoding.size
        for state in self._prefilling:
            draft.add_chunk(state)
        # Who just lost its blocks must not fight for them again in the same step.
        if len(self._waiting) and not draft.preempted:
            self._admit(draft)
        for state in draft.preempted:
            self._waiting.push(state)
        plan = compose(self._next_step, draft, self._decoding, self._prefilling, self.kv.tables)
        if not plan.is_empty:
            self._in_flight = plan
            self._in_flight_chunks = [s for s in self._prefilling if draft.chunks.get(s.slot)]
            self._next_step += 1
        return plan

    def _grow(self, draft: Draft) -> None:
        """Give every decode a block for its next token, preempting until the rest fit."""
        decoding = self._decoding
        rows = decoding.at_edge()
        if not len(rows):
            return
        while len(rows) > self.kv.num_available_blocks:
            ranked = running_by_value(decoding, self._prefilling, self.config.max_preemptions)
            if not ranked:
                raise InvariantError("a running request lacks a block, and all of them have theirs reserved")
            self._preempt(ranked[0], draft, PreemptCause.GROWTH)
            rows = decoding.at_edge()
        if len(rows):
            self.kv.append(decoding.slots[rows], self.kv.take(len(rows)))
            decoding.add_room(rows, self.kv.block_size)

    def _admit(self, draft: Draft) -> None:
        """Start waiting requests in order. One that does not fit is passed over, but only `max_bypasses` times.

        So a large request neither holds small ones up for long nor is starved by them.
        """
        passed: list[RequestState] = []
        while draft.budget > 0 and len(passed) <= self.config.max_scan and (state := self._waiting.pop()) is not None:
            if self._start(state, draft):
                for other in passed:
                    other.num_bypassed += 1
            else:
                passed.append(state)
                if not self._free_slots:
                    break
            if any(other.num_bypassed >= self.config.max_bypasses for other in passed):
                break
        for state in passed:
            self._waiting.push(state)
        # The same queue would meet the same refusals until something ends, leaves or arrives: blocks only get fewer.
        self._queue_is_stuck = not draft.admitted

    def _start(self, state: RequestState, draft: Draft) -> bool:
        """Move a popped request into the running set if it fits, displacing others if the ordering lets it."""
        tokens, salt = state.token_bytes, state.request.cache_salt
        # From its last permitted preemption on, a request owns blocks for its whole life and cannot be in need again.
        reserves = state.num_preemptions >= self.config.max_preemptions
        num_tokens = state.request.max_total_tokens - 1 if reserves else state.num_known_tokens
        spare = self.config.watermark_blocks if self.num_running else 0
        match = self.kv.match(tokens, salt)
        if self.ordering.displaces:
            self._displace_for(state, match, num_tokens, spare, draft)
            spare = spare if self.num_running else 0
        if not self._free_slots or not self.kv.admit(self._free_slots[-1], match, num_tokens, spare):
            return False
        state.slot = self._free_slots.pop()
        self._enter(state, match.num_blocks * self.kv.block_size, draft)
        draft.add_chunk(state)
        return True

    def _displace_for(self, state: RequestState, match: PrefixMatch, num_tokens: int, spare: int, draft: Draft) -> None:
        """Preempt running requests of strictly lower priority, if that makes room for `state`, and nobody otherwise."""
        shortage = self.kv.shortage(match, num_tokens, spare)
        if shortage <= 0 and self._free_slots:
            return
        newcomers = {admission.slot for admission in draft.admitted}
        victims: list[RequestState] = []
        for victim in running_by_value(self._decoding, self._prefilling, self.config.max_preemptions):
            if victim.request.priority <= state.request.priority or (victims and shortage <= 0):
                break
            if victim.slot not in newcomers:
                victims.append(victim)
                shortage -= self.kv.num_exclusive_blocks(victim.slot, match)
        if len(victims) == self.num_running:
            shortage -= spare  # which is for the growth of those who stay
        if not victims or shortage > 0:
            return
        for victim in victims:
            draft.budget += draft.chunks.pop(victim.slot, 1)
            self._preempt(victim, draft, PreemptCause.PRIORITY)

    def _enter(self, state: RequestState, num_cached_tokens: int, draft: Draft) -> None:
        resumed = state.status is Status.PREEMPTED
        state.move(Status.RUNNING)
        state.num_computed_tokens = num_cached_tokens
        if not resumed:
            state.num_cached_tokens = num_cached_tokens
            state.first_scheduled_s = draft.now_s
            self.num_prompt_tokens += state.request.num_prompt_tokens
            self.num_cached_tokens += num_cached_tokens
        self._prefilling.append(state)
        known = np.frombuffer(state.token_bytes, np.int32)
        draft.admitted.append(Admission(state.slot, state, known, num_cached_tokens))
        draft.events.append(Admitted(state.request_id, draft.now_s, len(known), num_cached_tokens, resumed))

    def _preempt(self, state: RequestState, draft: Draft, cause: PreemptCause) -> None:
        self._stop_running(state)
        state.move(Status.PREEMPTED)
        draft.events.append(Preempted(state.request_id, draft.now_s, cause, state.num_computed_tokens))
        state.num_computed_tokens = 0
        state.num_preemptions += 1
        draft.preempted.append(state)

    # -- results ------------------------------------------------------------------------------------------------------

    def apply(self, result: StepResult, now_s: float) -> list[Event]:
        """Take a step's result in; what is not in flight (late, or twice) changes nothing.

        Raises:
            InvariantError: the result is of a step that was never planned, or not of the plan's shape.
        """
        plan = self._in_flight
        if result.step_id >= self._next_step:
            raise InvariantError(f"step {result.step_id} was never planned")
        if plan is None or result.step_id != plan.step_id:
            return []
        if result.tokens.shape != (plan.num_steps, len(plan.sampled)):
            raise InvariantError(
                f"step {plan.step_id}: tokens of shape {result.tokens.shape} for {plan.num_steps} steps of "
                f"{len(plan.sampled)} sampled sequences"
            )
        chunked, dropped = self._in_flight_chunks, self._dropped
        self._in_flight, self._in_flight_chunks, self._dropped = None, [], set()
        self._next_step += plan.num_steps - 1
        columns = np.arange(plan.num_decodes)
        if dropped:
            columns = columns[~np.isin(plan.slots[: plan.num_decodes], list(dropped))]
        events: list[Event] = []
        finished = self._apply_decodes(result, columns, now_s, events)
        if chunked:
            finished += self._apply_chunks(plan, result, chunked, now_s, events)
        events += [self._finish(state, now_s, reason) for state, reason in finished]
        return events

    def _apply_decodes(
        self, result: StepResult, columns: npt.NDArray[np.intp], now_s: float, events: list[Event]
    ) -> list[tuple[RequestState, FinishReason]]:
        decoding = self._decoding
        if not decoding.size:
            return []
        tokens = result.tokens[:, columns]
        events.append(Tokens(now_s, decoding.states[: decoding.size].copy(), tokens, columns))
        rows = decoding.advance(tokens)
        if not len(rows):
            return []
        self._queue_is_stuck = False
        states = decoding.leave(rows)
        for state in states:
            self._give_back(state)
        return [(state, _finish_reason(state)) for state in states]

    def _apply_chunks(
        self, plan: StepPlan, result: StepResult, states: list[RequestState], now_s: float, events: list[Event]
    ) -> list[tuple[RequestState, FinishReason]]:
        sampled = set(plan.sampled[plan.num_decodes :].tolist())
        column = plan.num_decodes
        caught_up: list[tuple[RequestState, int]] = []
        for index, state in enumerate(states, start=plan.num_decodes):
            samples = index in sampled
            if state.status is Status.RUNNING:  # else aborted in flight
                state.num_computed_tokens += int(plan.lengths[index])
                self.kv.commit(state.slot, state.token_bytes, state.request.cache_salt, state.num_computed_tokens)
                if samples:
                    caught_up.append((state, column))
            column += samples
        if not caught_up:
            return []
        members = {id(state) for state, _ in caught_up}
        self._prefilling = [state for state in self._prefilling if id(state) not in members]
        columns = np.array([column for _, column in caught_up])
        tokens = result.tokens[:, columns]
        finished: list[tuple[RequestState, FinishReason]] = []
        owners = np.empty(len(caught_up), np.object_)
        for index, (state, _) in enumerate(caught_up):
            owners[index] = state
            if self._append_first(state, int(tokens[0, index]), now_s, events):
                self._give_back(state)
                finished.append((state, _finish_reason(state)))
            else:
                self._decoding.join(state, int(self.kv.num_owned[state.slot]) * self.kv.block_size)
        events.append(Tokens(now_s, owners, tokens, columns))
        return finished

    def _append_first(self, state: RequestState, token: int, now_s: float, events: list[Event]) -> bool:
        """Append the token that a sequence yields when it has caught up; return whether that ends it."""
        state.output.append(token)
        state.token_bytes += np.int32(token).tobytes()
        if state.first_token_s is None:
            state.first_token_s = now_s
            events.append(FirstToken(state.request_id, now_s))
        return len(state.output) == state.request.max_tokens or _stops(state)

    def _stop_running(self, state: RequestState) -> None:
        """Take a running request out of the step arrays, and its blocks back; its known tokens are complete then."""
        if state in self._prefilling:
            self._prefilling.remove(state)
        else:
            self._decoding.leave(np.array([self._decoding.row_of(state)]))
        self._give_back(state)

    def _give_back(self, state: RequestState) -> None:
        """Return blocks and slot; what was computed stays in the prefix cache for who comes with the same tokens."""
        self.kv.commit(state.slot, state.token_bytes, state.request.cache_salt, state.num_computed_tokens)
        self.kv.release(state.slot)
        self._free_slots.append(state.slot)
        state.slot = -1
        self._queue_is_stuck = False

    def _finish(self, state: RequestState, now_s: float, reason: FinishReason) -> Finished:
        state.move(Status.FINISHED)
        state.finish_reason = reason
        del self._requests[state.request_id]
        return Finished(
            state.request_id,
            now_s,
            reason,
            state.request.num_prompt_tokens,
            len(state.output),
            state.num_cached_tokens,
            state.num_preemptions,
        )

    # -- runs of equal steps (simulation) -----------------------------------------------------------------------------

    def repeatable_steps(self, plan: StepPlan) -> int:
        """Return how many times in a row the plan in flight would be made if nothing is added or aborted, at least 1.

        The last of them may be the one in which a request ends. Requests that a token can stop are never repeated:
        their end is not known before.
        """
        if plan.num_decodes < plan.num_seqs or self._decoding.num_stopping or self._decoding.size < plan.num_seqs:
            return 1
        if len(self._waiting) and not self._queue_is_stuck:
            return 1
        return self._decoding.max_run(self.kv.block_size, self.kv.num_available_blocks)

    def repeat(self, plan: StepPlan, num_steps: int) -> None:
        """Make the plan in flight stand for `num_steps` steps; blocks are taken as single steps would take them.

        Raises:
            InvariantError: more steps than `repeatable_steps` allows.
        """
        if num_steps == 1:
            return
        if plan is not self._in_flight or num_steps > self.repeatable_steps(plan):
            raise InvariantError(f"step {plan.step_id} cannot be repeated {num_steps} times")
        rows, ordinals, counts = self._decoding.edges_in_run(num_steps, self.kv.block_size)
        self.kv.append_runs(self._decoding.slots[rows], ordinals, self.kv.take(len(rows)))
        self._decoding.add_room(np.arange(self._decoding.size), counts * self.kv.block_size)
        plan.num_steps = num_steps

    # -- integrity ----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Verify blocks, slots and queues against each other.

        Raises:
            InvariantError: they disagree (a bug of ours).
        """
        self.kv.check()
        running = [*self._prefilling, *self._decoding.states[: self._decoding.size]]
        slots = sorted([state.slot for state in running] + self._free_slots)
        if slots != list(range(self.config.max_num_seqs)):
            raise InvariantError(f"slots are lost or held twice: {slots}")
        if {state.slot for state in running} != set(np.flatnonzero(self.kv.num_owned).tolist()):
            raise InvariantError("blocks are owned by a slot that does not run")
        if len(running) + len(self._waiting) != len(self._requests):
            raise InvariantError(f"{len(self._requests)} live requests, {len(running)} + {len(self._waiting)} found")
        if any(state.status is not Status.RUNNING for state in running):
            raise InvariantError("a request that does not run is in a batch")


def _stops(state: RequestState) -> bool:
    return state.output[-1] in state.request.stop_token_ids and len(state.output) >= state.request.min_tokens


def _finish_reason(state: RequestState) -> FinishReason:
    return FinishReason.STOP if _stops(state) else FinishReason.LENGTH
