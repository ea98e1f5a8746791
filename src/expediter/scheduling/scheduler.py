"""One replica's decisions: what the next step runs, who waits, who is preempted.

There is no prefill phase and no decode phase. A request has computed tokens and known tokens, and a step lets the
former catch up with the latter inside the token budget. Chunked prefill, prefix hits, recomputation after a preemption
and decoding are that one rule. How a step is filled, in which order requests start, how much memory they must find, how
large the budget is and who gives way are parts that plug in (`Policy`); nothing here asks which they are.

Blocks for all known tokens of a request are taken when it starts, so only decoding can run out of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from expediter.core.errors import ConfigurationError, InvariantError
from expediter.core.events import Event, Finished, PreemptCause, Preempted, Queued, Rejected, RejectReason
from expediter.core.explanation import Detail, Reason, Span
from expediter.core.plan import StepPlan, StepResult
from expediter.core.request import CacheHint, Carried, FinishReason, Request, RequestState, Status
from expediter.kvcache.landing import Landing
from expediter.kvcache.manager import KVCacheManager
from expediter.scheduling.batching import Batching
from expediter.scheduling.config import SchedulerConfig
from expediter.scheduling.draft import Draft, Rules
from expediter.scheduling.entry import check_group, refusal_of
from expediter.scheduling.explanations import Explanations
from expediter.scheduling.in_flight import InFlight
from expediter.scheduling.knowledge import Knowledge
from expediter.scheduling.ordering.queue import WaitingQueue
from expediter.scheduling.passage import Departure, Passage
from expediter.scheduling.running import RunningSet


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The parts of a scheduler. They hold state of the one replica that they serve: every scheduler has its own."""

    batching: Batching
    rules: Rules


class Scheduler:
    """Plans steps for one replica. Pure: time comes in with each call, nothing else varies.

    Calls: `add` and `abort` at any time; `plan` and `apply` in turn. A plan is in flight from `plan` to its `apply`;
    a request that is aborted meanwhile is over at once, and its part of the result is ignored.

    Args:
        config: limits.
        kv: the replica's KV blocks, with as many slots as `config.max_num_seqs`.
        policy: the parts that decide; `make_policy` makes them by name.
        knowledge: what the parts learn from; this scheduler feeds it.
    Attributes:
        passage: what a cluster may ask about requests that might move.
    Raises:
        ConfigurationError: the batching computes prompts whole, and the budget does not hold the longest.
    """

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager, policy: Policy, knowledge: Knowledge) -> None:
        if policy.batching.whole_prompts and config.max_num_batched_tokens < config.max_model_len:
            raise ConfigurationError(
                f"max_num_batched_tokens ({config.max_num_batched_tokens}) must be at least max_model_len "
                f"({config.max_model_len}): {type(policy.batching).__name__} computes a prompt in one step"
            )
        self.config = config
        self.kv = kv
        self.policy = policy
        self.knowledge = knowledge
        self._requests: dict[str, RequestState] = {}
        self._waiting = WaitingQueue(policy.rules.ordering)
        self._running = RunningSet(kv, config.max_num_seqs, policy.rules.ordering)
        self._in_flight: InFlight | None = None
        self._next_step = 0
        self._next_sequence = 0
        self._queue_is_stuck = False
        self._stuck_until_s = 0.0
        self._draining = False
        self._explanations = Explanations(config.max_explanations)
        self._refused: dict[Reason, int] = {}
        self.passage = Passage(kv, policy.rules.memory, self._running, self._waiting, knowledge)

    # -- looking ------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._requests) - len(self._running)

    @property
    def num_pending_tokens(self) -> int:
        """Known tokens without KV, of the queue (cached prefixes counted in full) and of prompts under way.

        A group's prompt counts once.
        """
        under_way = sum(s.num_known_tokens - s.num_computed_tokens for s in self._running.prefilling)
        return self._waiting.num_tokens + under_way

    def find(self, request_id: str) -> RequestState | None:
        """Return a live request's state, or None."""
        return self._requests.get(request_id)

    # -- explaining ---------------------------------------------------------------------------------------------------

    def explain(self, request_id: str, now_s: float) -> tuple[Span, ...] | None:
        """Return what held a request and what it did, oldest first; None if it is not known (any more).

        Asked only when somebody wants to know: O(waiting) for a request that waits.
        """
        state = self._requests.get(request_id)
        order: dict[str, Detail] = {}
        place = Reason.QUEUED
        if state is not None and state.status is not Status.RUNNING:
            waiting = [s for s in self._requests.values() if s.status is not Status.RUNNING and s.leader is None]
            leader = state.leader or state
            place, details = self.policy.rules.ordering.place(leader)
            order = details | self._waiting.place_among(leader, waiting, now_s)
        return self._explanations.of(request_id, now_s, place, order)

    @property
    def num_waiting_by_reason(self) -> dict[str, int]:
        """Waiting requests by what held them when the last step was planned; together `num_waiting`."""
        held_by = self._explanations.held_by or Reason.STEP
        rest, counts = self.num_waiting, dict[str, int]()
        known = (*self._refused.items(), (Reason.LATE, self.policy.rules.ordering.num_late), (held_by, rest))
        for reason, most in known:
            count = min(most, rest)  # some may have ended since
            if count:
                counts[reason.value] = counts.get(reason.value, 0) + count
                rest -= count
        return counts

    # -- requests -----------------------------------------------------------------------------------------------------

    def add(self, request: Request, now_s: float) -> list[Event]:
        """Queue a request, or reject it at once if it can never run; a group of one.

        Raises:
            InvariantError: a live request has the same id.
        """
        return self.add_group((request,), now_s)

    def add_group(self, requests: Sequence[Request], now_s: float, *, keep: bool = False) -> list[Event]:
        """Queue several sequences of one prompt, or reject them at once if they can never run together.

        They start together or not at all. The first one leads: it computes the prompt, then they fork, sharing its full
        blocks, and each of them is a request like any other. Each has its own events, and can be aborted alone.

        Args:
            requests: equal but for id, sampling and what may stop them.
            keep: when they end, keep their KV for a transfer; see `collect`.
        Raises:
            InvariantError: a live request has the same id, or they differ in more than they may.
        """
        check_group(requests, self._requests)
        known = requests[0].prompt.tobytes()
        leader, *followers = (
            RequestState(request, self._next_sequence + number, known) for number, request in enumerate(requests)
        )
        leader.followers = followers
        for follower in followers:
            follower.leader = leader
        for state in leader.members:
            state.is_kept = keep
        return self._enqueue(leader, now_s)

    def _enqueue(self, leader: RequestState, now_s: float, *, is_new: bool = True) -> list[Event]:
        """Queue a request with its followers, or refuse it if it can never run."""
        requests = [state.request for state in leader.members]
        if self._draining and is_new:
            refusal: tuple[RejectReason, str] | None = RejectReason.SHUTDOWN, "the replica is shutting down"
        else:
            refusal = refusal_of(leader, self.config, self.policy.rules.memory, self._running)
        if refusal is not None:
            for request in requests:
                self._explanations.ended(request.request_id, now_s, Reason.REJECTED, {"cause": refusal[1]})
            self.passage.drop(leader, now_s)
            return [Rejected(request.request_id, now_s, *refusal) for request in requests]
        self._next_sequence += len(requests)
        self._requests.update((state.request_id, state) for state in leader.members)
        self.policy.rules.ordering.tick(self._running.decode_clock)
        waiting = self.num_waiting - len(requests), self._waiting.num_tokens
        self._waiting.push(leader, now_s)
        self._queue_is_stuck = False
        reason, details = self.policy.rules.ordering.place(leader)
        for request in requests:
            self._explanations.queued(request.request_id, now_s, (reason, dict(details)), waiting)
        return [Queued(r.request_id, now_s, r.tenant, r.slo_class, r.slo) for r in requests]

    def abort(self, request_id: str, now_s: float, reason: FinishReason = FinishReason.ABORT) -> list[Event]:
        """End a request in any state; its blocks come back once. An unknown id is no error: it may have ended.

        If it led a group, the next in it takes its place.
        """
        state = self._requests.get(request_id)
        if state is None:
            return []
        state.is_kept = False
        if state.status is Status.RUNNING:
            slot = state.slot
            successor = self._running.leave(state, now_s)
            if self._in_flight is not None:
                self._in_flight.drop(state, slot, successor)
        elif state.leader is not None:
            state.fall_out()
        else:
            self._waiting.remove(state)
            successor = state.fall_out()
            if successor is None:
                self.kv.host.drop(state.sequence)
                self.passage.drop(state, now_s)
            else:
                self.kv.host.hand_over(state.sequence, successor.sequence)
                self.kv.landings.hand_over(state.sequence, successor.sequence)
                self._waiting.push(successor, now_s)
        return [self._finish(state, now_s, reason)]

    def refusal(self, requests: Sequence[Request]) -> tuple[RejectReason, str] | None:
        """Return why a request, with its sequences, could never run here, or None if it could; changes nothing."""
        leader, *followers = (RequestState(request, -1, request.prompt.tobytes()) for request in requests)
        leader.followers = followers
        return refusal_of(leader, self.config, self.policy.rules.memory, self._running)

    # -- requests on their way ----------------------------------------------------------------------------------------

    def reserve(self, request: Request, carried: Carried | None, num_tokens: int, now_s: float) -> Landing | None:
        """Take blocks for a request whose first `num_tokens` tokens of KV are about to come from elsewhere.

        Args:
            carried: what it has so far; None if it has not run yet.
        Returns:
            None if there is no room at present, or somebody older waits for it.
        Raises:
            InvariantError: a step is in flight: blocks that it still writes to may be among the free ones.
        """
        if self._in_flight is not None:
            raise InvariantError(f"blocks are reserved while step {self._in_flight.plan.step_id} is in flight")
        state = self.passage.state_of(request, carried, self._next_sequence)
        is_short = bool(self._refused.get(Reason.NO_BLOCKS))
        return self.passage.reserve(state, num_tokens, now_s, is_short=is_short)

    def land(self, landing: Landing, now_s: float) -> bool:
        """Record that the KV of a landing is here; False if it does not wait for any (any more)."""
        self._queue_is_stuck = False
        return self.kv.landings.complete(landing, now_s)

    def release(
        self,
        landing: Landing,
        now_s: float,
        *,
        writes_until_s: float | None = None,
        hint: CacheHint | None = None,
    ) -> None:
        """Give a landing up, as `Landings.release`: others may have its blocks."""
        self._queue_is_stuck = False
        self.kv.landings.release(landing, now_s, writes_until_s=writes_until_s, hint=hint)

    def end_quarantine(self, now_s: float) -> None:
        """Free the blocks that nobody can write to any more."""
        if self.kv.landings.expire(now_s):
            self._queue_is_stuck = False

    def resume(
        self,
        request: Request,
        carried: Carried | None,
        now_s: float,
        *,
        landing: Landing | None = None,
        keep: bool = False,
    ) -> list[Event]:
        """Queue a request that ran elsewhere, or whose KV was fetched; as `add`, and it goes on where it stopped.

        Its output so far counts as known: what of its KV has landed is taken over, the rest is computed again. With all
        of it there, it decodes from its first step here on.

        Args:
            landing: of its KV, landed; it is the request's from now on.
            keep: as in `add_group`.
        Raises:
            InvariantError: a live request has the same id, or it has all of its output.
        """
        check_group((request,), self._requests)
        state = self.passage.state_of(request, carried, self._next_sequence)
        state.is_kept = keep
        if landing is not None:
            self.kv.landings.assign(landing, state.sequence)
        return self._enqueue(state, now_s, is_new=False)

    def extract(self, request_id: str, now_s: float, *, keep: bool = False) -> tuple[Departure, ...]:
        """Take a live request out, with its group as long as that has not forked, to go on elsewhere.

        No event says so: it has not ended.

        Args:
            keep: keep its computed KV for a transfer; not that of a group.
        Returns:
            What each sequence takes along; nothing if the id is not known (any more).
        Raises:
            InvariantError: a step is in flight.
        """
        state = self._requests.get(request_id)
        if state is None:
            return ()
        if self._in_flight is not None:
            raise InvariantError(f"{request_id} is extracted while step {self._in_flight.plan.step_id} is in flight")
        leader = state.leader or state
        members = leader.members
        leader.is_kept = keep and len(members) == 1
        if leader.status is Status.RUNNING:
            self._running.depart(leader, now_s)
        else:
            self._waiting.remove(leader)
            self.kv.host.drop(leader.sequence)
            if not leader.is_kept:
                self.passage.drop(leader, now_s)
        for member in members:
            member.move(Status.FINISHED)
            del self._requests[member.request_id]
            self._explanations.ended(member.request_id, now_s, Reason.ENDED, {"cause": "moved"})
        self._queue_is_stuck = False
        return tuple(self.passage.departure_of(m, self.kv.landings.find(m.sequence)) for m in members)

    def evacuate(self, now_s: float) -> list[tuple[Departure, ...]]:
        """Take every request out, group by group: the replica is lost, the step in flight with it."""
        self._in_flight = None
        found = (self.extract(request_id, now_s) for request_id in list(self._requests))
        return [departures for departures in found if departures]

    def collect(self, request_id: str) -> Departure | None:
        """Return once what a request left behind that was added with `keep` and has ended by itself.

        Who collects it releases its landing, when the KV has been sent or will not be.
        """
        return self.passage.departures.pop(request_id, None)

    def drain(self) -> None:
        """Refuse new requests from now on; those that are here, or are resumed here, run to their end."""
        self._draining = True

    def _finish(self, state: RequestState, now_s: float, reason: FinishReason) -> Finished:
        state.move(Status.FINISHED)
        state.finish_reason = reason
        del self._requests[state.request_id]
        if state.is_kept:
            self.passage.note(state)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.knowledge.lengths.observe(state.request, len(state.output))
        self._queue_is_stuck = False
        details: dict[str, Detail] = {"cause": reason.value, "output_tokens": len(state.output)}
        self._explanations.ended(state.request_id, now_s, Reason.ENDED, details)
        return Finished(
            state.request_id,
            now_s,
            reason,
            state.request.num_prompt_tokens,
            len(state.output),
            state.num_cached_tokens,
            state.num_preemptions,
        )

    # -- planning -----------------------------------------------------------------------------------------------------

    def plan(self, now_s: float) -> StepPlan:
        """Decide the next step.

        Returns:
            The plan, which is in flight until `apply`, or an empty one, which is not.
        Raises:
            InvariantError: a plan is in flight already.
        """
        if self._in_flight is not None:
            raise InvariantError(f"step {self._in_flight.plan.step_id} has not been applied")
        draft = self._fill(now_s)
        while len(self.kv.landings) and draft.is_idle and self._let_go(now_s):
            events = draft.events
            draft = self._fill(now_s)
            draft.events[:0] = events
        for state in draft.preempted:
            self._waiting.push(state, now_s)
        plan, chunked = draft.compose(self._next_step)
        # Once a prompt is complete, its share of the budget is free for others.
        self._queue_is_stuck = draft.queue_is_stuck and not draft.chunks and not self.policy.rules.ordering.may_refuse
        if not draft.queue_is_closed:
            self._stuck_until_s = self.queue_changes_s(now_s)
            self._explanations.turn(draft.held_by if len(self._waiting) else None, now_s)
            self._refused = draft.refused
        if not plan.is_empty:
            self._in_flight = InFlight(plan, chunked, is_full=draft.is_full)
            self._next_step += 1
        return plan

    def _fill(self, now_s: float) -> Draft:
        draft = Draft(self.config, self.policy.rules, self._running, self._waiting, self._explanations, now_s)
        draft.queue_is_closed = self._queue_is_stuck and now_s < self._stuck_until_s
        draft.events += self._judge_late(now_s)
        self.policy.batching.fill(draft)
        return draft

    def _let_go(self, now_s: float) -> bool:
        """Nobody can run: make room by giving a landing up, if one waits."""
        self._queue_is_stuck = False
        waiting = [state for state in self._requests.values() if state.status is not Status.RUNNING]
        return self.passage.let_go(waiting, now_s)

    def _judge_late(self, now_s: float) -> list[Event]:
        """Refuse who cannot be in time any more and asked for that; the others stay, and are told why they wait."""
        ordering = self.policy.rules.ordering
        events: list[Event] = []
        for state, found_s in ordering.newly_late(now_s):
            if self._requests.get(state.request_id) is not state or state.status is Status.RUNNING:
                continue  # it has ended or started since
            reason, details = ordering.place(state)
            if state.request.refuse_late and state.first_scheduled_s is None:
                events += self._refuse_late(state, now_s)
            else:
                for member in state.members:
                    self._explanations.held(member.request_id, found_s, reason, dict(details))
        return events

    def _refuse_late(self, state: RequestState, now_s: float) -> list[Event]:
        message = "the request cannot meet its targets any more, and it asked to be refused then"
        self._waiting.remove(state)
        self.passage.drop(state, now_s)
        for member in state.members:
            member.move(Status.FINISHED)
            del self._requests[member.request_id]
            self._explanations.ended(member.request_id, now_s, Reason.REJECTED, {"cause": message})
        return [Rejected(member.request_id, now_s, RejectReason.LATE, message) for member in state.members]

    # -- results ------------------------------------------------------------------------------------------------------

    def apply(self, result: StepResult, now_s: float) -> list[Event]:
        """Take a step's result in; what is not in flight (late, or twice) changes nothing.

        Raises:
            InvariantError: the result is of a step that was never planned, or not of the plan's shape.
        """
        if result.step_id >= self._next_step:
            raise InvariantError(f"step {result.step_id} was never planned")
        step = self._in_flight
        if step is None or result.step_id != step.plan.step_id:
            return []
        step.check(result)
        self._in_flight = None
        self._next_step += step.plan.num_steps - 1
        self.knowledge.observe(step.plan, result, is_full=step.is_full)
        events: list[Event] = []
        if step.plan.num_swapped_blocks:
            self._settle_swaps(result, step.chunks.states, now_s, events)
        ended = step.apply_decodes(result, self._running, now_s, events)
        ended += step.apply_chunks(result, self._running, self.knowledge, self._explanations, now_s, events)
        events += [self._finish(state, now_s, _finish_reason(state)) for state in ended]
        return events

    def _settle_swaps(self, result: StepResult, states: list[RequestState], now_s: float, events: list[Event]) -> None:
        """Free what was read; who was to go on with KV that did not arrive goes back to the queue and recomputes."""
        failed = self.kv.swaps.settle(result.failed_host_blocks)
        for state in states:
            if state.slot not in failed:
                continue
            self._running.suspend(state, now_s, lambda _: False)  # what did not arrive is not committed
            cause = PreemptCause.SWAP_FAILED
            for member in state.members:
                num_lost, member.num_computed_tokens = member.num_computed_tokens, 0
                member.move(Status.PREEMPTED)
                events.append(Preempted(member.request_id, now_s, cause, num_lost))
                details: dict[str, Detail] = {"cause": cause.value, "lost_tokens": num_lost}
                self._explanations.preempted(member.request_id, now_s, details)
            self._waiting.push(state, now_s)
        self._queue_is_stuck = False

    # -- runs of equal steps (simulation) -----------------------------------------------------------------------------

    def repeatable_steps(self, plan: StepPlan) -> int:
        """Return how many times in a row the plan in flight would be made if nothing is added or aborted, at least 1.

        The last of them may be the one in which a request ends. Requests that a token can stop are never repeated:
        their end is not known before. Age may still change the order of the queue: see `queue_changes_s`.
        """
        step, running = self._in_flight, self._running
        if step is None or not step.is_whole or plan.num_swapped_blocks or running.decoding.num_stopping:
            return 1
        if plan.num_decodes != running.decoding.size:
            return 1
        if len(self._waiting) and not self._queue_is_stuck:
            return 1
        if not running.prefilling:
            return running.decoding.max_run(self.kv.block_size, self.kv.num_available_blocks)
        run = self._repeatable_chunks(step)
        if run > 1 and plan.num_decodes:
            run = min(run, running.decoding.max_run(self.kv.block_size, self.kv.num_available_blocks))
        return run

    def _repeatable_chunks(self, step: InFlight) -> int:
        """Return how many times the plan's chunk can be followed by one like it: the next of a prompt that takes all.

        The last of them leaves at least a token: that token's step samples.
        """
        plan, rules, prefilling = step.plan, self.policy.rules, self._running.prefilling
        if step.chunks.states != prefilling[:1] or step.chunks.sampled:
            return 1
        if plan.features.num_tokens < plan.budget_tokens or not rules.budget.is_static:
            return 1
        if rules.ordering.interleaves and len(prefilling) > 1:
            return 1
        state = prefilling[0]
        left = state.num_known_tokens - state.num_computed_tokens
        run = step.num_ahead + (left - 1) // plan.features.num_prefill_tokens
        # Where the cache holds more of the prompt already, its blocks are given up for those one by one.
        num_cached = self.kv.match(state.token_bytes, state.request.cache_salt).num_blocks
        return run if num_cached * self.kv.block_size <= state.num_computed_tokens else 1

    def queue_changes_s(self, now_s: float) -> float:
        """Return the time after which a plan may differ from a repeated one because somebody waited too long."""
        if not len(self._waiting) or not (self._running.has_slot or self.policy.rules.ordering.displaces):
            return float("inf")
        return self._waiting.next_change_s(now_s)

    def repeat(self, plan: StepPlan, num_steps: int) -> None:
        """Make the plan in flight stand for `num_steps` steps; blocks are taken as single steps would take them.

        Raises:
            InvariantError: more steps than `repeatable_steps` allows.
        """
        if num_steps == 1:
            return
        if self._in_flight is None or plan is not self._in_flight.plan or num_steps > self.repeatable_steps(plan):
            raise InvariantError(f"step {plan.step_id} cannot be repeated {num_steps} times")
        while self._running.prefilling and self._in_flight.num_ahead < num_steps - 1:
            self._in_flight.compute_ahead(self._running)
        self._running.grow_for_run(num_steps)
        plan.num_steps = num_steps

    def tick(self) -> None:
        """Record that one more step of a run with a prompt is over; what it computed can be reused from now on.

        `repeat` and `apply` at the end of the run do the same for those steps that nobody told of.
        """
        assert self._in_flight is not None
        self._in_flight.compute_ahead(self._running)

    # -- integrity ----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Verify blocks, slots and queues against each other.

        Raises:
            InvariantError: they disagree (a bug of ours).
        """
        self._running.check()
        queued = [state for state in self._requests.values() if state.status is not Status.RUNNING]
        if len(queued) + len(self._running) != len(self._requests):
            raise InvariantError(
                f"{len(self._requests)} live requests, {len(self._running)} running and {len(queued)} waiting"
            )
        if sum(state.leader is None for state in queued) != len(self._waiting):
            raise InvariantError(f"{len(self._waiting)} groups are queued, {len(queued)} requests wait")
        for state in self._requests.values():
            leader = state.leader
            if leader is not None and (state not in leader.followers or state.status is not leader.status):
                raise InvariantError(f"{state.request_id} is {state.status.value} apart from its leader")


def _finish_reason(state: RequestState) -> FinishReason:
    return FinishReason.STOP if state.has_stopped else FinishReason.LENGTH
