"""Requests on their way through a cluster: legs on several replicas, until each has ended exactly once.

One request of a client is one journey, whatever happens to it: observers hear of one arrival, one first token and one
end. A replica that computes prompts keeps a finished prompt's KV; the target reserves room, the network moves the
bytes, and the request goes on there with all its KV, decoding at once. A request whose replica is lost goes on
elsewhere with the tokens that its client has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from expediter.control.fleet import Fleet
from expediter.control.handoff import has_second_leg, prompt_leg
from expediter.control.migration import MigrationConfig
from expediter.control.routing.base import NO_REPLICA, Decision, Placement, Refusal, RouteQuery, Router
from expediter.control.routing.simple import LeastLoad
from expediter.core.errors import InvariantError
from expediter.core.events import (
    Admitted,
    ClusterEvent,
    Event,
    Finished,
    FirstToken,
    Interrupted,
    Queued,
    Rejected,
    RejectReason,
    ReplicaDown,
    ReplicaUp,
    Routed,
    Tokens,
)
from expediter.core.request import FinishReason, Request, RequestState
from expediter.kvcache.landing import Landing
from expediter.sim.fetches import Fetches
from expediter.sim.handoffs import Handoffs
from expediter.sim.journey import NOWHERE, Fetch, Journey
from expediter.sim.loop import EventLoop
from expediter.sim.migrations import Migrations
from expediter.sim.network import Network
from expediter.sim.observer import Observer
from expediter.sim.replica import SimulatedReplica
from expediter.sim.stores import Stores, StoreTotals, TierName
from expediter.sim.transfers import TransferConfig, TransferTotals

_WAITS: Final = Placement(replica_id=NOWHERE, because="no replica is up: it waits until one is")


class Journeys:
    """Drives requests across replicas; it is the observer of the replicas, and tells the observer one story each.

    Args:
        loses: whether the next transfer is lost; asked once for each, in order.
        can_fail: replicas may go and come back: requests that find none wait, without a bound, until one is up.
        stores: tiers of storage that prompts can be fetched from, if there are any.
        migration: when running requests move; None for never.
    Attributes:
        link: what a router may take a copy of KV between two replicas to cost.
    """

    def __init__(
        self,
        loop: EventLoop,
        network: Network,
        observer: Observer,
        config: TransferConfig,
        *,
        loses: Callable[[], bool],
        can_fail: bool,
        stores: Stores | None = None,
        migration: MigrationConfig | None = None,
    ) -> None:
        self._live: dict[str, Journey] = {}
        self._loop = loop
        self._observer = observer
        self._can_fail = can_fail
        self._handoffs = Handoffs(
            loop, network, observer, config, resume=self._go_on, reject=self._reject, loses=loses, can_fail=can_fail
        )
        self._transfers = self._handoffs.transfers
        self._fetches = Fetches(
            loop,
            network,
            observer,
            self._transfers,
            compute=self._compute,
            stores=stores,
        )
        self._migrations = None
        if migration is not None:
            self._migrations = Migrations(
                migration,
                loop,
                network,
                self._transfers,
                follow=self._follow,
                find=self._live.get,
            )
        self._stores = stores
        self.link = network.mean_link(config.kv_bytes_per_token)
        self._fallback = LeastLoad()
        self._parked: list[list[Journey]] = []
        self._replicas: Mapping[int, SimulatedReplica] = {}
        self._num_arrived = 0

    def enter(self, replicas: Mapping[int, SimulatedReplica], fleet: Fleet, router: Router) -> None:
        """Take the replicas over; called once, by the cluster."""
        self._replicas, self._fleet, self._router = replicas, fleet, router
        self._handoffs.enter(replicas, fleet, router)
        self._fetches.enter(replicas, fleet)
        if self._migrations is not None:
            self._migrations.enter(replicas, fleet)

    def begin(self) -> None:
        """Begin what goes on beside the requests."""
        if self._migrations is not None:
            self._migrations.begin()

    @property
    def totals(self) -> TransferTotals:
        """What the transfers came to."""
        return self._transfers.totals

    @property
    def store_totals(self) -> Mapping[TierName, StoreTotals]:
        """What each tier of storage was good for."""
        return {} if self._stores is None else self._stores.totals

    @property
    def num_migrations(self) -> int:
        """Running requests that moved."""
        return 0 if self._migrations is None else self._migrations.num_moved

    @property
    def num_live(self) -> int:
        """Requests that have arrived and not ended."""
        return len(self._live)

    def number_of(self, state: RequestState) -> int:
        """Return a number for a request that no other has, on whatever replica it is."""
        return self._live[state.request_id].number

    # -- arrivals -----------------------------------------------------------------------------------------------------

    def arrive(self, group: Sequence[Request], decision: Decision, now_s: float) -> None:
        """Send a request that has just come in where the router said, with its sequences, or refuse it."""
        if isinstance(decision, Refusal) and decision.reason is RejectReason.NO_REPLICA and self._can_fail:
            decision = _WAITS
        for request in group:
            self._observer.arrived(request, decision, now_s)
        if not isinstance(decision, Placement):
            return
        refusal = self._handoffs.refusal(group)  # before anything is computed
        if refusal is not None:
            rejected = [Rejected(request.request_id, now_s, *refusal) for request in group]
            self._observer.record(decision.replica_id, rejected)
            return
        journeys = [Journey(request, self._num_arrived + number) for number, request in enumerate(group)]
        self._num_arrived += len(group)
        self._live.update((journey.request_id, journey) for journey in journeys)
        if decision is _WAITS:
            self._parked.append(journeys)
        else:
            self._send(journeys, decision, now_s)

    def _send(self, journeys: Sequence[Journey], placement: Placement, now_s: float) -> None:
        """Start a leg: of new requests of one group, or of a single one that goes on."""
        replica, first = self._replicas[placement.replica_id], journeys[0]
        is_prompt_only = replica.role == "prefill"
        if placement.decode_id is not None:  # pools may lend replicas to each other
            is_prompt_only = placement.decode_id != placement.replica_id
        keep = is_prompt_only and has_second_leg(first.request, first.carried)
        legs = [prompt_leg(j.request, j.carried) if is_prompt_only else j.request for j in journeys]
        for journey in journeys:
            journey.replica_id, journey.hands_off, journey.prompt_began_s = replica.replica_id, keep, now_s
        fetch = None
        if len(journeys) == 1 and first.carried is None:
            fetch = self._fetches.wanted(first.request, legs[0], placement, now_s, keep=keep)
        if fetch is not None:
            self._fetches.begin(first, fetch, now_s)
        elif len(journeys) > 1 or first.carried is None:
            replica.receive(legs, now_s, keep=keep, num_expected_hits=placement.num_cached_tokens)
        else:
            self._resume(first, legs[0], None, now_s, keep=keep)
        self._fleet.dispatched(replica.replica_id)
        for journey in journeys:
            journey.chosen_id = NOWHERE if placement.decode_id is None else placement.decode_id
            if keep:
                self._handoffs.reserve_ahead(journey, now_s)

    def _compute(self, journey: Journey, fetch: Fetch, now_s: float) -> None:
        """Nothing is fetched: the request starts as it is."""
        replica = self._replicas[journey.replica_id]
        replica.forget(journey.request_id)
        replica.receive([fetch.leg], now_s, keep=fetch.keep)

    def _resume(
        self, journey: Journey, leg: Request, landing: Landing | None, now_s: float, *, keep: bool = False
    ) -> None:
        """Queue a request at a replica that it has not been at, between two steps."""
        replica, carried = self._replicas[journey.replica_id], journey.carried
        replica.expect(journey.request_id, journey.request.num_prompt_tokens)
        replica.post(
            lambda now_s: replica.report(
                replica.scheduler.passage.resume(leg, carried, now_s, landing=landing, keep=keep)
            ),
            now_s,
        )

    # -- what replicas report -----------------------------------------------------------------------------------------

    def arrived(self, request: Request, decision: Decision, now_s: float) -> None:  # noqa: ARG002 - the protocol's
        """Replicas report no arrivals.

        Raises:
            InvariantError: one does.
        """
        raise InvariantError(f"a replica says that request {request.request_id} has arrived")

    def record(self, replica_id: int, events: Sequence[Event | ClusterEvent]) -> None:
        """Note what happened to requests, and tell of it what belongs to their clients' story."""
        told: list[Event | ClusterEvent] = []
        leaving: list[Journey] = []
        for event in events:
            if isinstance(event, Tokens | ReplicaDown | ReplicaUp):
                continue
            journey = self._live[event.request_id]
            match event:
                case Queued() if journey.carried is not None or journey.was_queued:
                    continue
                case Queued():
                    journey.was_queued = True
                case Admitted():
                    journey.prompt_began_s = event.now_s
                    if journey.was_admitted and not event.resumed:
                        event = replace(event, resumed=True)  # noqa: PLW2901 - its first start was on a replica that is gone
                    journey.was_admitted = True
                case FirstToken() if self._stores is not None:
                    self._stores.put(journey.request, replica_id, event.now_s)
                case Finished() if journey.hands_off and event.reason is FinishReason.LENGTH:
                    leaving.append(journey)
                    continue
                case Finished() | Rejected():
                    self._end(journey, event.now_s)
                case _:
                    pass
            told.append(event)
        if told:
            self._observer.record(replica_id, told)
        for journey in leaving:
            self._handoffs.leave_prompt(journey, self._loop.now_s)
        self._transfers.room_changed(replica_id, self._loop.now_s)

    def _go_on(self, journey: Journey, landing: Landing | None, now_s: float) -> None:
        """Go on with a request whose prompt is done."""
        self._resume(journey, journey.request, landing, now_s)

    def _end(self, journey: Journey, now_s: float) -> None:
        """Let go of what a request has elsewhere when it ends."""
        del self._live[journey.request_id]
        self._end_copy(journey, now_s)
        if journey.replica_id != NOWHERE:
            departure = self._replicas[journey.replica_id].scheduler.passage.collect(journey.request_id)
            if departure is not None:  # it was to be handed off, and a stop token ended it
                journey.held_by, journey.hold = journey.replica_id, departure.landing
        self._transfers.release_hold(journey, now_s)
        self._transfers.leave_target(journey, now_s)

    def _reject(self, journey: Journey, refusal: Refusal, now_s: float) -> None:
        self._observer.record(journey.held_by, [Rejected(journey.request_id, now_s, refusal.reason, refusal.message)])
        self._end(journey, now_s)

    def _follow(self, journey: Journey, target_id: int, now_s: float) -> None:
        """A running request has stopped to go on elsewhere, where most of its KV is already."""
        journey.held_by, journey.replica_id, journey.waits_since_s = journey.replica_id, NOWHERE, now_s
        journey.chosen_id, journey.turns_back = target_id, True
        self._end_copy(journey, now_s)  # it is cached from here on, and what is reserved next shares it
        self._handoffs.choose_target(journey, now_s)

    def _end_copy(self, journey: Journey, now_s: float, *, lost_id: int | None = None) -> None:
        """What was copied ahead of a request has served, or serves nobody."""
        if self._migrations is not None and journey.staged is not None:
            self._migrations.end(journey, now_s, lost_id=lost_id)

    # -- replicas that go and come ------------------------------------------------------------------------------------

    def lose(self, replica_id: int, now_s: float) -> int:
        """Take note that a replica is gone with all that it had; return how many requests that hit.

        Its requests go on elsewhere with what their clients have; KV on its way there or from there is given up.
        """
        self._fleet.leave(replica_id)
        self._transfers.replica_lost(replica_id)
        if self._stores is not None:
            self._stores.replica_lost(replica_id)
        groups: dict[str, list[Journey]] = {}
        for departures in self._replicas[replica_id].crash(now_s):
            group = [self._live[departure.request.request_id] for departure in departures]
            for journey, departure in zip(group, departures, strict=True):
                journey.carried = departure.carried if departure.carried.first_scheduled_s is not None else None
                groups[journey.request_id] = group
        num_hit = 0
        for journey in sorted(self._live.values(), key=lambda journey: journey.number):
            if journey.staged is not None and replica_id in (journey.staged.source_id, journey.staged.target_id):
                self._end_copy(journey, now_s, lost_id=replica_id)
            if journey.target_id == replica_id:
                self._transfers.target_lost(journey, now_s)
                if journey.hold is not None and journey.held_by != replica_id:
                    self._handoffs.choose_target(journey, now_s)
            if replica_id not in (journey.replica_id, journey.held_by):
                if journey.fetch is not None and journey.fetch.source_id == replica_id:
                    self._fetches.source_lost(journey, now_s)
                continue
            self._fetches.cancel(journey, now_s)
            if journey.held_by == replica_id:
                self._transfers.source_lost(journey, now_s)
            else:
                self._transfers.leave_target(journey, now_s)
            num_hit += 1
            num_output = 0 if journey.carried is None else len(journey.carried.output)
            self._observer.record(replica_id, [Interrupted(journey.request_id, now_s, num_output)])
            group = groups.get(journey.request_id, [journey])
            journey.replica_id = NOWHERE
            if journey is group[-1]:  # the others are there by now
                self._send_again(group, now_s)
        self._handoffs.holder_lost()
        return num_hit

    def take_back(self, replica_id: int, now_s: float) -> None:
        """Take note that a replica is up, with an empty cache: who waits for one may go there."""
        replica = self._replicas[replica_id]
        self._fleet.join(replica_id, replica.snapshot, replica.profile)
        parked, self._parked = self._parked, []
        for group in parked:
            self._send_again(group, now_s)
        for journey in self._handoffs.take_stranded():
            self._handoffs.choose_target(journey, now_s)

    def _send_again(self, group: list[Journey], now_s: float) -> None:
        """Send requests on that no replica has, or let them wait for one."""
        request, carried = group[0].request, group[0].carried
        if carried is not None and carried.output:
            known = np.concatenate((request.prompt, np.array(carried.output, np.int32)))
            request = replace(request, prompt=known)
        query = RouteQuery(request, now_s, len(group))
        decision = self._router.route(query, self._fleet)
        if isinstance(decision, Refusal) and decision.reason is not RejectReason.NO_REPLICA:
            decision = self._fallback.route(query, self._fleet)  # it has been accepted before
        if not isinstance(decision, Placement):
            self._parked.append(group)
            return
        for journey in group:
            self._observer.record(decision.replica_id, [Routed(journey.request_id, now_s)])
        self._send(group, decision, now_s)

    def finish(self) -> None:
        """Refuse who still waits for a replica when nothing more will happen."""
        while waiting := [journey for group in self._parked for journey in group] + self._handoffs.take_stranded():
            self._parked = []
            for journey in waiting:
                self._reject(journey, NO_REPLICA, self._loop.now_s)
            self._loop.run()  # what they held is free for others
