"""The scheduler's parts one by one: limits, orderings, queue, decoding rows, victims, composition, presets."""

import dataclasses
import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expediter.assembly.presets import PRESET_NAMES, load_preset
from expediter.core.errors import ConfigurationError
from expediter.core.plan import StepFeatures
from expediter.core.request import Request, RequestState
from expediter.kvcache.manager import KVCacheManager
from expediter.scheduling.build import ORDERINGS, PolicyConfig, Surroundings, make_policy
from expediter.scheduling.composition import compose
from expediter.scheduling.config import SchedulerConfig
from expediter.scheduling.decoding import DecodingBatch
from expediter.scheduling.draft import Draft
from expediter.scheduling.explanations import Explanations
from expediter.scheduling.knowledge import Knowledge
from expediter.scheduling.lazy_heap import LazyHeap
from expediter.scheduling.ordering.queue import WaitingQueue
from expediter.scheduling.ordering.simple import Fcfs, Lifo, PriorityOrder
from expediter.scheduling.preemption import LowestPriority
from expediter.scheduling.running import RunningSet


def state(sequence=0, prompt=(1, 2, 3), *, priority=0, arrival_s=0.0, max_tokens=8, output=(), slot=-1, stops=()):
    request = Request(
        request_id=f"r{sequence}",
        prompt=np.array(prompt, np.int32),
        max_tokens=max_tokens,
        priority=priority,
        arrival_s=arrival_s,
        stop_token_ids=stops,
    )
    known = np.array([*prompt, *output], np.int32)
    made = RequestState(request, sequence, known.tobytes(), slot=slot, output=list(output))
    made.num_computed_tokens = len(known) - 1 if output else 0
    return made


# -- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_scan"])
def test_limits_that_must_be_positive(name):
    with pytest.raises(ConfigurationError, match=f"{name} must be at least 1, not 0"):
        SchedulerConfig(**{name: 0})


@pytest.mark.parametrize("name", ["max_preemptions", "max_bypasses", "watermark_blocks"])
def test_limits_that_may_be_zero(name):
    assert getattr(SchedulerConfig(**{name: 0}), name) == 0
    with pytest.raises(ConfigurationError, match=f"{name} must not be negative"):
        SchedulerConfig(**{name: -1})


def test_every_sequence_must_get_its_decode_token():
    assert SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=8).max_num_seqs == 8
    with pytest.raises(ConfigurationError, match="every running sequence decodes"):
        SchedulerConfig(max_num_seqs=9, max_num_batched_tokens=8)


def test_limits_cannot_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SchedulerConfig().max_scan = 3


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_presets_name_limits_and_an_ordering_that_exist(name):
    preset = load_preset(name)
    assert preset.policy.ordering in ORDERINGS
    assert preset.scheduler.max_num_batched_tokens >= preset.scheduler.max_num_seqs
    assert preset.summary
    assert preset.block_size >= 1


def test_sarathi_is_a_preset_and_what_is_none_is_answered_with_those_that_are():
    assert load_preset("sarathi").scheduler == SchedulerConfig()
    with pytest.raises(ConfigurationError, match=r"no preset 'orcas'; there are: .*sarathi"):
        load_preset("orcas")


# -- orderings --------------------------------------------------------------------------------------------------------


def test_fcfs_goes_by_arrival_only():
    early, late = state(1, arrival_s=1.0, priority=5), state(0, arrival_s=2.0)
    assert Fcfs().key(early, 9.0) < Fcfs().key(late, 9.0)
    assert not Fcfs.displaces


def test_priority_goes_first_then_arrival():
    key = partial(PriorityOrder().key, now_s=9.0)
    assert key(state(0, priority=-1, arrival_s=9.0)) < key(state(1, priority=0, arrival_s=0.0))
    assert key(state(0, priority=2, arrival_s=1.0)) < key(state(1, priority=2, arrival_s=2.0))
    assert PriorityOrder.displaces


def test_orderings_are_found_by_name():
    with pytest.raises(ConfigurationError, match="no ordering 'random'; there are: fcfs, "):
        PolicyConfig(ordering="random")


# -- queue ------------------------------------------------------------------------------------------------------------


def pop(queue, now_s=0.0):
    first = queue.first(now_s)
    if first is not None:
        queue.remove(first)
    return first


def test_ties_go_to_who_came_first():
    queue = WaitingQueue(Fcfs())
    states = [state(sequence) for sequence in range(5)]
    for queued in reversed(states):
        queue.push(queued, 0.0)
    assert [pop(queue) for _ in range(6)] == [*states, None]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=300))
def test_the_queue_equals_a_sorted_list(operations):
    queue, naive = WaitingQueue(PriorityOrder()), []
    for sequence, (kind, value) in enumerate(operations):
        if kind < 2:
            queued = state(sequence, prompt=range(1 + value), priority=value % 3)
            queue.push(queued, 0.0)
            naive.append(queued)
        elif value < 5 and naive:
            queue.remove(naive.pop(value % len(naive)))
        else:
            naive.sort(key=lambda queued: (queued.request.priority, queued.sequence))
            assert pop(queue) is (naive.pop(0) if naive else None)
        assert len(queue) == len(naive)
        assert queue.num_tokens == sum(queued.num_known_tokens for queued in naive)


def test_requests_that_left_do_not_pile_up_in_a_heap():
    heap = LazyHeap()
    kept = state(0)
    heap.put(kept, (0.0,))
    for sequence in range(1, 2000):
        gone = state(sequence)
        heap.put(gone, (-1.0,))
        heap.remove(gone)
        assert len(heap._entries) <= 70
    assert heap.first() == ((0.0,), kept)


def test_who_waited_beyond_the_bound_goes_first():
    queue = WaitingQueue(Lifo())
    old, new = state(0, arrival_s=0.0), state(1, arrival_s=50.0)
    queue.push(old, 0.0)
    queue.push(new, 50.0)
    assert queue.first(60.0) is new
    assert queue.next_change_s(60.0) == 60.0
    assert queue.first(60.1) is old
    assert queue.next_change_s(60.1) == math.inf


# -- decoding rows ----------------------------------------------------------------------------------------------------


def test_rows_count_up_to_edges_and_ends():
    batch = DecodingBatch(4)
    first = state(0, (1, 2, 3), output=(7,), slot=2, max_tokens=3)
    second = state(1, (1,), output=(8, 9), slot=0, max_tokens=9)
    batch.join(first, 4)
    batch.join(second, 2)
    assert batch.size == 2
    assert batch.slots[:2].tolist() == [2, 0]
    assert batch.context_tokens == 4 + 3
    assert batch.at_edge().tolist() == [1]
    batch.add_room(batch.at_edge(), 2)
    assert batch.at_edge().tolist() == []
    assert batch.advance(np.array([[5, 6]], np.int32)).tolist() == []
    assert batch.at_edge().tolist() == [0]
    batch.add_room(np.array([0]), 2)
    assert batch.advance(np.array([[4, 3]], np.int32)).tolist() == [0]
    (left,) = batch.leave(np.array([0]))
    assert left is first
    assert left.output == [7, 5, 4]
    assert left.num_computed_tokens == 5
    assert left.num_known_tokens == 6
    assert batch.size == 1
    assert batch.row_of(second) == 0
    assert batch.context_tokens == 5


def test_a_stop_token_ends_a_row_and_leaves_with_it():
    batch = DecodingBatch(3)
    stopping = state(0, output=(1,), slot=0, stops=(5, 6))
    batch.join(state(1, output=(1,), slot=1), 9)
    batch.join(stopping, 9)
    assert batch.num_stopping == 1
    assert batch.advance(np.array([[5, 4]], np.int32)).tolist() == []
    assert batch.advance(np.array([[5, 6]], np.int32)).tolist() == [1]
    batch.leave(np.array([1]))
    assert batch.num_stopping == 0
    assert batch.advance(np.array([[6]], np.int32)).tolist() == []


def test_output_grows_beyond_its_first_width():
    batch = DecodingBatch(1)
    long = state(0, output=(1,), slot=0, max_tokens=500)
    batch.join(long, 1000)
    for token in range(300):
        batch.advance(np.array([[token]], np.int32))
    batch.leave(np.array([0]))
    assert long.output == [1, *range(300)]


# -- victims ----------------------------------------------------------------------------------------------------------


def running_set(*decoding, prefilling=()):
    kv = KVCacheManager(num_blocks=64, block_size=4, max_num_seqs=8, max_model_len=256)
    running = RunningSet(kv, 8, Fcfs())
    for one in decoding:
        running.decoding.join(one, 99)
    running.prefilling += prefilling
    return running


def test_victims_are_the_lowest_value_then_least_computed_then_newest():
    decoding = [
        state(0, range(3), priority=0, output=(1,), slot=0),
        state(1, range(9), priority=2, output=(1,), slot=1),
        state(2, range(4), priority=2, output=(1,), slot=2),
        state(3, range(4), priority=2, output=(1,), slot=3),
    ]
    prefilling = [state(4, range(40), priority=2, slot=4), state(5, range(2), priority=9, slot=5)]
    prefilling[1].num_preemptions = 3
    running = running_set(*decoding, prefilling=prefilling)
    assert [victim.sequence for victim in LowestPriority(3).ranked(running, 0.0)] == [4, 3, 2, 1, 0]


# -- composition ------------------------------------------------------------------------------------------------------


def draft_of(running, budget):
    config = SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=min(budget, 8))
    around = Surroundings(config, running.kv, Knowledge())
    rules = make_policy(PolicyConfig(), around).rules
    return Draft(config, rules, running, WaitingQueue(rules.ordering), Explanations(8), 0.0)


def test_a_plan_packs_decodes_before_chunks():
    done, partial, starved = (
        state(1, (4, 5, 6, 7, 8), slot=1),
        state(2, (9, 9, 9, 9), slot=0),
        state(3, (1, 1), slot=2),
    )
    done.num_computed_tokens = 2
    running = running_set(state(0, (1, 2, 3), output=(7,), slot=3), prefilling=[done, partial, starved])
    draft = draft_of(running, 6)
    draft.add_decodes()
    draft.add_prompts()
    assert draft.budget == 0
    plan, chunks = compose(draft, 6)
    assert chunks.states == [done, partial]
    assert chunks.sampled == [done]
    assert plan.slots.tolist() == [3, 1, 0]
    assert plan.starts.tolist() == [3, 2, 0]
    assert plan.lengths.tolist() == [1, 3, 2]
    assert plan.tokens.tolist() == [7, 6, 7, 8, 9, 9]
    assert plan.sampled.tolist() == [0, 1]
    assert plan.features == StepFeatures(6, 3, 1, 4, 3 * (2 + 1.5) + 2 * 1.0)
    assert plan.features.num_prefill_tokens == 5
    assert not plan.is_empty


def test_a_plan_is_a_copy_of_what_decodes():
    running = running_set(state(0, (1, 2, 3), output=(7,), slot=1))
    draft = draft_of(running, 5)
    draft.add_decodes()
    plan, _ = compose(draft, 0)
    running.decoding.advance(np.array([[3]], np.int32))
    assert (plan.tokens.tolist(), plan.starts.tolist()) == ([7], [3])
