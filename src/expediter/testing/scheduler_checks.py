"""The promises of a `Scheduler`, checked against what its plans and events say."""

from __future__ import annotations

from collections.abc import Iterable

from expediter.core.errors import InvariantError
from expediter.core.events import (
    Admitted,
    Event,
    Finished,
    FirstToken,
    PreemptCause,
    Preempted,
    Rejected,
    RejectReason,
    Tokens,
)
from expediter.core.explanation import Reason
from expediter.core.plan import StepFeatures, StepPlan
from expediter.core.request import FinishReason
from expediter.scheduling.batching import PromptsFirst, StaticBatches
from expediter.scheduling.lazy_heap import Key
from expediter.scheduling.memory import PagedMemory
from expediter.scheduling.ordering.simple import EarliestDeadline, ShortestPredicted
from expediter.scheduling.scheduler import Scheduler
from expediter.testing.driven_request import DrivenRequest, DrivenStep

_LEARNING = (EarliestDeadline, ShortestPredicted)
"""Orderings whose keys rest on predictions, which change while a request keeps the key that it was queued with."""


class SchedulerChecks:
    """What a scheduler's plans and events say of its requests, and whether that is what it promises.

    `SchedulerDriver` calls the scheduler and notes here what comes of it.

    Args:
        scheduler: fresh; nobody else may call it.
        checks_blocks: verify the scheduler's internals too; without, only what a client could see.
    """

    def __init__(self, scheduler: Scheduler, *, checks_blocks: bool) -> None:
        self.scheduler = scheduler
        self.now_s = 0.0
        self.requests: dict[str, DrivenRequest] = {}
        self.rejected: dict[str, Rejected] = {}
        self.events: list[Event] = []
        self.steps: list[DrivenStep] = []
        self._checks_blocks = checks_blocks
        self._by_slot: dict[int, DrivenRequest] = {}
        self._entries: list[tuple[DrivenRequest, int]] = []

    @property
    def live(self) -> list[DrivenRequest]:
        """Requests without a terminal event, in order of arrival."""
        return [request for request in self.requests.values() if request.finished is None]

    def check(self) -> None:
        """Verify the scheduler's state against the events."""
        scheduler, kv = self.scheduler, self.scheduler.kv
        live = self.live
        running = [r for r in live if r.is_running]
        waiting = [r for r in live if not r.is_running]
        leaders = [r for r in live if r.leader is None]
        for r in leaders:
            require(all(f.is_running == r.is_running for f in r.followers), f"{r.request_id} and followers are apart")
        pending = sum(len(r.known_tokens) - r.num_computed_tokens for r in leaders if not r.is_decoding)
        counts = (scheduler.num_running, scheduler.num_waiting, scheduler.num_pending_tokens)
        require(
            counts == (len(running), len(waiting), pending),
            f"running, waiting and pending tokens are {counts}, events say {(len(running), len(waiting), pending)}",
        )
        require(scheduler.has_work == bool(live), "has_work disagrees with the events")
        parts = (kv.num_free_blocks, kv.num_cached_blocks, kv.num_used_blocks)
        require(sum(parts) == kv.num_blocks and min(parts) >= 0, f"free, cached and used blocks are {parts}")
        host = kv.host
        parts = (host.num_free, host.num_held, host.num_in_transit)
        require(sum(parts) == host.num_blocks and min(parts) >= 0, f"free, held and read host blocks are {parts}")
        require(self._entries != [] or not host.num_in_transit, "host blocks are read, and no step is in flight")
        held = sum(self._num_host_blocks(r) for r in waiting)
        require(held == host.num_held, f"waiting requests hold {held} host blocks of {host.num_held}")
        if self._checks_blocks:
            scheduler.live.check()
        for request in live[:4]:  # some of them, since each that waits costs a look at all that wait
            self._check_explanation(request)
        require(
            sum(scheduler.num_waiting_by_reason.values()) == len(waiting), "the reasons do not cover those who wait"
        )

    def _check_explanation(self, request: DrivenRequest) -> None:
        spans = self.scheduler.explain(request.request_id, self.now_s)
        require(spans is not None, f"{request.request_id} is live and has no explanation")
        assert spans is not None
        ends = [span.to_s for span in spans]
        require(
            ends[-1] is None and ends[:-1] == [span.from_s for span in spans[1:]],
            f"the explanation of {request.request_id} has gaps: {spans}",
        )
        told_to_run = spans[-1].reason in (Reason.PREFILLING, Reason.DECODING)
        require(told_to_run == request.is_running, f"{request.request_id} is explained as {spans[-1].reason}")
        require(all(span.in_words() for span in spans), "a span has no words")

    def _num_host_blocks(self, request: DrivenRequest) -> int:
        state = self.scheduler.find(request.request_id)
        copy = None if state is None else self.scheduler.kv.host.find(state.sequence)
        return 0 if copy is None else len(copy.blocks)

    # -- plans --------------------------------------------------------------------------------------------------------

    def _order(self) -> dict[str, tuple[Key, int]]:
        """Return the keys of all who wait, if the order is one that stands still while a step is planned."""
        ordering = self.scheduler.policy.rules.ordering
        if not ordering.is_static or isinstance(ordering, _LEARNING):
            return {}
        keys: dict[str, tuple[Key, int]] = {}
        for request in self.live:
            state = self.scheduler.find(request.request_id)
            if state is not None and not request.is_running and request.leader is None:
                is_old = self.now_s - request.request.arrival_s > ordering.max_wait_s
                own = (1.0, *ordering.urgency(state, self.now_s))
                keys[request.request_id] = ((0.0, request.request.arrival_s) if is_old else own, state.sequence)
        return keys

    def _check_events_of(self, plan: StepPlan, order: dict[str, tuple[Key, int]]) -> None:
        config = self.scheduler.config
        admitted = [e.request_id for e in plan.events if isinstance(e, Admitted)]
        preempted = [e.request_id for e in plan.events if isinstance(e, Preempted)]
        require([a.state.request_id for a in plan.admitted] == admitted, "admissions and their events differ")
        require(not set(admitted) & set(preempted), "a request is preempted and admitted in one plan")
        require(not plan.is_empty or not self.scheduler.has_work, "an empty plan, though there is work")
        rules = self.scheduler.policy.rules
        num_leaders = sum(r.is_running and r.leader is None for r in self.live)
        if admitted and num_leaders > 1 and isinstance(rules.memory, PagedMemory):
            available = self.scheduler.kv.num_available_blocks
            require(available >= config.watermark_blocks, f"admission left {available} blocks available")
        for event in plan.events:
            if isinstance(event, Preempted) and event.cause is PreemptCause.PRIORITY and rules.ordering.is_static:
                victim = self.scheduler.find(event.request_id)
                winners = [admission.state for admission in plan.admitted]
                require(
                    victim is not None and any(rules.ordering.outranks(winner, victim) for winner in winners),
                    f"{event.request_id} was displaced for nobody who outranks it",
                )
        leaders = [name for name in admitted if name in order]
        for name, key in order.items():
            request = self.requests[name]
            if not request.is_running and request.finished is None:
                request.num_bypassed += sum(order[other] > key for other in leaders)
                require(
                    request.num_bypassed <= config.max_bypasses,
                    f"{request.request_id} was bypassed {request.num_bypassed} times, limit {config.max_bypasses}",
                )
        if not plan.is_empty:
            self._note(plan, tuple(admitted), tuple(preempted))

    def _note(self, plan: StepPlan, admitted: tuple[str, ...], preempted: tuple[str, ...]) -> None:
        ids = [self._by_slot[slot].request_id for slot in plan.slots.tolist()]
        ranges = zip(plan.starts.tolist(), plan.lengths.tolist(), strict=True)
        self.steps.append(
            DrivenStep(
                step_id=plan.step_id,
                entries=dict(zip(ids, ranges, strict=True)),
                decodes=tuple(ids[: plan.num_decodes]),
                admitted=admitted,
                preempted=preempted,
            )
        )
        require(len(self.steps[-1].entries) == len(ids), f"a request is twice in a batch: {ids}")

    def _check_entries_of(self, plan: StepPlan, decoding: set[str]) -> None:
        config = self.scheduler.config
        requests = [self._by_slot[slot] for slot in plan.slots.tolist()]
        lengths = plan.lengths.tolist()
        self._entries = list(zip(requests, lengths, strict=True))
        require(len(plan.tokens) <= config.max_num_batched_tokens, f"{len(plan.tokens)} tokens exceed the budget")
        require(self.scheduler.num_running <= config.max_num_seqs, "more sequences run than there are slots")
        decodes = {r.request_id for r in requests[: plan.num_decodes]}
        owed = {request_id for request_id in decoding if self.requests[request_id].is_decoding}
        batching = self.scheduler.policy.batching
        if not (isinstance(batching, PromptsFirst) and requests and not decodes):
            require(decodes == owed, f"{sorted(owed)} decode, but the plan gives a token to {sorted(decodes)}")
        tokens: list[int] = []
        sampled: list[int] = []
        owners: list[str] = []
        context, attention = 0, 0.0
        for index, (request, length) in enumerate(self._entries):
            start, known = request.num_computed_tokens, request.known_tokens
            require(request.is_running and request.finished is None, f"{request.request_id} is planned but not running")
            require(
                length >= 1 and plan.starts[index] == start, f"{request.request_id} does not go on where it stopped"
            )
            tokens += known[start : start + length]
            require(request.leader is None, f"{request.request_id} computes though its leader does")
            if start + length == len(known):
                sampled += [index] * len(request.members)
                owners += [member.request_id for member in request.members]
            if index < plan.num_decodes:
                context += start + 1
            else:
                attention += length * (start + length / 2)
                is_whole = start + length == len(known)
                require(is_whole or not batching.whole_prompts, f"{request.request_id} is not computed whole")
        require(plan.tokens.tolist() == tokens, "the plan's tokens are not those of its requests")
        require(plan.sampled.tolist() == sampled, "the plan samples others than those that catch up")
        named = [self._by_slot[slot].request_id for slot in plan.sample_slots.tolist()]
        require(named == owners, f"the plan samples for {named}, not for {owners}")
        features = StepFeatures(len(tokens), len(requests), plan.num_decodes, context, attention)
        if isinstance(batching, StaticBatches):
            require(plan.features.num_tokens >= features.num_tokens, "padding takes tokens away")
            return
        require(plan.features == features, f"features are {plan.features}, the entries say {features}")

    # -- events -------------------------------------------------------------------------------------------------------

    def _record(self, events: Iterable[Event]) -> None:
        for event in events:
            self.events.append(event)
            match event:
                case Tokens():
                    self._record_tokens(event)
                case Admitted() | Preempted() | FirstToken() | Finished() | Rejected():
                    request = self.requests.get(event.request_id)
                    if request is None or request.finished is not None:
                        raise InvariantError(f"{event} is of a request that is not live")
                    self._record_move(request, event)
                case _:
                    raise InvariantError(f"{event} can only come from add")

    def _record_move(
        self, request: DrivenRequest, event: Admitted | Preempted | FirstToken | Finished | Rejected
    ) -> None:
        name = request.request_id
        match event:
            case Admitted(
                num_known_tokens=num_known,
                num_cached_tokens=num_cached,
                resumed=resumed,
                num_restored_tokens=num_restored,
            ):
                require(not request.is_running, f"{name} is admitted twice")
                require(resumed == bool(request.admissions), f"{name}: resumed is {resumed}")
                require(num_known == len(request.known_tokens), f"{name} is admitted with {num_known} tokens")
                most = num_known - (request.leader is None)
                require(0 <= num_cached <= most, f"{name}: {num_cached} of {num_known} tokens cached")
                num_computed = num_cached + num_restored
                require(num_cached <= num_computed <= most, f"{name}: {num_restored} tokens restored")
                require(resumed or not num_restored, f"{name}: {num_restored} tokens restored of a new request")
                request.is_running = True
                request.num_computed_tokens = num_computed if request.leader is None else 0
                request.num_restored_tokens += num_restored
                request.admissions.append(num_cached)
            case Preempted(cause=PreemptCause.SWAP_FAILED):
                require(request.is_running and not request.is_decoding, f"{name} loses KV that it did not wait for")
                request.num_failed_swaps += 1
                request.is_running = False
                request.num_computed_tokens = 0
            case Preempted(num_lost_tokens=num_lost, num_swapped_tokens=num_swapped):
                require(request.is_running, f"{name} is preempted while it waits")
                require(num_lost == request.num_computed_tokens, f"{name} lost {num_lost} tokens")
                require(0 <= num_swapped <= num_lost, f"{name}: {num_swapped} of {num_lost} tokens swapped out")
                request.num_preemptions += 1
                limit = self.scheduler.config.max_preemptions
                require(request.num_preemptions <= limit, f"{name} was preempted {request.num_preemptions} times")
                request.is_running = request.is_decoding = False
                request.num_computed_tokens = 0
            case FirstToken():
                require(request.is_running and not request.has_first_token, f"{name}: first token in the wrong place")
                request.has_first_token = True
            case Rejected(reason=reason):
                require(reason is RejectReason.LATE, f"{name} is refused after it was queued: {reason}")
                require(request.request.refuse_late and not request.admissions, f"{name} is refused, but may not be")
                request.finished = self.rejected[name] = event
            case Finished():
                self._check_end(request, event)
                request.finished = event
                request.fall_out()
                request.is_running = request.is_decoding = False

    def _record_tokens(self, event: Tokens) -> None:
        for column, state in enumerate(event.states):
            request = self.requests.get(state.request_id)
            if request is None or request.request is not state.request or request.finished is not None:
                raise InvariantError(f"tokens for {state.request_id}, which is not live")
            name = request.request_id
            require(request.is_running and request.has_first_token, f"{name} gets tokens before its first")
            request.output += event.tokens[:, column].tolist()
            request.is_decoding = True
            expected = request.expected[: len(request.output)]
            require(request.output == expected, f"{name} says {request.output}, the model says {expected}")

    def _check_end(self, request: DrivenRequest, event: Finished) -> None:
        name = request.request_id
        if event.reason in (FinishReason.STOP, FinishReason.LENGTH):
            require(request.is_running, f"{name} finishes without running")
            require(request.output == request.expected, f"{name} ends at {len(request.output)} output tokens")
            stopped = request.output[-1] in request.request.stop_token_ids
            stopped &= len(request.output) >= request.request.min_tokens
            require((event.reason is FinishReason.STOP) == stopped, f"{name} ends because of {event.reason}")
        counts = (event.num_prompt_tokens, event.num_output_tokens, event.num_cached_tokens, event.num_preemptions)
        cached = request.admissions[0] if request.admissions else 0
        told = (request.request.num_prompt_tokens, len(request.output), cached, request.num_preemptions)
        require(counts == told, f"{name} ends with counts {counts}, events say {told}")
        most = request.request.max_total_tokens * (request.num_preemptions + request.num_failed_swaps + 1)
        require(request.num_tokens_run <= most, f"{name}: {request.num_tokens_run} tokens computed, at most {most}")


def require(holds: bool, message: str) -> None:
    if not holds:
        raise InvariantError(message)
