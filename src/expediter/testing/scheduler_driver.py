"""Drives a `Scheduler` on the toy model and checks every promise of its surface at each call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from expediter.core.events import (
    Preempted,
    Queued,
    Rejected,
)
from expediter.core.plan import StepPlan, StepResult
from expediter.core.ports import ExecutorLimits, StepTimeModel
from expediter.core.request import Request
from expediter.core.slo import NO_SLO, Slo
from expediter.scheduling.build import CacheConfig, PolicyConfig, build_scheduler
from expediter.scheduling.config import SchedulerConfig
from expediter.scheduling.ordering.base import Ordering
from expediter.scheduling.scheduler import Scheduler
from expediter.testing.driven_request import DrivenRequest, expected_output, sequences_of
from expediter.testing.fake_executor import FakeExecutor
from expediter.testing.scheduler_checks import SchedulerChecks, require


class SchedulerDriver(SchedulerChecks):
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
        super().__init__(scheduler, checks_blocks=checks_blocks)
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
        require(told == [r.request_id for r in requests], f"add reports {events}")
        if all(isinstance(event, Rejected) for event in events):
            self.rejected.update((event.request_id, event) for event in events if isinstance(event, Rejected))
            self.check()
            return False
        require(all(isinstance(event, Queued) for event in events), f"add reports {events}")
        group = [self._queued(request) for request in requests]
        group[0].followers = group[1:]
        for follower in group[1:]:
            follower.leader = group[0]
        self.check()
        return True

    def _queued(self, request: Request) -> DrivenRequest:
        name = request.request_id
        state = self.scheduler.find(name)
        require(state is not None and state.request is request, f"{name} is queued but not to be found")
        self.requests.pop(name, None)
        expected = expected_output(request, self.executor.limits.vocab_size)
        driven = self.requests[name] = DrivenRequest(request, expected)
        return driven

    def abort(self, request_id: str) -> None:
        """Abort a request in whatever state it is; ids that are not live change nothing."""
        alive = [r.request_id for r in self.live]
        events = self.scheduler.abort(request_id, self.now_s)
        require(len(events) == (request_id in alive), f"abort of {request_id} reports {events}")
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
        require(not fallen or result.failed_host_blocks != (), f"{fallen} lost their KV, though no move failed")
        for request, length in alive:
            num_known = len(request.known_tokens)
            request.num_computed_tokens += length * num_steps
            request.num_tokens_run += length * num_steps
            has_caught_up = request.num_computed_tokens == num_known + num_steps - 1
            has_caught_up &= request.request_id not in fallen
            owed += [(other, len(other.output) + num_steps * has_caught_up) for other in request.members]
            if has_caught_up:
                request.fork()
        self._entries = []
        self._record(events)
        for request, num_output in owed:
            require(
                len(request.output) == num_output,
                f"{request.request_id} has {len(request.output)} output tokens after the step, not {num_output}",
            )
        self.check()

    def apply_late(self, result: StepResult) -> None:
        """Apply a result that is not in flight any more; it must change nothing."""
        events = self.scheduler.apply(result, self.now_s)
        require(not events, f"a late result reports {events}")
        self.check()

    def step(self, max_repeat: int = 1) -> StepPlan:
        """Plan, execute and apply; up to `max_repeat` equal steps in one jump. The plan may be empty."""
        plan = self.plan()
        if not plan.is_empty:
            self.scheduler.runs.repeat(plan, min(max_repeat, self.scheduler.runs.repeatable_steps(plan)))
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
        require(not self.live, f"{len(self.live)} requests have not ended after {most} steps")
        scheduler, kv = self.scheduler, self.scheduler.kv
        require(not scheduler.has_work and scheduler.num_pending_tokens == 0, "work is left without a request")
        require(self.step().is_empty, "a plan without work is not empty")
        require(kv.num_used_blocks == 0, f"{kv.num_used_blocks} blocks are still used")
        require(kv.num_free_blocks + kv.num_cached_blocks == kv.num_blocks, "blocks are lost")
        require(kv.host.num_free == kv.host.num_blocks, "host blocks are lost")
