"""Whatever may happen to a scheduler, in any order, on pools so small that everything collides."""

import copy
import sys
from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from expediter.core.errors import InvariantError
from expediter.core.events import RejectReason
from expediter.core.plan import StepResult
from expediter.core.request import CacheHint, Request, Status
from expediter.core.slo import NO_SLO, Slo
from expediter.scheduling.build import (
    BATCHINGS,
    BUDGET_RULES,
    EVICTIONS,
    MEMORY_RULES,
    ORDERINGS,
    VICTIM_RULES,
    CacheConfig,
    PolicyConfig,
    build_scheduler,
    limits_with_budget,
)
from expediter.scheduling.config import SchedulerConfig
from expediter.scheduling.memory import FullReservation
from expediter.scheduling.scheduler import Scheduler
from expediter.testing.driven_request import sequences_of
from expediter.testing.scheduler_driver import SchedulerDriver

VOCAB = 16  # small, so that stop tokens are hit
STEMS = ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3], [3, 1, 4, 1, 5, 9, 2, 7, 1, 8, 2, 8, 1, 8, 2, 8])


class Sketch(NamedTuple):
    """A request before it has a name and a time."""

    stem: list[int]
    num_shared: int
    tail: list[int]
    max_tokens: int
    min_tokens: int
    stop_token_ids: tuple[int, ...]
    priority: int
    cache_salt: str
    tenant: str
    slo: Slo
    refuse_late: bool
    cache_hint: CacheHint | None
    lateness_s: float
    n: int


SKETCHES = st.builds(
    Sketch,
    stem=st.sampled_from(STEMS),
    num_shared=st.integers(0, 16),
    tail=st.lists(st.integers(0, VOCAB - 1), max_size=3),
    max_tokens=st.integers(1, 9),
    min_tokens=st.integers(0, 3),
    stop_token_ids=st.sampled_from([(), (), (), (5,), (0, 7, 11)]),
    priority=st.integers(0, 2),
    cache_salt=st.sampled_from(["", "", "b"]),
    tenant=st.sampled_from(["", "", "heavy", "light", "other"]),
    slo=st.sampled_from(
        [NO_SLO, Slo(ttft_s=4.0), Slo(ttft_s=12.0, tpot_s=1.5), Slo(tpot_s=0.5), Slo(e2e_s=20.0), Slo(ttft_s=1.0)]
    ),
    refuse_late=st.sampled_from([False, False, True]),
    # Some have waited for so long that they are over the bound of their ordering.
    lateness_s=st.sampled_from([0.0, 0.0, 0.0, 5.0, 28.0, 59.0, 1000.0]),
    cache_hint=st.sampled_from([None, None, None, CacheHint(drop=True), CacheHint(pin_s=4.0), CacheHint(pin_s=60.0)]),
    n=st.sampled_from([1, 1, 1, 2, 3, 4]),
)
POLICIES = st.builds(
    PolicyConfig,
    ordering=st.sampled_from(sorted(ORDERINGS)),
    batching=st.sampled_from(["stall_free", "stall_free", *sorted(BATCHINGS)]),
    memory=st.sampled_from(["paged", *sorted(MEMORY_RULES)]),
    budget=st.sampled_from(sorted(BUDGET_RULES)),
    victims=st.sampled_from(sorted(VICTIM_RULES)),
    eviction=st.sampled_from(sorted(EVICTIONS)),
)


def fingerprint(scheduler: Scheduler, now_s: float) -> dict[str, object]:
    """Return everything that decides what a scheduler does next."""
    kv, running = scheduler.kv, scheduler.live.running
    decoding = running.decoding
    size = decoding.size
    return {
        "tables": [kv.tables.ids[slot, :owned].tolist() for slot, owned in enumerate(kv.tables.num_owned.tolist())],
        "shared": kv.tables.num_shared.tolist(),
        "owners": kv.pool.refs.tolist(),
        "free": kv.pool.free_ids().tolist(),
        "tree": [
            None if node is None else (node.tokens, node.blocks.tolist(), node.stamp, sorted(node.children or ()))
            for node in kv.tree.nodes.by_id
        ],
        "pasts": [
            None if node is None else (node.used_s, node.num_hits, node.history, node.pinned_until_s)
            for node in kv.tree.nodes.by_id
        ],
        "counters": decoding.counters[:, :size].tolist(),
        "decoding": [state.request_id for state in decoding.states[:size]],
        "last": decoding.last_tokens[:size].tolist(),
        "context": decoding.context_tokens,
        "prefilling": [
            (s.request_id, s.slot, s.num_computed_tokens, [f.request_id for f in s.followers])
            for s in running.prefilling
        ],
        "copies": [copies.tolist() for copies in running._copies],
        "waiting": sorted(s.request_id for s in scheduler.live.by_id.values() if s.status is not Status.RUNNING),
        "first": None if (head := scheduler.live.waiting.first(now_s)) is None else head.request_id,
        "slots": list(running._free_slots),
        "host": (
            {o: c.blocks.tolist() for o, c in kv.host._copies.items()},
            kv.host._free[: kv.host.num_free].tolist(),
        ),
        "next": scheduler._next_step,
        "stuck": scheduler.live.queue_is_stuck,
    }


def census(scheduler: Scheduler) -> None:
    """Count blocks and owners anew from the tables, sharing nothing with `Scheduler.check`."""
    kv = scheduler.kv
    owners = Counter(
        block
        for slot, count in enumerate(kv.tables.num_owned.tolist())
        for block in kv.tables.ids[slot, :count].tolist()
    )
    free = kv.pool.free_ids().tolist()
    in_tree = [block for node in kv.tree.nodes for block in node.blocks.tolist()]
    cached = set(in_tree) - set(owners)
    assert len(free) + len(cached) + len(owners) == kv.num_blocks
    assert sorted([*free, *cached, *owners]) == list(range(kv.num_blocks))
    assert len(in_tree) == len(set(in_tree))
    assert [owners[block] for block in range(kv.num_blocks)] == kv.pool.refs.tolist()
    assert (len(free), len(cached), len(owners)) == (kv.num_free_blocks, kv.num_cached_blocks, kv.num_used_blocks)
    host = [block for copy in kv.host._copies.values() for block in copy.blocks.tolist()]
    host += kv.host._free[: kv.host.num_free].tolist()
    host += [block for blocks in kv.host._in_transit for block in blocks.tolist()]
    assert sorted(host) == list(range(kv.host.num_blocks))
    waiting = {s.sequence for s in scheduler.live.by_id.values() if s.status is Status.PREEMPTED}
    assert waiting.issuperset(kv.host._copies)


class OneSecondPerToken:
    """A step-time model: what a chunk adds is its number of tokens."""

    def step_time_s(self, features):
        return 1.0 + features.num_tokens

    def decode_run_s(self, features, num_steps):
        return np.full(num_steps, 1.0 + features.num_tokens)


class SchedulerMachine(RuleBasedStateMachine):
    """Rules are what clients, executors and the simulator may do; `SchedulerDriver` checks each call."""

    checks_blocks = True
    policy: PolicyConfig | None = None
    """Instead of one drawn at random."""
    driver: SchedulerDriver

    @initialize(
        max_num_seqs=st.integers(1, 6),
        limits=st.fixed_dictionaries(
            {
                "max_preemptions": st.integers(0, 3),
                "max_bypasses": st.integers(0, 3),
                "max_scan": st.integers(1, 4),
                "watermark_blocks": st.integers(0, 1),
            }
        ),
        extra_budget=st.integers(0, 8),
        extra_len=st.integers(-4, 4),
        num_blocks=st.integers(2, 16),
        block_size=st.integers(1, 4),
        policy=POLICIES,
        weights=st.sampled_from([{}, {"heavy": 3.0, "light": 0.7}]),
        prefix_caching=st.sampled_from([True, True, True, False]),
        swap=st.sampled_from([("recompute", 0), ("swap", 8), ("swap", 4), ("cheaper", 6), ("swap", 1)]),
    )
    def build(
        self,
        max_num_seqs,
        limits,
        extra_budget,
        extra_len,
        num_blocks,
        block_size,
        policy,
        weights,
        prefix_caching,
        swap,
    ):
        preemption_mode, num_host_blocks = swap
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_budget,
            max_model_len=max(2, num_blocks * block_size + extra_len),
            tenant_weights=weights,
            **limits,
        )
        config = limits_with_budget(config, policy, None)
        if self.policy is not None:
            policy = self.policy
            config = replace(config, max_num_batched_tokens=max_num_seqs + extra_budget)
        scheduler = build_scheduler(
            config=config,
            cache=CacheConfig(
                num_blocks=num_blocks,
                block_size=block_size,
                prefix_caching=prefix_caching,
                num_host_blocks=num_host_blocks,
                block_swap_s=4.0,
            ),
            policy=replace(policy, preemption_mode=preemption_mode),
            prior=OneSecondPerToken(),
        )
        self.driver = SchedulerDriver(
            scheduler, vocab_size=VOCAB, checks_blocks=self.checks_blocks, step_time=OneSecondPerToken()
        )
        self.is_draining = False
        self.num_added = 0
        self.old_results: list[StepResult] = []

    # -- clients ------------------------------------------------------------------------------------------------------

    @rule(sketches=st.lists(SKETCHES, min_size=1, max_size=4))
    def add(self, sketches):
        driver = self.driver
        for sketch in sketches:
            request = Request(
                request_id=f"r{self.num_added}",
                prompt=np.array([*sketch.stem[: sketch.num_shared], *sketch.tail] or [1], np.int32),
                max_tokens=sketch.max_tokens,
                min_tokens=min(sketch.min_tokens, sketch.max_tokens),
                stop_token_ids=sketch.stop_token_ids,
                priority=sketch.priority,
                cache_salt=sketch.cache_salt,
                tenant=sketch.tenant,
                slo=sketch.slo,
                refuse_late=sketch.refuse_late,
                cache_hint=sketch.cache_hint,
                arrival_s=driver.now_s - sketch.lateness_s,
            )
            self.num_added += 1
            fits = self._fits(request, sketch.n)
            assert driver.add(*sequences_of(request, sketch.n)) == (fits and not self.is_draining)
            if self.is_draining:
                assert driver.rejected[request.request_id].reason is RejectReason.SHUTDOWN

    @rule(data=st.data())
    def abort(self, data):
        self.driver.abort(self._draw_request(data))

    @precondition(lambda self: self.driver.live)
    @rule(data=st.data())
    def add_with_an_id_in_use(self, data):
        taken = data.draw(st.sampled_from(self.driver.live)).request
        with pytest.raises(InvariantError, match="in use"):
            self.driver.scheduler.add(taken, self.driver.now_s)

    @precondition(lambda self: not self.is_draining and self.num_added > 12)
    @rule()
    def drain(self):
        self.driver.scheduler.drain()
        self.is_draining = True

    # -- steps --------------------------------------------------------------------------------------------------------

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            plan = self.driver.plan()
            if plan.is_empty:
                return
            self._keep(self.driver.finish(plan))

    @precondition(lambda self: self.driver.live)
    @rule(data=st.data(), executes_first=st.booleans(), num_aborts=st.integers(1, 3))
    def step_with_aborts_in_flight(self, data, executes_first, num_aborts):
        driver = self.driver
        plan = driver.plan()
        if plan.is_empty:  # who was left has been refused
            return
        result = driver.executor.execute(plan) if executes_first else None
        for _ in range(num_aborts):
            driver.abort(self._draw_request(data))
        if data.draw(st.booleans(), "an old result comes in between") and self.old_results:
            driver.apply_late(data.draw(st.sampled_from(self.old_results)))
        result = driver.executor.execute(plan) if result is None else result
        driver.apply(result)
        driver.apply_late(result)
        self._keep(result)

    @precondition(lambda self: self.driver.scheduler.kv.host.num_blocks)
    @rule(data=st.data())
    def break_or_mend_host_blocks(self, data):
        """Moves from and to broken blocks fail; whoever needed them computes again."""
        last = self.driver.scheduler.kv.host.num_blocks - 1
        self.driver.executor.broken_host_blocks = {data.draw(st.integers(-1, last))}

    @precondition(lambda self: self.old_results)
    @rule(data=st.data())
    def apply_an_old_result(self, data):
        self.driver.apply_late(data.draw(st.sampled_from(self.old_results)))

    @precondition(lambda self: self.driver.live)
    @rule(max_repeat=st.integers(2, 9))
    def jump(self, max_repeat):
        """A jump and its single steps lead to the same blocks, counters, queue and events."""
        twin = copy.deepcopy(self.driver)
        plan = self.driver.step(max_repeat)
        for _ in range(plan.num_steps):
            assert twin.step().num_seqs == plan.num_seqs
        now_s = twin.now_s
        assert fingerprint(twin.scheduler, now_s) == fingerprint(self.driver.scheduler, now_s)
        assert twin.now_s == self.driver.now_s
        for request_id, request in self.driver.requests.items():
            other = twin.requests[request_id]
            assert (request.output, request.finished) == (other.output, other.finished)

    # -- always -------------------------------------------------------------------------------------------------------

    @invariant()
    def blocks_are_all_there(self):
        if self.checks_blocks:
            census(self.driver.scheduler)

    def teardown(self):
        if not hasattr(self, "driver") or sys.exc_info()[0] is not None:  # never hide what failed before
            return
        self.driver.run_to_end()
        scheduler = self.driver.scheduler
        assert sorted(scheduler.live.running._free_slots) == list(range(scheduler.config.max_num_seqs))

    def _fits(self, request, n):
        kv, config = self.driver.scheduler.kv, self.driver.scheduler.config
        total = request.max_total_tokens
        if total > config.max_model_len or total - 1 > kv.num_blocks * kv.block_size or n > config.max_num_seqs:
            return False
        if n == 1:
            return True
        is_full = isinstance(self.driver.scheduler.policy.rules.memory, FullReservation)
        reserved = total - 1 if is_full or not config.max_preemptions else request.num_prompt_tokens
        shared = request.num_prompt_tokens // kv.block_size
        needed = -(-reserved // kv.block_size)
        return needed + (n - 1) * max(1, needed - shared) <= kv.num_blocks

    def _draw_request(self, data):
        ids = [request.request_id for request in self.driver.live]
        return data.draw(st.sampled_from([*ids, "nobody"]))

    def _keep(self, result):
        self.old_results = [*self.old_results[-3:], result]
