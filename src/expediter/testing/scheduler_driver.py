"""Drives a `Scheduler` on the toy model and checks every promise of its surface at each call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

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
from expediter.core.explanation import Reason
from expediter.core.plan import StepFeatures, StepPlan, StepResult
from expediter.core.ports import ExecutorLimits, StepTimeModel
from expediter.core.request import FinishReason, Request
from expediter.core.slo import NO_SLO, Slo
from expediter.scheduling.batching import PromptsFirst, StaticBatches
from expediter.scheduling.build import CacheConfig, PolicyConfig, build_scheduler
from expediter.scheduling.config import SchedulerConfig
from expediter.scheduling.lazy_heap import Key
from expediter.scheduling.memory import PagedMemory
from expediter.scheduling.ordering.base import Ordering
from expediter.scheduling.ordering.simple import EarliestDeadline, ShortestPredicted
from expediter.scheduling.scheduler import Scheduler
from expediter.testing.fake_executor import FakeExecutor, toy_generate

_LEARNING = (EarliestDeadline, ShortestPredicted)
"""Orderings whose keys rest on predictions, which change while a request keeps the key that it was queued with."""


def expected_output(request: Request, vocab_size: int) -> list[int]:
    """Return what the toy model answers to `request`, cut where a stop token or `max_tokens` ends it."""
    output = toy_generate(request.prompt, request.max_tokens, vocab_size, request.sampling.seed)
    for count, token in enumerate(output, start=1):
        if token in request.stop_token_ids and count >= request.min_tokens:
            return output[:count]
    return output


def sequences_of(request: Request, n: int) -> list[Request]:
    """Return `n` sequences of a request: itself, and copies with ids "ID.1", "ID.2" and seeds of their own."""
    return [
        request
        if number == 0
        else replace(
            request,
            request_id=f"{request.request_id}.{number}",
            sampling=replace(request.sampling, seed=(request.sampling.seed or 0) + number),
        )
        for number in range(n)
    ]


@dataclass(slots=True, eq=False)
class DrivenRequest:
    """A request as its client sees it, rebuilt from plans and events alone.

    Attributes:
        expected: the whole output that the toy model gives to the prompt.
        output: tokens reported so far.
        admissions: cached tokens at each admission.
        num_computed_tokens: tokens whose KV exists, as of the last applied step.
        num_tokens_run: tokens computed for it in all, repetitions after preemptions included.
        num_bypassed: requests admitted past it while it waited.
        num_failed_swaps: times that its KV did not come back from the host.
        num_restored_tokens: tokens brought back from the host, in all.
        is_decoding: it has caught up, so every step owes it a token.
        leader: who computes its prompt, until the group forks.
        followers: whose prompt it computes.
        heir: who leads its group since it ended.
        finished: its terminal event, None while it lives; a refusal if it was refused while it waited.
    """

    request: Request
    expected: list[int]
    output: list[int] = field(default_factory=list)
    admissions: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_tokens_run: int = 0
    num_preemptions: int = 0
    num_bypassed: int = 0
    num_failed_swaps: int = 0
    num_restored_tokens: int = 0
    is_running: bool = False
    is_decoding: bool = False
    has_first_token: bool = False
    finished: Finished | Rejected | None = None
    leader: DrivenRequest | None = None
    followers: list[DrivenRequest] = field(default_factory=list)
    heir: DrivenRequest | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def members(self) -> list[DrivenRequest]:
        """This one and its followers."""
        return [self, *self.followers]

    @property
    def last_heir(self) -> DrivenRequest:
        """Who does now what this one was planned to do."""
        return self if self.heir is None else self.heir.last_heir

    def fall_out(self) -> None:
        """Leave the group; the next one takes over what was computed if this one led it."""
        if self.leader is not None:
            self.leader.followers.remove(self)
            self.leader = None
        elif self.followers:
            heir, *others = self.followers
            self.followers, self.heir = [], heir
            heir.leader, heir.followers = None, others
            heir.num_computed_tokens, heir.num_bypassed = self.num_computed_tokens, self.num_bypassed
            for other in others:
                other.leader = heir

    def fork(self) -> None:
        """Part with the followers, which have what this one computed."""
        for follower in self.followers:
            follower.leader, follower.num_computed_tokens = None, self.num_computed_tokens
        self.followers = []

    @property
    def known_tokens(self) -> list[int]:
        return [*self.request.prompt.tolist(), *self.output]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrivenStep:
    """A plan as it was made, by request instead of by slot; a jump is one of them.

    Attributes:
        entries: request id -> (first position, new tokens), in batch order.
        decodes: the leading entries that decode.
    """

    step_id: int
    entries: dict[str, tuple[int, int]]
    decodes: tuple[str, ...]
    admitted: tuple[str, ...]
    preempted: tuple[str, ...]

    @property
    def num_tokens(self) -> int:
        return sum(length for _, length in self.entries.values())


class SchedulerDriver:
    """Owns a scheduler and a `FakeExecutor`; a conformance check for orderings and for the scheduler itself.

    `build` one with a policy of your own, call `submit`, `abort` and `step` as your test likes, then `run_to_end`.
    After each call it has verified that

    - blocks, slots and queues are consistent, and counts agree with what the events say;
    - budget, slots, watermark and `max_preemptions` are kept, and no sequence is twice in a batch;
    - nobody is passed by more than `max_bypasses` that stood behind it, where the order is static;
    - every decoding request gets its token in every step (or, where prompts go first, all of them or none), prompts
      are whole where they should be, and no plan is empty while there is work;
    - the sequences of a group run together or not at all until they fork, and only the leader computes till then;
    - entries go on where their sequence stopped, and the step's features are those of its entries;
    - who is displaced is outranked by somebody who then runs (where that is static);
    - events come in a legal order, with one terminal event per request and nothing after it;
    - outputs are those of the toy model, token by token: a lost, stale or mixed-up block changes them.

    Args:
        scheduler: fresh; nobody else may call it.
        vocab_size: of the toy model.
        checks_blocks: verify the scheduler's internals after each call too; without, only what a client could see.
        step_time: what steps are said to take, for policies that learn it; the driver's own clock ticks once per step.
    Attributes:
        requests: by id, those that ended included (until their id is used again).
        events: everything that the scheduler reported, in order.
        steps: every non-empty plan.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        vocab_size: int = 50,
        checks_blocks: bool = True,
        step_time: StepTimeModel | None = None,
    ) -> None:
        kv = scheduler.kv
        self.scheduler = scheduler
        self.executor = FakeExecutor(
            ExecutorLimits(
                num_blocks=kv.num_blocks,
                block_size=kv.block_size,
                max_model_len=scheduler.config.max_model_len,
                vocab_size=vocab_size,
                max_num_seqs=scheduler.config.max_num_seqs,
                num_host_blocks=kv.host.num_blocks,
            ),
            step_time=step_time,
        )
        self.now_s = 0.0
        self.requests: dict[str, DrivenRequest] = {}
        self.rejected: dict[str, Rejected] = {}
        self.events: list[Event] = []
        self.steps: list[DrivenStep] = []
        self._checks_blocks = checks_blocks
        self._by_slot: dict[int, DrivenRequest] = {}
        self._entries: list[tuple[DrivenRequest, int]] = []

    @classmethod
    def build(
        cls,
        config: SchedulerConfig,
        *,
        num_blocks: int,
        block_size: int,
        policy: PolicyConfig | None = None,
        ordering: Ordering | str | None = None,
        prefix_caching: bool = True,
        num_host_blocks: int = 0,
        block_swap_s: float | None = None,
        prior: StepTimeModel | None = None,
        vocab_size: int = 50,
        checks_blocks: bool = True,
        step_time: StepTimeModel | None = None,
    ) -> SchedulerDriver:
        """Return a driver of a new scheduler over an empty KV cache.

        Args:
            ordering: a name, or an object of one's own, instead of the policy's.
        """
        scheduler = build_scheduler(
            config=config,
            cache=CacheConfig(
                num_blocks=num_blocks,
                block_size=block_size,
                prefix_caching=prefix_caching,
                num_host_blocks=num_host_blocks,
                block_swap_s=block_swap_s,
            ),
            policy=replace(policy or PolicyConfig(), ordering=ordering) if isinstance(ordering, str) else policy,
            ordering=None if isinstance(ordering, str) else ordering,
            prior=prior,
        )
        return cls(scheduler, vocab_size=vocab_size, checks_blocks=checks_blocks, step_time=step_time)

    # -- calls --------------------------------------------------------------------------------------------------------

    @property
    def live(self) -> list[DrivenRequest]:
        """Requests without a terminal event, in order of arrival."""
        return [request for request in self.requests.values() if request.finished is None]

    def output(self, request_id: str) -> list[int]:
        return self.requests[request_id].output

    def submit(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        min_tokens: int = 0,
        stop_token_ids: tuple[int, ...] = (),
        priority: int = 0,
        cache_salt: str = "",
        arrival_s: float | None = None,
        tenant: str = "",
        slo: Slo = NO_SLO,
        refuse_late: bool = False,
        n: int = 1,
    ) -> bool:
        """Make a request, arrived now unless told otherwise, and `add` it.

        Args:
            n: its sequences: ids are "ID", "ID.1", "ID.2", seeds none, 1, 2 and so on.
        """
        request = Request(
            request_id=request_id,
            prompt=np.array(prompt, np.int32),
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=stop_token_ids,
            priority=priority,
            cache_salt=cache_salt,
            arrival_s=self.now_s if arrival_s is None else arrival_s,
            tenant=tenant,
            slo=slo,
            refuse_late=refuse_late,
        )
        return self.add(*sequences_of(request, n))

    def add(self, *requests: Request) -> bool:
        """Queue a request, or a group of them; return False if it was rejected."""
        events = self.scheduler.add_group(requests, self.now_s)
        self.events += events
        told = [event.request_id for event in events if isinstance(event, Queued | Rejected)]
        _require(told == [r.request_id for r in requests], f"add reports {events}")
        if all(isinstance(event, Rejected) for event in events):
            self.rejected.update((event.request_id, event) for event in events if isinstance(event, Rejected))
            self.check()
            return False
        _require(all(isinstance(event, Queued) for event in events), f"add reports {events}")
        group = [self._queued(request) for request in requests]
        group[0].followers = group[1:]
        for follower in group[1:]:
            follower.leader = group[0]
        self.check()
        return True

    def _queued(self, request: Request) -> DrivenRequest:
        name = request.request_id
        state = self.scheduler.find(name)
        _require(state is not None and state.request is request, f"{name} is queued but not to be found")
        self.requests.pop(name, None)
        expected = expected_output(request, self.executor.limits.vocab_size)
        driven = self.requests[name] = DrivenRequest(request, expected)
        return driven

    def abort(self, request_id: str) -> None:
        """Abort a request in whatever state it is; ids that are not live change nothing."""
        alive = [r.request_id for r in self.live]
        events = self.scheduler.abort(request_id, self.now_s)
        _require(len(events) == (request_id in alive), f"abort of {request_id} reports {events}")
        self._record(events)
        self.check()

    def plan(self) -> StepPlan:
        """Plan a step and verify the plan; `finish` it before the next."""
        self.now_s += 1
        decoding = {r.request_id for r in self.live if r.is_decoding}
        order = self._order()
        plan = self.scheduler.plan(self.now_s)
        for admission in plan.admitted:
            self._by_slot[admission.slot] = self.requests[admission.state.request_id]
        self._record(plan.events)
        self._check_events_of(plan, order)
        self._check_entries_of(plan, decoding)
        return plan

    def finish(self, plan: StepPlan) -> StepResult:
        """Execute and apply a plan; requests that were aborted since are ignored, as they should be."""
        result = self.executor.execute(plan)
        self.apply(result)
        return result

    def apply(self, result: StepResult) -> None:
        """Apply the result of the plan in flight."""
        num_steps = len(result.tokens)
        self.now_s += num_steps - 1
        entries = [(request.last_heir, length) for request, length in self._entries]
        alive = [(request, length) for request, length in entries if request.finished is None]
        owed: list[tuple[DrivenRequest, int]] = []
        events = self.scheduler.apply(result, self.now_s)
        fallen = {e.request_id for e in events if isinstance(e, Preempted)}
        _require(not fallen or result.failed_host_blocks != (), f"{fallen} lost their KV, though no move failed")
        for request, length in alive:
            num_known = len(request.known_tokens)
            request.num_computed_tokens += length + num_steps - 1
            request.num_tokens_run += length + num_steps - 1
            has_caught_up = request.num_computed_tokens == num_known + num_steps - 1
            has_caught_up &= request.request_id not in fallen
            owed += [(other, len(other.output) + num_steps * has_caught_up) for other in request.members]
            if has_caught_up:
                request.fork()
        self._entries = []
        self._record(events)
        for request, num_output in owed:
            _require(
                len(request.output) == num_output,
                f"{request.request_id} has {len(request.output)} output tokens after the step, not {num_output}",
            )
        self.check()

    def apply_late(self, result: StepResult) -> None:
        """Apply a result that is not in flight any more; it must change nothing."""
        events = self.scheduler.apply(result, self.now_s)
        _require(not events, f"a late result reports {events}")
        self.check()

    def step(self, max_repeat: int = 1) -> StepPlan:
        """Plan, execute and apply; up to `max_repeat` equal steps in one jump. The plan may be empty."""
        plan = self.plan()
        if not plan.is_empty:
            self.scheduler.repeat(plan, min(max_repeat, self.scheduler.repeatable_steps(plan)))
            self.finish(plan)
        return plan

    def run_to_end(self, max_repeat: int = 1) -> None:
        """Step until nothing is left, within the bound that the limits promise, and verify that all is given back.

        Every step computes a token at least, and a request is computed at most once per admission.
        """
        limit = self.scheduler.config.max_preemptions
        most = sum(r.request.max_total_tokens * (limit + 1 - r.num_preemptions) for r in self.live)
        for _ in range(most):
            if not self.live:
                break
            self.step(max_repeat)
        _require(not self.live, f"{len(self.live)} requests have not ended after {most} steps")
        scheduler, kv = self.scheduler, self.scheduler.kv
        _require(not scheduler.has_work and scheduler.num_pending_tokens == 0, "work is left without a request")
        _require(self.step().is_empty, "a plan without work is not empty")
        _require(kv.num_used_blocks == 0, f"{kv.num_used_blocks} blocks are still used")
        _require(kv.num_free_blocks + kv.num_cached_blocks == kv.num_blocks, "blocks are lost")
        _require(kv.host.num_free == kv.host.num_blocks, "host blocks are lost")

    def check(self) -> None:
        """Verify the scheduler's state against the events."""
        scheduler, kv = self.scheduler, self.scheduler.kv
        live = self.live
        running = [r for r in live if r.is_running]
        waiting = [r for r in live if not r.is_running]
        leaders = [r for r in live if r.leader is None]
        for r in leaders:
            _require(all(f.is_running == r.is_running for f in r.followers), f"{r.request_id} and followers are apart")
        pending = sum(len(r.known_tokens) - r.num_computed_tokens for r in leaders if not r.is_decoding)
        counts = (scheduler.num_running, scheduler.num_waiting, scheduler.num_pending_tokens)
        _require(
            counts == (len(running), len(waiting), pending),
            f"running, waiting and pending tokens are {counts}, events say {(len(running), len(waiting), pending)}",
        )
        _require(scheduler.has_work == bool(live), "has_work disagrees with the events")
        parts = (kv.num_free_blocks, kv.num_cached_blocks, kv.num_used_blocks)
        _require(sum(parts) == kv.num_blocks and min(parts) >= 0, f"free, cached and used blocks are {parts}")
        host = kv.host
        parts = (host.num_free, host.num_held, host.num_in_transit)
        _require(sum(parts) == host.num_blocks and min(parts) >= 0, f"free, held and read host blocks are {parts}")
        _require(self._entries != [] or not host.num_in_transit, "host blocks are read, and no step is in flight")
        held = sum(self._num_host_blocks(r) for r in waiting)
        _require(held == host.num_held, f"waiting requests hold {held} host blocks of {host.num_held}")
        if self._checks_blocks:
            scheduler.check()
        for request in live[:4]:  # some of them, since each that waits costs a look at all that wait
            self._check_explanation(request)
        _require(
            sum(scheduler.num_waiting_by_reason.values()) == len(waiting), "the reasons do not cover those who wait"
        )

    def _check_explanation(self, request: DrivenRequest) -> None:
        spans = self.scheduler.explain(request.request_id, self.now_s)
        _require(spans is not None, f"{request.request_id} is live and has no explanation")
        assert spans is not None
        ends = [span.to_s for span in spans]
        _require(
            ends[-1] is None and ends[:-1] == [span.from_s for span in spans[1:]],
            f"the explanation of {request.request_id} has gaps: {spans}",
        )
        told_to_run = spans[-1].reason in (Reason.PREFILLING, Reason.DECODING)
        _require(told_to_run == request.is_running, f"{request.request_id} is explained as {spans[-1].reason}")
        _require(all(span.in_words() for span in spans), "a span has no words")

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
        _require([a.state.request_id for a in plan.admitted] == admitted, "admissions and their events differ")
        _require(not set(admitted) & set(preempted), "a request is preempted and admitted in one plan")
        _require(not plan.is_empty or not self.scheduler.has_work, "an empty plan, though there is work")
        rules = self.scheduler.policy.rules
        num_leaders = sum(r.is_running and r.leader is None for r in self.live)
        if admitted and num_leaders > 1 and isinstance(rules.memory, PagedMemory):
            available = self.scheduler.kv.num_available_blocks
            _require(available >= config.watermark_blocks, f"admission left {available} blocks available")
        for event in plan.events:
            if isinstance(event, Preempted) and event.cause is PreemptCause.PRIORITY and rules.ordering.is_static:
                victim = self.scheduler.find(event.request_id)
                winners = [admission.state for admission in plan.admitted]
                _require(
                    victim is not None and any(rules.ordering.outranks(winner, victim) for winner in winners),
                    f"{event.request_id} was displaced for nobody who outranks it",
                )
        leaders = [name for name in admitted if name in order]
        for name, key in order.items():
            request = self.requests[name]
            if not request.is_running and request.finished is None:
                request.num_bypassed += sum(order[other] > key for other in leaders)
                _require(
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
        _require(len(self.steps[-1].entries) == len(ids), f"a request is twice in a batch: {ids}")

    def _check_entries_of(self, plan: StepPlan, decoding: set[str]) -> None:
        config = self.scheduler.config
        requests = [self._by_slot[slot] for slot in plan.slots.tolist()]
        lengths = plan.lengths.tolist()
        self._entries = list(zip(requests, lengths, strict=True))
        _require(len(plan.tokens) <= config.max_num_batched_tokens, f"{len(plan.tokens)} tokens exceed the budget")
        _require(self.scheduler.num_running <= config.max_num_seqs, "more sequences run than there are slots")
        decodes = {r.request_id for r in requests[: plan.num_decodes]}
        owed = {request_id for request_id in decoding if self.requests[request_id].is_decoding}
        batching = self.scheduler.policy.batching
        if not (isinstance(batching, PromptsFirst) and requests and not decodes):
            _require(decodes == owed, f"{sorted(owed)} decode, but the plan gives a token to {sorted(decodes)}")
        tokens: list[int] = []
        sampled: list[int] = []
        owners: list[str] = []
        context, attention = 0, 0.0
        for index, (request, length) in enumerate(self._entries):
            start, known = request.num_computed_tokens, request.known_tokens
            _require(
                request.is_running and request.finished is None, f"{request.request_id} is planned but not running"
            )
            _require(
                length >= 1 and plan.starts[index] == start, f"{request.request_id} does not go on where it stopped"
            )
            tokens += known[start : start + length]
            _require(request.leader is None, f"{request.request_id} computes though its leader does")
            if start + length == len(known):
                sampled += [index] * len(request.members)
                owners += [member.request_id for member in request.members]
            if index < plan.num_decodes:
                context += start + 1
            else:
                attention += length * (start + length / 2)
                is_whole = start + length == len(known)
                _require(is_whole or not batching.whole_prompts, f"{request.request_id} is not computed whole")
        _require(plan.tokens.tolist() == tokens, "the plan's tokens are not those of its requests")
        _require(plan.sampled.tolist() == sampled, "the plan samples others than those that catch up")
        named = [self._by_slot[slot].request_id for slot in plan.sample_slots.tolist()]
        _require(named == owners, f"the plan samples for {named}, not for {owners}")
        features = StepFeatures(len(tokens), len(requests), plan.num_decodes, context, attention)
        if isinstance(batching, StaticBatches):
            _require(plan.features.num_tokens >= features.num_tokens, "padding takes tokens away")
            return
        _require(plan.features == features, f"features are {plan.features}, the entries say {features}")

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
                _require(not request.is_running, f"{name} is admitted twice")
                _require(resumed == bool(request.admissions), f"{name}: resumed is {resumed}")
                _require(num_known == len(request.known_tokens), f"{name} is admitted with {num_known} tokens")
                most = num_known - (request.leader is None)
                _require(0 <= num_cached <= most, f"{name}: {num_cached} of {num_known} tokens cached")
                num_computed = num_cached + num_restored
                _require(num_cached <= num_computed <= most, f"{name}: {num_restored} tokens restored")
                _require(resumed or not num_restored, f"{name}: {num_restored} tokens restored of a new request")
                request.is_running = True
                request.num_computed_tokens = num_computed if request.leader is None else 0
                request.num_restored_tokens += num_restored
                request.admissions.append(num_cached)
            case Preempted(cause=PreemptCause.SWAP_FAILED):
                _require(request.is_running and not request.is_decoding, f"{name} loses KV that it did not wait for")
                request.num_failed_swaps += 1
                request.is_running = False
                request.num_computed_tokens = 0
            case Preempted(num_lost_tokens=num_lost, num_swapped_tokens=num_swapped):
                _require(request.is_running, f"{name} is preempted while it waits")
                _require(num_lost == request.num_computed_tokens, f"{name} lost {num_lost} tokens")
                _require(0 <= num_swapped <= num_lost, f"{name}: {num_swapped} of {num_lost} tokens swapped out")
                request.num_preemptions += 1
                limit = self.scheduler.config.max_preemptions
                _require(request.num_preemptions <= limit, f"{name} was preempted {request.num_preemptions} times")
                request.is_running = request.is_decoding = False
                request.num_computed_tokens = 0
            case FirstToken():
                _require(request.is_running and not request.has_first_token, f"{name}: first token in the wrong place")
                request.has_first_token = True
            case Rejected(reason=reason):
                _require(reason is RejectReason.LATE, f"{name} is refused after it was queued: {reason}")
                _require(request.request.refuse_late and not request.admissions, f"{name} is refused, but may not be")
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
            _require(request.is_running and request.has_first_token, f"{name} gets tokens before its first")
            request.output += event.tokens[:, column].tolist()
            request.is_decoding = True
            expected = request.expected[: len(request.output)]
            _require(request.output == expected, f"{name} says {request.output}, the model says {expected}")

    def _check_end(self, request: DrivenRequest, event: Finished) -> None:
        name = request.request_id
        if event.reason in (FinishReason.STOP, FinishReason.LENGTH):
            _require(request.is_running, f"{name} finishes without running")
            _require(request.output == request.expected, f"{name} ends at {len(request.output)} output tokens")
            stopped = request.output[-1] in request.request.stop_token_ids
            stopped &= len(request.output) >= request.request.min_tokens
            _require((event.reason is FinishReason.STOP) == stopped, f"{name} ends because of {event.reason}")
        counts = (event.num_prompt_tokens, event.num_output_tokens, event.num_cached_tokens, event.num_preemptions)
        cached = request.admissions[0] if request.admissions else 0
        told = (request.request.num_prompt_tokens, len(request.output), cached, request.num_preemptions)
        _require(counts == told, f"{name} ends with counts {counts}, events say {told}")
        most = request.request.max_total_tokens * (request.num_preemptions + request.num_failed_swaps + 1)
        _require(request.num_tokens_run <= most, f"{name}: {request.num_tokens_run} tokens computed, at most {most}")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InvariantError(message)
