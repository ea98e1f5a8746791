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
from expediter.core.events import Event, Finished, PreemptCause, Preempted, RejectReason
from expediter.core.explanation import Detail, Reason, Span
from expediter.core.plan import StepPlan, StepResult
from expediter.core.request import FinishReason, Request, RequestState, Status
from expediter.kvcache.manager import KVCacheManager
from expediter.scheduling.batching import Batching
from expediter.scheduling.composition import compose
from expediter.scheduling.config import SchedulerConfig
from expediter.scheduling.draft import Draft, Rules
from expediter.scheduling.entry import check_group, refusal_of
from expediter.scheduling.in_flight import InFlight
from expediter.scheduling.knowledge import Knowledge
from expediter.scheduling.live import LiveRequests
from expediter.scheduling.passage import Passage
from expediter.scheduling.running import RunningSet
from expediter.scheduling.runs import Runs


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
        live: the requests that have not ended.
        passage: what a cluster does with requests that come from elsewhere or go there.
        runs: how a simulation advances equal steps in one jump.
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
        rules = policy.rules
        running = RunningSet(kv, config.max_num_seqs, rules.ordering)
        self.live = LiveRequests(running, rules.ordering, config.max_explanations)
        self.passage = Passage(config, self.live, rules.memory, knowledge)
        self.runs = Runs(self.live, rules)
        self._next_step = 0
        self._stuck_until_s = 0.0
        self._is_draining = False

    # -- looking ------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self.live.by_id)

    @property
    def num_running(self) -> int:
        return len(self.live.running)

    @property
    def num_waiting(self) -> int:
        return self.live.num_waiting

    @property
    def num_pending_tokens(self) -> int:
        """Known tokens without KV, of the queue (cached prefixes counted in full) and of prompts under way.

        A group's prompt counts once.
        """
        under_way = sum(s.num_known_tokens - s.num_computed_tokens for s in self.live.running.prefilling)
        return self.live.waiting.num_tokens + under_way

    def find(self, request_id: str) -> RequestState | None:
        """Return a live request's state, or None."""
        return self.live.by_id.get(request_id)

    # -- explaining ---------------------------------------------------------------------------------------------------

    def explain(self, request_id: str, now_s: float) -> tuple[Span, ...] | None:
        """Return what held a request and what it did, oldest first; None if it is not known (any more).

        Asked only when somebody wants to know: O(waiting) for a request that waits.
        """
        live = self.live
        state = live.by_id.get(request_id)
        order: dict[str, Detail] = {}
        place = Reason.QUEUED
        if state is not None and state.status is not Status.RUNNING:
            leader = state.leader or state
            place, details = self.policy.rules.ordering.place(leader)
            leaders = [waiting for waiting in live.queued() if waiting.leader is None]
            order = details | live.waiting.place_among(leader, leaders, now_s)
        return live.explanations.of(request_id, now_s, place, order)

    @property
    def num_waiting_by_reason(self) -> dict[str, int]:
        """Waiting requests by what held them when the last step was planned; together `num_waiting`."""
        held_by = self.live.explanations.held_by or Reason.STEP
        rest, counts = self.num_waiting, dict[str, int]()
        known = (*self.live.num_refused.items(), (Reason.LATE, self.policy.rules.ordering.num_late), (held_by, rest))
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
        live = self.live
        check_group(requests, live.by_id)
        leader = self._group_of(requests)
        for state in leader.members:
            state.is_kept = keep
        if self._is_draining:
            return live.reject(leader, (RejectReason.SHUTDOWN, "the replica is shutting down"), now_s)
        refusal = self._refusal_of(leader)
        return live.enqueue(leader, now_s) if refusal is None else live.reject(leader, refusal, now_s)

    def refusal(self, requests: Sequence[Request]) -> tuple[RejectReason, str] | None:
        """Return why a request, with its sequences, could never run here, or None if it could; changes nothing."""
        return self._refusal_of(self._group_of(requests))

    def _refusal_of(self, leader: RequestState) -> tuple[RejectReason, str] | None:
        return refusal_of(leader, self.config, self.policy.rules.memory, self.live.running)

    def _group_of(self, requests: Sequence[Request]) -> RequestState:
        """Return the leader of new requests."""
        known, first = requests[0].prompt.tobytes(), self.live.next_sequence
        leader, *followers = (RequestState(request, first + n, known) for n, request in enumerate(requests))
        leader.followers = followers
        for follower in followers:
            follower.leader = leader
        return leader

    def abort(self, request_id: str, now_s: float, reason: FinishReason = FinishReason.ABORT) -> list[Event]:
        """End a request in any state; its blocks come back once. An unknown id is no error: it may have ended.

        If it led a group, the next in it takes its place.
        """
        live = self.live
        state = live.by_id.get(request_id)
        if state is None:
            return []
        state.is_kept = False
        if state.status is Status.RUNNING:
            slot = state.slot
            successor = live.running.leave(state, now_s)
            if live.step is not None:
                live.step.drop(state, slot, successor)
        elif state.leader is not None:
            state.fall_out()
        else:
            live.waiting.remove(state)
            successor = state.fall_out()
            if successor is None:
                self.kv.host.drop(state.sequence)
                self.passage.drop(state, now_s)
            else:
                self.kv.host.hand_over(state.sequence, successor.sequence)
                self.kv.landings.hand_over(state.sequence, successor.sequence)
                live.waiting.push(successor, now_s)
        return [self._finish(state, now_s, reason)]

    def drain(self) -> None:
        """Refuse new requests from now on; those that are here, or are resumed here, run to their end."""
        self._is_draining = True

    def _finish(self, state: RequestState, now_s: float, reason: FinishReason) -> Finished:
        state.finish_reason = reason
        self.live.end(state, now_s, {"cause": reason.value, "output_tokens": len(state.output)})
        if state.is_kept:
            self.passage.note(state)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.knowledge.lengths.observe(state.request, len(state.output))
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
        live = self.live
        if live.step is not None:
            raise InvariantError(f"step {live.step.plan.step_id} has not been applied")
        draft = self._fill(now_s)
        # Beside landings even a request that runs alone may lack a block; whoever was preempted is tried at once then.
        while len(self.kv.landings) and draft.is_idle and (self._requeue(draft, now_s) or self.passage.let_go(now_s)):
            events = draft.events
            draft = self._fill(now_s)
            draft.events[:0] = events
        if draft.preempted:
            self._requeue(draft, now_s)
        plan, chunks = compose(draft, self._next_step)
        # Once a prompt is complete, its share of the budget is free for others.
        live.queue_is_stuck = draft.queue_is_stuck and not draft.chunks and not self.policy.rules.ordering.may_refuse
        if not draft.queue_is_closed:
            self._stuck_until_s = self.runs.queue_changes_s(now_s)
            live.explanations.turn(draft.held_by if len(live.waiting) else None, now_s)
            live.num_refused = draft.refused
        if not plan.is_empty:
            live.step = InFlight(plan, chunks, is_full=draft.is_full)
            self._next_step += 1
        return plan

    def _requeue(self, draft: Draft, now_s: float) -> bool:
        """Let those wait again that a draft preempted; return whether there are any."""
        for state in draft.preempted:
            self.live.waiting.push(state, now_s)
        if draft.preempted:
            self.live.queue_is_stuck = False
        return bool(draft.preempted)

    def _fill(self, now_s: float) -> Draft:
        live = self.live
        draft = Draft(self.config, self.policy.rules, live.running, live.waiting, live.explanations, now_s)
        draft.queue_is_closed = live.queue_is_stuck and now_s < self._stuck_until_s
        draft.events += self._judge_late(now_s)
        self.policy.batching.fill(draft)
        return draft

    def _judge_late(self, now_s: float) -> list[Event]:
        """Refuse who cannot be in time any more and asked for that; the others stay, and are told why they wait."""
        ordering = self.policy.rules.ordering
        events: list[Event] = []
        for state, found_s in ordering.newly_late(now_s):
            if self.live.by_id.get(state.request_id) is not state or state.status is Status.RUNNING:
                continue  # it has ended or started since
            reason, details = ordering.place(state)
            if state.request.refuse_late and state.first_scheduled_s is None:
                events += self._refuse_late(state, now_s)
            else:
                for member in state.members:
                    self.live.explanations.held(member.request_id, found_s, reason, dict(details))
        return events

    def _refuse_late(self, state: RequestState, now_s: float) -> list[Event]:
        message = "the request cannot meet its targets any more, and it asked to be refused then"
        self.live.waiting.remove(state)
        self.passage.drop(state, now_s)
        return self.live.reject(state, (RejectReason.LATE, message), now_s)

    # -- results ------------------------------------------------------------------------------------------------------

    def apply(self, result: StepResult, now_s: float) -> list[Event]:
        """Take a step's result in; what is not in flight (late, or twice) changes nothing.

        Raises:
            InvariantError: the result is of a step that was never planned, or not of the plan's shape.
        """
        if result.step_id >= self._next_step:
            raise InvariantError(f"step {result.step_id} was never planned")
        live, step = self.live, self.live.step
        if step is None or result.step_id != step.plan.step_id:
            return []
        step.check(result)
        live.step = None
        self._next_step += step.plan.num_steps - 1
        self.knowledge.observe(step.plan, result, is_full=step.is_full)
        events: list[Event] = []
        if step.plan.num_swapped_blocks:
            self._settle_swaps(result, step.chunks.states, now_s, events)
        ended = step.apply_decodes(result, live.running, now_s, events)
        ended += step.apply_chunks(result, live.running, self.knowledge, live.explanations, now_s, events)
        events += [self._finish(state, now_s, _finish_reason(state)) for state in ended]
        return events

    def _settle_swaps(self, result: StepResult, states: list[RequestState], now_s: float, events: list[Event]) -> None:
        """Free what was read; who was to go on with KV that did not arrive goes back to the queue and recomputes."""
        failed = self.kv.swaps.settle(result.failed_host_blocks)
        for state in states:
            if state.slot not in failed:
                continue
            self.live.running.suspend(state, now_s, lambda _: False)  # what did not arrive is not committed
            cause = PreemptCause.SWAP_FAILED
            for member in state.members:
                num_lost, member.num_computed_tokens = member.num_computed_tokens, 0
                member.move(Status.PREEMPTED)
                events.append(Preempted(member.request_id, now_s, cause, num_lost))
                details: dict[str, Detail] = {"cause": cause.value, "lost_tokens": num_lost}
                self.live.explanations.preempted(member.request_id, now_s, details)
            self.live.waiting.push(state, now_s)
        self.live.queue_is_stuck = False


def _finish_reason(state: RequestState) -> FinishReason:
    return FinishReason.STOP if state.has_stopped else FinishReason.LENGTH
