"""Requests that move between schedulers, with their KV or without: their tokens stay those of the model."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expediter.control.handoff import prompt_leg
from expediter.core.errors import InvariantError
from expediter.core.events import Admitted, Finished, FirstToken, Rejected, Tokens
from expediter.core.ports import ExecutorLimits
from expediter.core.request import Carried, Request
from expediter.scheduling.build import (
    BATCHINGS,
    MEMORY_RULES,
    ORDERINGS,
    CacheConfig,
    PolicyConfig,
    build_scheduler,
    limits_with_budget,
)
from expediter.scheduling.config import SchedulerConfig
from expediter.testing.fake_executor import FakeExecutor, toy_generate

VOCAB = 30


class Replica:
    """A scheduler and the toy model, whose tokens depend on the contents of the KV blocks."""

    def __init__(self, num_blocks, *, policy=None, max_num_seqs=4, budget=16, block_size=2, prefix_caching=True):
        limits = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_model_len=40)
        policy = policy or PolicyConfig()
        limits = limits_with_budget(limits, policy, None)
        cache = CacheConfig(num_blocks=num_blocks, block_size=block_size, prefix_caching=prefix_caching)
        self.scheduler = build_scheduler(config=limits, cache=cache, policy=policy)
        self.executor = FakeExecutor(
            ExecutorLimits(
                num_blocks=num_blocks,
                block_size=block_size,
                max_model_len=40,
                vocab_size=VOCAB,
                max_num_seqs=max_num_seqs,
            )
        )
        self.features = []

    @property
    def blocks(self):
        return self.executor._kv.reshape(-1, self.scheduler.kv.block_size)


class World:
    """Replicas, and what the clients have."""

    def __init__(self, *replicas):
        self.replicas = replicas
        self.now_s, self.num_added = 0.0, 0
        self.requests, self.outputs = {}, {}
        self.ended, self.first_tokens, self.where = {}, [], {}

    def add(self, replica, prompt, max_tokens, *, keep=False):
        request_id = f"r{self.num_added}"
        self.num_added += 1
        request = Request(request_id=request_id, prompt=np.array(prompt, np.int32), max_tokens=max_tokens)
        self.requests[request_id], self.outputs[request_id], self.where[request_id] = request, [], replica
        leg = prompt_leg(request, None) if keep else request
        self._note(replica, replica.scheduler.add_group((leg,), self.now_s, keep=keep), leg=keep)
        return request_id

    def step(self, replica):
        self.now_s += 1.0
        plan = replica.scheduler.plan(self.now_s)
        self._note(replica, plan.events)
        if not plan.is_empty:
            replica.features.append(plan.features)
            self._note(replica, replica.scheduler.apply(replica.executor.execute(plan), self.now_s))
        replica.scheduler.live.check()
        return plan

    def _note(self, replica, events, leg=False):
        for event in events:
            if isinstance(event, Tokens):
                for state, token in zip(event.states, event.tokens[0].tolist(), strict=True):
                    self.outputs[state.request_id].append(token)
            elif isinstance(event, FirstToken):
                self.first_tokens.append(event.request_id)
            elif isinstance(event, Finished):
                request = self.requests[event.request_id]
                if event.num_output_tokens == request.max_tokens:
                    assert event.request_id not in self.ended
                    self.ended[event.request_id] = event
            elif isinstance(event, Rejected):
                raise AssertionError(event)

    def move(self, departure, source, target, *, with_kv=True):
        """Reserve, copy, land, resume; or only resume. False if the target has no room: nothing has changed then."""
        request, carried, hold = departure
        request = self.requests[request.request_id]
        landing = None
        if hold is not None and with_kv:
            landing = target.scheduler.passage.reserve(request, carried, hold.num_tokens, self.now_s)
            if landing is None:
                return False
            assert landing.num_tokens == hold.num_tokens
            last = target.scheduler.kv.blocks_for(hold.num_tokens)
            for place in range(landing.num_matched, last):
                target.blocks[landing.blocks[place]] = source.blocks[hold.blocks[place]]
            assert target.scheduler.passage.land(landing, self.now_s)
            assert not target.scheduler.passage.land(landing, self.now_s)
        if hold is not None:
            source.scheduler.passage.release(hold, self.now_s)
        self.where[request.request_id] = target
        self._note(target, target.scheduler.passage.resume(request, carried, self.now_s, landing=landing))
        return True

    def abort(self, request_id):
        events = self.where[request_id].scheduler.abort(request_id, self.now_s)
        assert [type(event) for event in events] == [Finished]
        for table in (self.requests, self.outputs, self.where):
            del table[request_id]
        self.first_tokens = [other for other in self.first_tokens if other != request_id]

    def run_to_end(self):
        for _ in range(600):
            if len(self.ended) == len(self.requests):
                break
            for replica in self.replicas:
                self.step(replica)
        for request_id, request in self.requests.items():
            expected = toy_generate(request.prompt, request.max_tokens, VOCAB)
            assert self.outputs[request_id] == expected
        assert sorted(self.first_tokens) == sorted(self.requests)
        for replica in self.replicas:
            assert replica.scheduler.kv.num_used_blocks == 0
            assert not replica.scheduler.has_work


def test_a_prompt_computed_elsewhere_is_decoded_at_once():
    source, target = Replica(12), Replica(12)
    world = World(source, target)
    name = world.add(source, [1, 2, 3, 4, 5], 6, keep=True)
    world.step(source)
    departure = source.scheduler.passage.collect(name)
    assert source.scheduler.passage.collect(name) is None
    assert world.move(departure, source, target)
    plan = world.step(target)
    assert plan.features == (1, 1, 1, 6, 0.0)  # a decode that reads 6 tokens, and no prompt
    assert plan.num_decodes == 1
    world.run_to_end()
    assert all(features.num_prefill_tokens == 0 for features in target.features)
    assert world.ended[name].num_output_tokens == 6


def test_a_request_moves_while_it_decodes_and_loses_nothing():
    source, target = Replica(12), Replica(12)
    world = World(source, target)
    name = world.add(source, [1, 2, 3], 12)
    for _ in range(5):
        world.step(source)
    (departure,) = source.scheduler.passage.extract(name, world.now_s, keep=True)
    assert departure.carried.output == tuple(world.outputs[name])
    assert departure.landing.num_tokens == 3 + 5 - 1
    assert world.move(departure, source, target)
    world.run_to_end()


def test_tokens_so_far_are_computed_again_where_the_kv_is_lost():
    source, target = Replica(12), Replica(12)
    world = World(source, target)
    name = world.add(source, [1, 2, 3], 9)
    for _ in range(4):
        world.step(source)
    plan = source.scheduler.plan(world.now_s)
    assert not plan.is_empty
    ((departure,),) = source.scheduler.passage.evacuate(world.now_s)  # a step is in flight; it never ends
    assert departure.landing is None
    world.move(departure, source, target)
    plan = world.step(target)
    assert plan.features.num_tokens == 3 + 4
    world.replicas = (target,)
    world.run_to_end()
    assert world.ended[name].num_output_tokens == 9


def test_nobody_can_be_extracted_or_placed_while_a_step_is_in_flight():
    replica = Replica(12)
    world = World(replica)
    name = world.add(replica, [1, 2, 3], 9)
    replica.scheduler.plan(1.0)
    with pytest.raises(InvariantError, match="is extracted while step 0 is in flight"):
        replica.scheduler.passage.extract(name, 1.0)
    with pytest.raises(InvariantError, match="blocks are reserved while step 0 is in flight"):
        replica.scheduler.passage.reserve(world.requests[name], None, 3, 1.0)


def test_who_has_all_its_output_cannot_go_on():
    replica = Replica(12)
    request = Request(request_id="a", prompt=np.array([1], np.int32), max_tokens=2)
    with pytest.raises(InvariantError, match="has all of its output"):
        replica.scheduler.passage.resume(request, Carried(output=(1, 2)), 0.0)


def test_an_older_request_that_waits_for_room_goes_before_what_would_land():
    replica = Replica(9)
    world = World(replica)
    world.add(replica, [1] * 10, 6)
    world.step(replica)
    waiting = world.add(replica, [2] * 9, 2)
    world.step(replica)
    assert replica.scheduler.num_waiting == 1
    young = Request(request_id="y", prompt=np.array([5, 6], np.int32), max_tokens=3, arrival_s=world.now_s)
    old = Request(request_id="o", prompt=np.array([5, 6], np.int32), max_tokens=3, arrival_s=-1.0)
    assert replica.scheduler.passage.reserve(young, None, 2, world.now_s) is None
    landing = replica.scheduler.passage.reserve(old, None, 2, world.now_s)
    assert landing is not None
    replica.scheduler.passage.release(landing, world.now_s)
    world.run_to_end()
    assert waiting in world.ended


def test_what_has_landed_gives_way_if_nobody_could_run_otherwise():
    """A parked request whose KV has come holds the blocks that the head of the queue needs: no deadlock."""
    replica, source = Replica(8, max_num_seqs=2), Replica(12)
    world = World(replica, source)
    name = world.add(source, [1, 2, 3, 4, 5, 6], 4, keep=True)
    world.step(source)
    departure = source.scheduler.passage.collect(name)
    replica.scheduler.config = SchedulerConfig(
        max_num_seqs=2, max_num_batched_tokens=16, max_model_len=40, max_bypasses=0
    )
    landing = replica.scheduler.passage.reserve(world.requests[name], departure.carried, 6, 0.0)
    for place in range(3):
        replica.blocks[landing.blocks[place]] = source.blocks[departure.landing.blocks[place]]
    replica.scheduler.passage.land(landing, 0.0)
    old = Request(request_id="old", prompt=np.array([7] * 11, np.int32), max_tokens=4, arrival_s=-5.0)
    world.requests["old"], world.outputs["old"] = old, []
    world._note(replica, replica.scheduler.add(old, 0.0))
    world._note(
        replica, replica.scheduler.passage.resume(world.requests[name], departure.carried, 0.0, landing=landing)
    )
    source.scheduler.passage.release(departure.landing, 0.0)
    plan = world.step(replica)
    assert [event.request_id for event in plan.events if isinstance(event, Admitted)] == ["old"]
    world.run_to_end()


OPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 1), st.integers(0, 5), st.integers(1, 9), st.booleans()),
        st.tuples(st.just("step"), st.integers(0, 1), st.integers(1, 4)),
        st.tuples(st.just("move"), st.integers(0, 9), st.booleans(), st.booleans()),
        st.tuples(st.just("abort"), st.integers(0, 9)),
    ),
    max_size=30,
)


@settings(max_examples=150, deadline=None)
@given(
    ops=OPS,
    num_blocks=st.tuples(st.integers(9, 14), st.integers(9, 14)),
    policy=st.builds(
        PolicyConfig,
        ordering=st.sampled_from(sorted(ORDERINGS)),
        batching=st.sampled_from(sorted(BATCHINGS)),
        memory=st.sampled_from(sorted(MEMORY_RULES)),
    ),
    prefix_caching=st.booleans(),
)
def test_requests_move_at_random(ops, num_blocks, policy, prefix_caching):
    a, b = (Replica(count, policy=policy, prefix_caching=prefix_caching) for count in num_blocks)
    world = World(a, b)
    prompt_only = set()

    def hand_off(with_kv):
        for name in sorted(prompt_only):
            source = world.where[name]
            departure = source.scheduler.passage.collect(name)
            if departure is not None:
                prompt_only.remove(name)
                target = b if source is a else a
                if not world.move(departure, source, target, with_kv=with_kv):
                    world.move(departure, source, target, with_kv=False)

    for op in ops:
        others = [name for name in world.requests if name not in world.ended and name not in prompt_only]
        if op[0] == "add":
            _, place, shared, max_tokens, keep = op
            prompt = [*[3, 1, 4, 1, 5, 9][: shared + 1], shared]
            name = world.add(world.replicas[place], prompt, max_tokens, keep=keep and max_tokens > 1)
            if keep and max_tokens > 1:
                prompt_only.add(name)
        elif op[0] == "step":
            for _ in range(op[2]):
                world.step(world.replicas[op[1]])
        elif op[1] < len(others) and op[0] == "abort":
            world.abort(others[op[1]])
        elif op[1] < len(others):
            source = world.where[others[op[1]]]
            target = b if source is a else a
            (departure,) = source.scheduler.passage.extract(others[op[1]], world.now_s, keep=op[2])
            if not world.move(departure, source, target, with_kv=op[3]):
                world.move(departure, source, target, with_kv=False)
        hand_off(with_kv=True)
    for _ in range(200):
        if prompt_only:
            for replica in world.replicas:
                world.step(replica)
            hand_off(with_kv=False)
    world.run_to_end()
