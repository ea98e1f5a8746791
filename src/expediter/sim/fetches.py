"""Beginnings of prompts that are fetched from another replica's cache or from storage before they are computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from expediter.control.fetching import Source, best_source
from expediter.control.fleet import Fleet
from expediter.control.routing.base import Placement
from expediter.core.events import Fetched
from expediter.core.request import Request
from expediter.sim.journey import NOWHERE, Fetch, Journey
from expediter.sim.loop import EventKind, EventLoop
from expediter.sim.network import Network
from expediter.sim.observer import Observer
from expediter.sim.replica import SimulatedReplica
from expediter.sim.stores import Stores
from expediter.sim.transfers import Transfers


class Fetches:
    """Decides on fetches and carries them out; a request whose fetch comes to nothing computes its prompt as it is.

    Args:
        compute: called for such a request.
        stores: tiers of storage, if there are any.
    """

    def __init__(
        self,
        loop: EventLoop,
        network: Network,
        observer: Observer,
        transfers: Transfers,
        *,
        compute: Callable[[Journey, Fetch, float], None],
        stores: Stores | None,
    ) -> None:
        self.stores = stores
        self._loop = loop
        self._network = network
        self._observer = observer
        self._compute = compute
        self._transfers = transfers
        self._replicas: Mapping[int, SimulatedReplica] = {}

    def enter(self, replicas: Mapping[int, SimulatedReplica], fleet: Fleet) -> None:
        """Take the replicas over; called once."""
        self._replicas, self._fleet = replicas, fleet

    def wanted(self, request: Request, leg: Request, placement: Placement, now_s: float, *, keep: bool) -> Fetch | None:
        """Return what is worth fetching for a new request: what the router says, or what a tier holds."""
        replica = self._replicas[placement.replica_id]
        num_cached = replica.num_cached_tokens(request)
        source_id = placement.fetch_from_id
        if source_id is not None and source_id in self._fleet:
            size = replica.scheduler.kv.block_size
            num_tokens = min(placement.num_fetched_tokens, request.num_prompt_tokens - 1) // size * size
            return Fetch(leg, keep, source_id, None, num_tokens) if num_tokens > num_cached else None
        if self.stores is None:
            return None
        shelves = self.stores.find(request, placement.replica_id, num_cached, now_s)
        sources = [Source(shelf.num_tokens, shelf.fetch_s) for shelf in shelves]
        place = best_source(sources, request.num_prompt_tokens, num_cached, replica.profile.speed)
        if place is None:
            return None
        return Fetch(leg, keep, NOWHERE, shelves[place].tier, shelves[place].num_tokens)

    def begin(self, journey: Journey, fetch: Fetch, now_s: float) -> None:
        """Hold the path where it is, and reserve room where it goes; the bytes move when both are there."""
        journey.fetch = fetch
        replica = self._replicas[journey.replica_id]
        replica.expect(journey.request_id, journey.request.num_prompt_tokens)
        if fetch.source_id != NOWHERE:
            self._replicas[fetch.source_id].post(partial(self._hold, journey, fetch), now_s)
        replica.post(partial(self._reserve, journey, fetch), now_s)

    def _hold(self, journey: Journey, fetch: Fetch, now_s: float) -> None:
        """Own the cached path, between two steps of the source; it may be shorter than the router thought."""
        scheduler = self._replicas[fetch.source_id].scheduler
        landings, tokens, salt = scheduler.kv.landings, fetch.leg.prompt.tobytes(), fetch.leg.cache_salt
        size = scheduler.kv.block_size
        num_tokens = landings.match(tokens, salt, fetch.num_tokens).num_blocks * size
        hold = landings.reserve(tokens, salt, num_tokens, num_reserved=num_tokens, spare_blocks=0, now_s=now_s)
        assert hold is not None  # what is cached needs no room
        landings.complete(hold, now_s)
        if fetch.is_off:
            scheduler.passage.release(hold, now_s)
            return  # it was cached, so nobody finds more room than before
        fetch.hold = hold
        if fetch.landing is not None:
            self._start(journey, fetch, now_s)

    def _reserve(self, journey: Journey, fetch: Fetch, now_s: float) -> None:
        """Take blocks for the whole prompt, between two steps of the replica; without room there is no fetch."""
        scheduler = self._replicas[journey.replica_id].scheduler
        fetch.landing = scheduler.passage.reserve(fetch.leg, None, fetch.num_tokens, now_s)
        if fetch.landing is None:
            fetch.is_off = True
            journey.fetch = None
            if fetch.hold is not None:
                release = partial(self._release_hold, fetch)
                self._loop.schedule(now_s, EventKind.CONTROL, journey.number, release)
            self._compute(journey, fetch, now_s)
        elif fetch.tier is not None or fetch.hold is not None:
            self._start(journey, fetch, now_s)

    def _start(self, journey: Journey, fetch: Fetch, now_s: float) -> None:
        landing = fetch.landing
        assert landing is not None
        replica = self._replicas[journey.replica_id]
        num_there = landing.num_matched * replica.scheduler.kv.block_size
        if fetch.hold is not None:  # what comes is what the source still has
            landing.num_tokens = max(min(landing.num_tokens, fetch.hold.num_tokens), num_there)
        num_tokens = landing.num_tokens - num_there
        num_bytes = int(num_tokens * self._transfers.config.kv_bytes_per_token)
        if fetch.tier is not None and self.stores is not None:
            fetch.passage = self.stores.read(fetch.tier, replica.replica_id, num_tokens, now_s)
        else:
            fetch.passage = self._network.send(fetch.source_id, replica.replica_id, num_bytes, now_s)
        come = partial(self._come, journey, fetch, num_tokens, num_bytes)
        fetch.ticket = self._loop.schedule(fetch.passage.end_s, EventKind.TRANSFER, journey.number, come)

    def _come(self, journey: Journey, fetch: Fetch, num_tokens: int, num_bytes: int, now_s: float) -> None:
        source = fetch.tier or str(fetch.source_id)
        fetched = Fetched(journey.request_id, now_s, source, num_tokens, num_bytes)
        self._observer.record(journey.replica_id, [fetched])
        self._release_hold(fetch, now_s)
        journey.fetch = None
        replica, landing = self._replicas[journey.replica_id], fetch.landing
        assert landing is not None

        def go_on(now_s: float) -> None:
            replica.scheduler.passage.land(landing, now_s)
            replica.report(replica.scheduler.passage.resume(fetch.leg, None, now_s, landing=landing, keep=fetch.keep))

        replica.post(go_on, now_s)

    def _release_hold(self, fetch: Fetch, now_s: float) -> None:
        hold, fetch.hold = fetch.hold, None
        if hold is not None:
            source = self._replicas[fetch.source_id]
            source.post(lambda now_s: source.scheduler.passage.release(hold, now_s), now_s)
            self._transfers.room_changed(source.replica_id, now_s)

    def cancel(self, journey: Journey, now_s: float) -> None:
        """End the fetch of a request whose replica is gone, with what was reserved there."""
        fetch, journey.fetch = journey.fetch, None
        if fetch is not None:
            self._stop(fetch, now_s)
            self._release_hold(fetch, now_s)

    def source_lost(self, journey: Journey, now_s: float) -> None:
        """End a fetch whose source is gone; the request computes its prompt as it is."""
        fetch, journey.fetch = journey.fetch, None
        assert fetch is not None
        fetch.hold = None
        was_sent = fetch.passage is not None
        self._stop(fetch, now_s)
        if fetch.landing is not None:
            until_s = now_s + self._transfers.config.lease_s if was_sent else None
            replica_id, number = journey.replica_id, journey.number
            self._transfers.give_up(replica_id, fetch.landing, number, now_s, writes_until_s=until_s)
        self._compute(journey, fetch, now_s)

    def _stop(self, fetch: Fetch, now_s: float) -> None:
        fetch.is_off = True
        if fetch.ticket >= 0:
            self._loop.cancel(fetch.ticket)
            fetch.ticket = -1
        if fetch.passage is None:
            return
        if fetch.tier is not None and self.stores is not None:
            self.stores.give_up(fetch.tier, fetch.passage, now_s)
        else:
            self._network.give_up(fetch.passage, now_s)
