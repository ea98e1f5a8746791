"""The state machine finds classic bugs when they are put back, with and without the scheduler's own checks."""

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from scheduler_machine import SchedulerMachine

from expediter.core.errors import InvariantError
from expediter.core.request import RequestState
from expediter.kvcache.manager import KVCacheManager
from expediter.kvcache.pool import BlockIds
from expediter.scheduling.draft import Draft
from expediter.scheduling.scheduler import Scheduler

SETTINGS = settings(
    max_examples=1000,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
)


class BlindMachine(SchedulerMachine):
    """Sees only what a client sees: tokens, events, ends."""

    checks_blocks = False


def double_free_of_a_shared_block_on_a_block_edge(monkeypatch):
    """Case 15: a sequence that ends with its last slot on a block edge gives its last block back twice."""
    release = KVCacheManager.release

    def release_twice(self, slot, *args):
        owned = self.tables.owned(slot).copy()
        is_on_edge = self.tables.num_shared[slot] == len(owned)
        release(self, slot, *args)
        last = owned[-1:]
        if is_on_edge and self.pool.refs[last].all():
            self.tree.num_evictable += len(self.pool.disown(last))

    monkeypatch.setattr(KVCacheManager, "release", release_twice)


def leak_on_abort_mid_chunk(monkeypatch):
    """Case 14: an abort between two chunks forgets the blocks that are not committed yet."""
    abort = Scheduler.abort

    def abort_and_leak(self, request_id, now_s, *args):
        state = self.find(request_id)
        if state in self.live.running.prefilling and state.num_computed_tokens > 0:
            self.kv.tables.num_owned[state.slot] = max(1, self.kv.tables.num_shared[state.slot])
        return abort(self, request_id, now_s, *args)

    monkeypatch.setattr(Scheduler, "abort", abort_and_leak)


def full_hit_that_schedules_no_token(monkeypatch):
    """Case 8: the match may cover the whole prompt, and nothing is left to sample from."""

    def match(self, tokens, salt):
        return self.tree.match(tokens, salt, len(tokens) // 4 // self.block_size)

    monkeypatch.setattr(KVCacheManager, "match", match)


def head_that_waits_for_a_watermark(monkeypatch):
    """Case 4: blocks are kept back for running sequences even when none runs, so a large head never fits."""
    admit = KVCacheManager.admit

    def admit_with_watermark(self, slot, match, num_tokens, spare_blocks, now_s, **kinds):
        return admit(self, slot, match, num_tokens, max(1, spare_blocks), now_s, **kinds)

    monkeypatch.setattr(KVCacheManager, "admit", admit_with_watermark)


def parked_request_that_keeps_its_blocks(monkeypatch):
    """Case 3: a preempted request is parked with its blocks, and the head of the queue waits for just those."""
    preempt, start, finish = Draft._preempt, Draft._start, Scheduler._finish

    def parked(kv) -> dict[str, tuple[RequestState, BlockIds]]:
        return kv.__dict__.setdefault("parked", {})  # goes with the copies that the machine makes

    def park(self, state, *args):
        kv = self.running.kv
        blocks = kv.tables.owned(state.slot).copy()
        preempt(self, state, *args)
        kept = blocks[kv.tree.nodes.holds(blocks)]
        kv.tree.num_evictable -= kv.pool.acquire(kept)
        parked(kv)[state.request_id] = (state, kept)

    def unpark(kv, state):
        owner, kept = parked(kv).pop(state.request_id, (None, ()))
        if owner is state and len(kept):
            kv.tree.num_evictable += len(kv.pool.disown(kept))
            kv.tree.touch(int(kept[-1]))

    def resume(self, state, *args):
        unpark(self.running.kv, state)
        return start(self, state, *args)

    def end(self, state, *args):
        unpark(self.kv, state)
        return finish(self, state, *args)

    monkeypatch.setattr(Draft, "_preempt", park)
    monkeypatch.setattr(Draft, "_start", resume)
    monkeypatch.setattr(Scheduler, "_finish", end)


def fork_without_a_copy(monkeypatch):
    """Case 19: the sequences of a group go on in blocks of their own without what the leader's partial one holds."""
    fork = KVCacheManager.fork

    def fork_only(self, slot, followers, num_computed):
        return fork(self, slot, followers, num_computed)[:, :0]

    monkeypatch.setattr(KVCacheManager, "fork", fork_only)


def leader_that_leaves_its_followers_behind(monkeypatch):
    """Case 19: a leader's abort forgets who waits for it."""

    def fall_out(self):
        if self.leader is not None:
            self.leader.followers.remove(self)
        self.leader, self.followers = None, []

    monkeypatch.setattr(RequestState, "fall_out", fall_out)


MUTATIONS = (
    fork_without_a_copy,
    leader_that_leaves_its_followers_behind,
    double_free_of_a_shared_block_on_a_block_edge,
    leak_on_abort_mid_chunk,
    full_hit_that_schedules_no_token,
    head_that_waits_for_a_watermark,
    parked_request_that_keeps_its_blocks,
)


@pytest.mark.parametrize("machine", [SchedulerMachine, BlindMachine])
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_mutation_is_found(mutation, machine, monkeypatch):
    """Which promise breaks first depends on the examples; that one breaks is due to the mutation (see below)."""
    mutation(monkeypatch)
    # With its slot lost, a block table may overflow before anything else shows.
    with pytest.raises((InvariantError, AssertionError, IndexError)):
        run_state_machine_as_test(machine, settings=SETTINGS)


@pytest.mark.parametrize("machine", [SchedulerMachine, BlindMachine])
def test_without_a_mutation_the_same_examples_pass(machine):
    run_state_machine_as_test(machine, settings=settings(SETTINGS, max_examples=50))
