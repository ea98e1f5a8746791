"""The scheduler's parts one by one: limits, orderings, queue, decoding rows, victims, composition, presets."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expediter.assembly.presets import PRESET_NAMES, load_preset
from expediter.core.errors import ConfigurationError
from expediter.core.plan import StepFeatures
from expediter.core.request import Request, RequestState, Status
from expediter.scheduling.config import SchedulerConfig
from expediter.scheduling.decoding import DecodingBatch
from expediter.scheduling.draft import Draft, compose
from expediter.scheduling.ordering import ORDERING_NAMES, Fcfs, PriorityOrder, make_ordering
from expediter.scheduling.preemption import running_by_value
from expediter.scheduling.waiting import WaitingQueue


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
    assert preset.ordering in ORDERING_NAMES
    assert preset.scheduler.max_num_batched_tokens >= preset.scheduler.max_num_seqs
    assert preset.summary
    assert preset.block_size >= 1


def test_sarathi_is_a_preset_and_what_is_none_is_answered_with_those_that_are():
    assert load_preset("sarathi").scheduler == SchedulerConfig()
    with pytest.raises(ConfigurationError, match=r"no preset 'orca'; there are: .*sarathi"):
        load_preset("orca")


# -- orderings --------------------------------------------------------------------------------------------------------


def test_fcfs_goes_by_arrival_only():
    early, late = state(1, arrival_s=1.0, priority=5), state(0, arrival_s=2.0)
    assert Fcfs().key(early) < Fcfs().key(late)
    assert not Fcfs.displaces


def test_priority_goes_first_then_arrival():
    key = PriorityOrder().key
    assert key(state(0, priority=-1, arrival_s=9.0)) < key(state(1, priority=0, arrival_s=0.0))
    assert key(state(0, priority=2, arrival_s=1.0)) < key(state(1, priority=2, arrival_s=2.0))
    assert PriorityOrder.displaces


def test_orderings_are_found_by_name():
    assert isinstance(make_ordering("fcfs"), Fcfs)
    assert isinstance(make_ordering("priority"), PriorityOrder)
    with pytest.raises(ConfigurationError, match="no scheduling policy 'lifo'; there are: fcfs, priority"):
        make_ordering("lifo")


# -- queue ------------------------------------------------------------------------------------------------------------


def test_ties_go_to_who_came_first():
    queue = WaitingQueue(Fcfs())
    states = [state(sequence) for sequence in range(5)]
    for queued in reversed(states):
        queue.push(queued)
    assert [queue.pop() for _ in range(6)] == [*states, None]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=300))
def test_the_queue_equals_a_sorted_list(operations):
    queue, naive = WaitingQueue(PriorityOrder()), []
    for sequence, (kind, value) in enumerate(operations):
        if kind < 2:
            queued = state(sequence, prompt=range(1 + value), priority=value % 3)
            queue.push(queued)
            naive.append(queued)
        elif value < 5 and naive:
            gone = naive.pop(value % len(naive))
            queue.discard(gone)
            gone.move(Status.FINISHED)
        else:
            naive.sort(key=lambda queued: (queued.request.priority, queued.sequence))
            assert queue.pop() is (naive.pop(0) if naive else None)
        assert len(queue) == len(naive)
        assert queue.num_tokens == sum(queued.num_known_tokens for queued in naive)


def test_aborted_requests_do_not_pile_up_in_the_queue():
    queue = WaitingQueue(Fcfs())
    kept = state(0)
    queue.push(kept)
    for sequence in range(1, 2000):
        gone = state(sequence)
        queue.push(gone)
        queue.discard(gone)
        gone.move(Status.FINISHED)
        assert len(queue._heap) <= 65
    assert queue.pop() is kept
    assert queue.pop() is None


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


def test_victims_are_the_lowest_value_then_least_computed_then_newest():
    batch = DecodingBatch(8)
    decoding = [
        state(0, range(3), priority=0, output=(1,), slot=0),
        state(1, range(9), priority=2, output=(1,), slot=1),
        state(2, range(4), priority=2, output=(1,), slot=2),
        state(3, range(4), priority=2, output=(1,), slot=3),
    ]
    for one in decoding:
        batch.join(one, 99)
    prefilling = [state(4, range(40), priority=2, slot=4), state(5, range(2), priority=9, slot=5)]
    prefilling[1].num_preemptions = 3
    order = [victim.sequence for victim in running_by_value(batch, prefilling, 3)]
    assert order == [4, 3, 2, 1, 0]


# -- composition ------------------------------------------------------------------------------------------------------


def test_a_plan_packs_decodes_before_chunks():
    batch = DecodingBatch(4)
    batch.join(state(0, (1, 2, 3), output=(7,), slot=3), 99)
    done, partial, starved = (
        state(1, (4, 5, 6, 7, 8), slot=1),
        state(2, (9, 9, 9, 9), slot=0),
        state(3, (1, 1), slot=2),
    )
    done.num_computed_tokens = 2
    draft = Draft(0.0, 5)
    for one in (done, partial, starved):
        draft.add_chunk(one)
    assert draft.budget == 0
    plan = compose(6, draft, batch, [done, partial, starved], np.zeros((4, 2), np.int32))
    assert plan.slots.tolist() == [3, 1, 0]
    assert plan.starts.tolist() == [3, 2, 0]
    assert plan.lengths.tolist() == [1, 3, 2]
    assert plan.tokens.tolist() == [7, 6, 7, 8, 9, 9]
    assert plan.sampled.tolist() == [0, 1]
    assert plan.features == StepFeatures(6, 3, 1, 4, 3 * (2 + 1.5) + 2 * 1.0)
    assert plan.features.num_prefill_tokens == 5
    assert not plan.is_empty


def test_a_plan_is_a_copy_of_what_decodes():
    batch = DecodingBatch(2)
    batch.join(state(0, output=(7,), slot=1), 99)
    plan = compose(0, Draft(0.0, 5), batch, [], np.zeros((2, 2), np.int32))
    batch.advance(np.array([[3]], np.int32))
    assert (plan.tokens.tolist(), plan.starts.tolist()) == ([7], [3])
