"""A step while it is being decided."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from expediter.core.errors import InvariantError
from expediter.core.events import Admitted, Event, PreemptCause, Preempted
from expediter.core.explanation import Detail, Reason
from expediter.core.plan import Admission
from expediter.core.request import RequestState, Status
from expediter.kvcache.radix import NO_MATCH, PrefixMatch
from expediter.scheduling.budget import BudgetRule
from expediter.scheduling.config import SchedulerConfig
from expediter.scheduling.explanations import Explanations
from expediter.scheduling.memory import MemoryRule
from expediter.scheduling.ordering.base import Ordering
from expediter.scheduling.ordering.queue import WaitingQueue
from expediter.scheduling.preemption import PreemptionMode, VictimRule
from expediter.scheduling.running import RunningSet


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The policy parts that a step is decided by."""

    ordering: Ordering
    memory: MemoryRule
    budget: BudgetRule
    victims: VictimRule
    preemption: PreemptionMode


class Draft:
    """One step in the making. A `Batching` fills it through `add_decodes` and `add_prompts`.

    Attributes:
        budget: tokens that may still be added.
        chunks: planned tokens of prefilling sequences by slot, in batch order.
        preempted: requests to queue again once the step is decided, so that they do not return within it.
        queue_is_closed: nothing has changed since the waiting requests were refused last, so nobody is tried.
        queue_is_stuck: the waiting requests would meet the same refusals in a next step if nothing comes or goes.
        held_by: what keeps the rest of the queue from being tried.
        refused: how many waiting requests were tried in vain, by reason.
        pad_to: sequences of a static batch, for the features; 0 for no padding.
        has_decodes: every decoding sequence is in the step.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        rules: Rules,
        running: RunningSet,
        waiting: WaitingQueue,
        explanations: Explanations,
        now_s: float,
    ) -> None:
        self.now_s = now_s
        self.running = running
        self.budget = self.full_budget = rules.budget.tokens(running, now_s)
        self.has_decodes = False
        self.chunks: dict[int, int] = {}
        self.admitted: list[Admission] = []
        self.preempted: list[RequestState] = []
        self.events: list[Event] = []
        self.queue_is_closed = False
        self.queue_is_stuck = True
        self.held_by = Reason.BATCH
        self.refused: dict[Reason, int] = {}
        self.pad_to = 0
        self._config = config
        self._rules = rules
        self._waiting = waiting
        self._explanations = explanations

    # -- moves of a batching ------------------------------------------------------------------------------------------

    def add_decodes(self) -> None:
        """Add every decoding sequence, preempting some if their next tokens find no block."""
        self.running.grow(self._make_room)
        self.has_decodes = True
        self.budget -= self.running.decoding.size

    def add_prompts(self, *, whole: bool = False) -> None:
        """Add chunks of prompts under way and start waiting requests, in the ordering's order, while budget lasts.

        A waiting request that does not fit is passed over, but only `max_bypasses` times; then it blocks the queue
        until it runs. So a large request neither holds small ones up for long nor is starved by them.

        Args:
            whole: a request starts only if all of it fits the budget.
        """
        ordering = self._rules.ordering
        partial = deque(self.running.prefilling)
        if ordering.interleaves:
            partial = deque(sorted(partial, key=lambda state: self._waiting.urgency(state, self.now_s)))
        if self.queue_is_closed and not partial:
            return
        passed: list[RequestState] = []
        if len(self._waiting) and self._may_start:
            ordering.tick(self.running.decode_clock)
        # Who just lost its blocks must not fight for them again in the same step.
        is_open = not self.preempted and self._may_start
        while self.budget > 0:
            head = self._waiting.first(self.now_s) if is_open else None
            while partial and partial[0].slot < 0:
                partial.popleft()  # displaced since
            if partial and (head is None or not self._goes_before(head, partial[0])):
                self._add_chunk(partial.popleft())
                continue
            if head is None:
                break
            if whole and self._needs_more_than_budget(head):
                self.queue_is_stuck = False
                is_open = False
                continue
            if self._start(head):
                for other in passed:
                    other.num_bypassed += 1
            else:
                passed.append(head)
            is_open = self._may_start and len(passed) <= self._config.max_scan
            is_open = is_open and all(self._may_be_passed(other) for other in passed)
        for state in passed:
            self._waiting.put_back(state, self.now_s)
        self._judge_queue(passed)
        self.held_by = self._why_held(passed)

    def _goes_before(self, head: RequestState, partial: RequestState) -> bool:
        if not self._rules.ordering.interleaves:
            return False
        return self._waiting.urgency(head, self.now_s) < self._waiting.urgency(partial, self.now_s)

    @property
    def _may_start(self) -> bool:
        """Whether anybody can get a slot at all."""
        return self.running.has_slot or self._rules.ordering.displaces

    def _needs_more_than_budget(self, state: RequestState) -> bool:
        if state.num_known_tokens <= self.budget:
            return False
        # A landed one is asked for what it lacks as well: usually a token.
        match = self.running.kv.match(state.token_bytes, state.request.cache_salt)
        return state.num_known_tokens - self.running.kv.num_reusable_tokens(state.sequence, match) > self.budget

    def _may_be_passed(self, state: RequestState) -> bool:
        """Whether others may try after `state` did not fit: not without a slot, and not for ever."""
        return (
            self.running.has_slot
            and state.num_bypassed < self._config.max_bypasses
            and not self._waiting.is_over_age(state, self.now_s)
        )

    def _judge_queue(self, passed: list[RequestState]) -> None:
        if self.admitted or self.preempted:
            self.queue_is_stuck = False
        elif len(self._waiting) and self._may_start:
            # If somebody can get a slot, the order and the budget decide who is tried; both must stand still.
            rules = self._rules
            still = rules.ordering.is_static and rules.memory.is_static and (rules.budget.is_static or self.budget > 0)
            self.queue_is_stuck = self.queue_is_stuck and still and bool(passed or self.budget <= 0)

    def _why_held(self, passed: list[RequestState]) -> Reason:
        """Return why nobody else was tried."""
        if passed or not self._may_start:
            return Reason.NO_BLOCKS if self.running.has_slot else Reason.NO_SLOT
        # Who does not fit whole lacks budget as well.
        return Reason.PREEMPTED if self.preempted and self.budget > 0 else Reason.BUDGET

    def _add_chunk(self, state: RequestState) -> None:
        chunk = min(state.num_known_tokens - state.num_computed_tokens, self.budget)
        self.chunks[state.slot] = chunk
        self.budget -= chunk

    @property
    def is_idle(self) -> bool:
        """Whether nothing would run."""
        decodes = self.has_decodes and self.running.decoding.size
        return not (decodes or self.chunks or self.admitted)

    @property
    def is_full(self) -> bool:
        """Whether prompts had to stay behind because the budget was used up."""
        return self.budget <= 0 and bool(self.chunks)

    # -- starting -----------------------------------------------------------------------------------------------------

    def _start(self, state: RequestState) -> bool:
        """Move a request from the queue into the running set if it fits, displacing others if the ordering lets it.

        It is out of the queue afterwards in any case, but not before the ordering has been asked whom it outranks.
        """
        kv, rules = self.running.kv, self._rules
        num_tokens = rules.memory.reserve_tokens(state)
        landed = kv.landings.find(state.sequence)
        match = NO_MATCH if landed is not None else kv.match(state.token_bytes, state.request.cache_salt)
        spare = rules.memory.spare_blocks(state, self.running)
        if rules.ordering.displaces:
            self._displace_for(state, match, num_tokens, spare)
            spare = rules.memory.spare_blocks(state, self.running)
        self._waiting.remove(state)
        if not self.running.enter(state, match, num_tokens, spare, self.now_s):
            self._note_refusal(state, self.running.shortage(state, match, num_tokens, spare))
            return False
        num_cached, num_computed = match.num_blocks * kv.block_size, state.num_computed_tokens
        if landed is not None and not state.output:
            num_cached = num_computed  # fetched for it, so it is reuse
        rules.ordering.admitted(state, state.num_known_tokens - num_computed, self.running.decode_clock)
        self._announce(state, num_cached, num_computed - num_cached, came_along=landed is not None)
        for follower in state.followers:
            self._announce(follower, follower.num_known_tokens)
        if landed is not None and self.running.is_decoding(state):
            self._join_decodes(state)
        else:
            self._add_chunk(state)
        return True

    def _join_decodes(self, state: RequestState) -> None:
        """Count a request that landed with all its KV among the decodes, in this step if they are in it."""
        self._rules.ordering.joined(state, self.running.decode_clock)
        self._explanations.decoding(state.request_id, self.now_s)
        if self.has_decodes:
            self.budget -= 1

    def _note_refusal(self, state: RequestState, shortage: int) -> None:
        has_slots = self.running.num_free_slots >= len(state.members)
        reason = Reason.NO_BLOCKS if has_slots else Reason.NO_SLOT
        self.refused[reason] = self.refused.get(reason, 0) + len(state.members)
        available = self.running.kv.num_available_blocks
        needs: dict[str, Detail] = {"needs_blocks": available + shortage, "available_blocks": available}
        for member in state.members:
            self._explanations.held(member.request_id, self.now_s, reason, dict(needs) if has_slots else {})

    def _announce(
        self, state: RequestState, num_cached_tokens: int, num_restored: int = 0, *, came_along: bool = False
    ) -> None:
        resumed = state.status is Status.PREEMPTED
        num_computed = num_cached_tokens + num_restored
        state.move(Status.RUNNING)
        if not resumed:
            state.num_cached_tokens = num_cached_tokens
            state.first_scheduled_s = self.now_s
        known = np.frombuffer(state.token_bytes, np.int32)
        self.admitted.append(Admission(state.slot, state, known, num_computed))
        details: dict[str, Detail] = {"new_tokens": len(known) - num_computed, "cached_tokens": num_cached_tokens}
        if num_restored:
            details["landed_tokens" if came_along else "restored_tokens"] = num_restored
        if resumed and not came_along:
            details["resumed"] = True
        if self._waiting.is_over_age(state, self.now_s):
            details["over_age"] = True
        held_s = self._explanations.admitted(state.request_id, self.now_s, details)
        self.events.append(
            Admitted(state.request_id, self.now_s, len(known), num_cached_tokens, resumed, held_s, num_restored)
        )

    # -- preempting ---------------------------------------------------------------------------------------------------

    def _displace_for(self, state: RequestState, match: PrefixMatch, num_tokens: int, spare: int) -> None:
        """Preempt running requests that `state` outranks, if that makes room for it, and nobody otherwise."""
        kv, num_seqs = self.running.kv, len(state.members)
        shortage = self.running.shortage(state, match, num_tokens, spare)
        slots_short = num_seqs - self.running.num_free_slots
        if shortage <= 0 and slots_short <= 0:
            return
        newcomers = {admission.slot for admission in self.admitted}
        victims: list[RequestState] = []
        leaving = np.zeros_like(kv.pool.refs)
        for victim in self._rules.victims.ranked(self.running, self.now_s):
            if shortage <= 0 and slots_short <= 0:
                break
            if victim.slot not in newcomers and self._rules.ordering.outranks(state, victim):
                victims.append(victim)
                slots_short -= len(victim.members)
                shortage -= sum(kv.tables.num_exclusive(member.slot, match, leaving) for member in victim.members)
        if num_seqs - slots_short == self._config.max_num_seqs:
            shortage -= spare  # which is for the growth of those who stay: nobody does
        if not victims or shortage > 0 or slots_short > 0:
            return
        for victim in victims:
            if victim.slot in self.chunks:
                self.budget += self.chunks.pop(victim.slot)
            elif self.has_decodes and self.running.is_decoding(victim):
                self.budget += 1
            self._preempt(victim, PreemptCause.PRIORITY, state)

    def _make_room(self) -> None:
        ranked = self._rules.victims.ranked(self.running, self.now_s)
        if not ranked:
            raise InvariantError("a running request lacks a block, and all of them have theirs reserved")
        decoding, victim = self.running.decoding, ranked[0]
        in_need = decoding.states[decoding.at_edge()].tolist()
        self._preempt(victim, PreemptCause.GROWTH, next((s for s in in_need if s is not victim), None))

    def _preempt(self, state: RequestState, cause: PreemptCause, beneficiary: RequestState | None) -> None:
        mode, running = self._rules.preemption, self.running
        num_swapped = running.suspend(state, self.now_s, lambda num_kept: mode.swaps(state, num_kept, running))
        name = "" if beneficiary is None else beneficiary.request_id
        for member in state.members:
            member.move(Status.PREEMPTED)
            num_lost = member.num_computed_tokens
            self.events.append(Preempted(member.request_id, self.now_s, cause, num_lost, name, num_swapped))
            details: dict[str, Detail] = {"cause": cause.value, "for_request": name, "lost_tokens": num_lost}
            if num_swapped:
                details["swapped_tokens"] = num_swapped
            self._explanations.preempted(member.request_id, self.now_s, details)
            member.num_computed_tokens = 0
            member.num_preemptions += 1
            num_swapped = 0  # a follower has computed nothing
        self.preempted.append(state)
        self.queue_is_stuck = False
