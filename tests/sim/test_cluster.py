"""A cluster wired by hand: what is in it at every moment is what arrived and has not ended."""

from hypothesis import given, settings
from hypothesis import strategies as st
from sim_builders import ConstantTime, make_trace

from expediter.control.routing.simple import LeastLoad
from expediter.core.events import Finished, Rejected, Tokens
from expediter.scheduling.build import CacheConfig, build_scheduler
from expediter.scheduling.config import SchedulerConfig
from expediter.sim.cluster import Cluster
from expediter.sim.executor import SimulatedExecutor
from expediter.sim.loop import EventLoop
from expediter.sim.replica import SimulatedReplica


class Census:
    """`Observer` that counts the requests inside, and what the routers see, at every event."""

    def __init__(self):
        self.replicas = []
        self.num_arrived = self.num_ended = 0
        self.in_flight = []
        self.prompts = {}

    def arrived(self, request, decision, now_s):
        self.check()
        self.num_arrived += 1
        self.prompts.setdefault(decision.replica_id, []).append(request.num_prompt_tokens)

    def record(self, replica_id, events):
        assert events
        assert not any(isinstance(event, Tokens) for event in events)
        self.num_ended += sum(isinstance(event, Finished | Rejected) for event in events)
        self.check()

    def check(self):
        inside = sum(replica.snapshot().num_requests for replica in self.replicas)
        assert self.num_arrived == self.num_ended + inside
        self.in_flight.append(inside)


def make_cluster(num_replicas, num_blocks, progress=None):
    loop, census = EventLoop(), Census()
    limits = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=100)
    for replica_id in range(num_replicas):
        scheduler = build_scheduler(config=limits, cache=CacheConfig(num_blocks=num_blocks, block_size=4))
        executor = SimulatedExecutor(
            num_blocks=num_blocks, block_size=4, max_model_len=100, max_num_seqs=4, step_time=ConstantTime(0.1)
        )
        census.replicas.append(SimulatedReplica(replica_id, scheduler, executor, loop, census))
    return Cluster(census.replicas, LeastLoad(), loop, census), census


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 5), st.integers(1, 99), st.integers(1, 40)), max_size=15).map(sorted),
    st.integers(1, 3),
)
def test_arrived_is_ended_plus_inside_at_every_event(rows, num_replicas):
    cluster, census = make_cluster(num_replicas, num_blocks=20)
    seen = []
    cluster.run(make_trace(rows).groups() if rows else [], seen.append)
    assert census.num_arrived == census.num_ended == len(rows)
    assert seen[-1] == len(rows)


def test_load_is_counted_at_dispatch():
    """A burst at one instant is spread although no replica has planned anything yet."""
    cluster, census = make_cluster(3, num_blocks=100)
    cluster.run(make_trace([(0.0, 90, 1), (0.0, 8, 1), (0.0, 8, 1), (0.0, 8, 1)]).groups())
    assert max(census.in_flight) == 4
    assert census.prompts == {0: [90], 1: [8, 8], 2: [8]}


def test_progress_is_told_from_time_to_time():
    cluster, _ = make_cluster(1, num_blocks=100)
    seen = []
    cluster.run(make_trace([(i / 10, 4, 1) for i in range(150)]).groups(), seen.append)
    assert seen == [64, 128, 150]
