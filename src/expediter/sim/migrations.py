"""Running requests that move between replicas: their KV is copied while they go on, then what is new, and they follow.

Source: live migration in Llumnix (OSDI 2024). Its later stages, which copy what was generated meanwhile, are one here:
the request stops, what the first stage did not copy moves, and it goes on. Replicas say what they hold between two
steps; a look decides by what they said since the look before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from expediter.control.fleet import Fleet
from expediter.control.migration import MemoryLoad, MigrationConfig, choose, pairs
from expediter.core.request import Carried
from expediter.scheduling.passage import Movable
from expediter.sim.journey import Journey, Staged
from expediter.sim.loop import EventKind, EventLoop
from expediter.sim.network import Network
from expediter.sim.replica import SimulatedReplica
from expediter.sim.transfers import Transfers


class _Word(NamedTuple):
    """What a replica said: its load, and which request would go, with what it had then."""

    load: MemoryLoad
    movable: Movable | None
    carried: Carried | None


class Migrations:
    """Looks at the replicas from time to time, and begins to move requests.

    Args:
        follow: called when a request has left its source, which holds its KV: it goes on at the target.
        find: the journey of a request, if it has not ended.
    Attributes:
        num_moved: requests that left their source for another replica.
    """

    def __init__(
        self,
        config: MigrationConfig,
        loop: EventLoop,
        network: Network,
        transfers: Transfers,
        *,
        follow: Callable[[Journey, int, float], None],
        find: Callable[[str], Journey | None],
    ) -> None:
        self.num_moved = 0
        self._config = config
        self._loop = loop
        self._network = network
        self._transfers = transfers
        self._follow = follow
        self._find = find
        self._words: dict[int, _Word] = {}
        self._replicas: Mapping[int, SimulatedReplica] = {}

    def enter(self, replicas: Mapping[int, SimulatedReplica], fleet: Fleet) -> None:
        """Take the replicas over; called once."""
        self._replicas, self._fleet = replicas, fleet

    def begin(self) -> None:
        """Look from now on, as long as anything else happens."""
        self._look_later()

    def _look_later(self) -> None:
        time_s = self._loop.now_s + self._config.interval_s
        self._loop.schedule(time_s, EventKind.CONTROL, 0, self._look)

    def _look(self, now_s: float) -> None:
        if not self._loop.num_scheduled:
            return  # all is done, or waits for what never comes
        there = [replica_id for replica_id in sorted(self._words) if replica_id in self._fleet]
        words, self._words = self._words, {}
        for source_id, target_id in pairs([words[replica_id].load for replica_id in there], self._config):
            movable, carried = words[source_id].movable, words[source_id].carried
            journey = None if movable is None else self._find(movable.request_id)
            is_there = journey is not None and journey.replica_id == source_id and journey.staged is None
            if journey is not None and is_there and not journey.hands_off and carried is not None:
                self._begin(journey, carried, source_id, target_id, now_s)
        for replica_id, replica in self._replicas.items():
            if replica.role != "prefill" and replica_id in self._fleet:
                replica.post(partial(self._ask, replica), now_s)
        self._look_later()

    def _ask(self, replica: SimulatedReplica, now_s: float) -> None:
        scheduler = replica.scheduler
        kv = scheduler.kv
        num_virtual = (kv.num_used_blocks + scheduler.passage.queue_demand_blocks(now_s)) * kv.block_size
        load = MemoryLoad(replica.replica_id, kv.num_blocks * kv.block_size, num_virtual, scheduler.num_running)
        movable = choose(scheduler.passage.movable())
        carried = None if movable is None else scheduler.passage.peek(movable.request_id)
        self._words[replica.replica_id] = _Word(load, movable, carried)

    # -- a migration --------------------------------------------------------------------------------------------------

    def _begin(self, journey: Journey, carried: Carried, source_id: int, target_id: int, now_s: float) -> None:
        """Copy what the request had when its replica spoke; it goes on meanwhile."""
        staged = journey.staged = Staged(source_id, target_id)
        self._replicas[target_id].post(partial(self._reserve, journey, staged, carried), now_s)

    def _reserve(self, journey: Journey, staged: Staged, carried: Carried, now_s: float) -> None:
        if journey.staged is not staged:
            return
        num_tokens = journey.request.num_prompt_tokens + len(carried.output) - 1
        scheduler = self._replicas[staged.target_id].scheduler
        if not scheduler.kv.prefix_caching:  # nothing that is there could be shared: all is copied when it stops
            self._later(journey, partial(self._stop, journey, staged), now_s)
            return
        staged.landing = scheduler.passage.reserve(journey.request, carried, num_tokens, now_s)
        if staged.landing is None:
            journey.staged = None
            return
        num_tokens -= staged.landing.num_matched * scheduler.kv.block_size
        num_bytes = int(num_tokens * self._transfers.config.kv_bytes_per_token)
        staged.passage = self._network.send(staged.source_id, staged.target_id, num_bytes, now_s)
        come = partial(self._come, journey, staged)
        staged.ticket = self._loop.schedule(staged.passage.end_s, EventKind.TRANSFER, journey.number, come)

    def _come(self, journey: Journey, staged: Staged, now_s: float) -> None:
        staged.ticket, staged.passage = -1, None
        target, landing = self._replicas[staged.target_id], staged.landing
        assert landing is not None
        target.post(lambda now_s: _discard(target.scheduler.passage.land(landing, now_s)), now_s)
        self._stop(journey, staged, now_s)

    def _stop(self, journey: Journey, staged: Staged, now_s: float) -> None:
        if journey.staged is staged:
            self._replicas[staged.source_id].post(partial(self._leave, journey, staged), now_s)

    def _leave(self, journey: Journey, staged: Staged, now_s: float) -> None:
        """Take the request out of its source between two steps, if it is still there and decodes."""
        if journey.staged is not staged:
            return
        source = self._replicas[staged.source_id]
        if source.scheduler.passage.peek(journey.request_id) is not None:
            (departure,) = source.scheduler.passage.extract(journey.request_id, now_s, keep=True)
            self.num_moved += 1
            source.forget(journey.request_id)
            journey.carried, journey.hold = departure.carried, departure.landing
            self._later(journey, partial(self._follow, journey, staged.target_id), now_s)
        else:  # preempted meanwhile: it stays
            self._later(journey, partial(self.end, journey), now_s)

    def _later(self, journey: Journey, action: Callable[[float], None], now_s: float) -> None:
        self._loop.schedule(now_s, EventKind.CONTROL, journey.number, action)

    def end(self, journey: Journey, now_s: float, *, lost_id: int | None = None) -> None:
        """Give up what was copied ahead: the request has it all by now, has ended, or cannot move.

        Args:
            lost_id: a replica that is gone.
        """
        staged, journey.staged = journey.staged, None
        if staged is None:
            return
        until_s = None
        if staged.ticket >= 0:
            self._loop.cancel(staged.ticket)
            if staged.source_id == lost_id:  # else it says that nothing more will come
                until_s = now_s + self._transfers.config.lease_s
        if staged.passage is not None:
            self._network.give_up(staged.passage, now_s)
        if staged.landing is not None and staged.target_id != lost_id:
            self._transfers.give_up(staged.target_id, staged.landing, journey.number, now_s, writes_until_s=until_s)


def _discard(_: bool) -> None:
    """Posted actions return nothing."""
