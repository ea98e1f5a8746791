"""Requests on their way through a cluster: legs on several replicas, and the transfers of KV between them.

One request of a client is one journey, whatever happens to it: observers hear of one arrival, one first token and one
end. A replica that computes prompts keeps a finished prompt's KV; the target reserves room, the network moves the
bytes, and the request goes on there with all its KV, decoding at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from expediter.control.fleet import Fleet
from expediter.control.handoff import TransferStyle, has_second_leg, prompt_leg
from expediter.control.routing.base import Decision, Placement, RouteQuery, Router
from expediter.core.errors import ConfigurationError, InvariantError
from expediter.core.events import (
    Admitted,
    Event,
    Finished,
    FirstToken,
    HandedOff,
    JourneyEvent,
    Preempted,
    Queued,
    Rejected,
    Tokens,
    TransferLost,
    Transferred,
)
from expediter.core.request import Carried, FinishReason, Request, RequestState
from expediter.kvcache.landing import Landing
from expediter.sim.loop import EventKind, EventLoop
from expediter.sim.network import Network
from expediter.sim.observer import Observer
from expediter.sim.replica import SimulatedReplica


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    """How KV moves between replicas.

    Args:
        style: when it does.
        kv_bytes_per_token: of the model.
        lease_s: a transfer that has not come so long after it began is given up as lost, and its blocks can be used
            again; blocks that were reserved ahead of it are given back after as long.
        max_retries: how often a lost transfer is begun anew before the target computes the prompt itself.
    Raises:
        ConfigurationError: a figure is out of range.
    """

    style: TransferStyle = TransferStyle.PULL
    kv_bytes_per_token: float = 0.0
    lease_s: float = 30.0
    max_retries: int = 1

    def __post_init__(self) -> None:
        if not self.lease_s > 0:
            raise ConfigurationError(f"the lease of a transfer must be above 0 s, not {self.lease_s}")
        if self.max_retries < 0:
            raise ConfigurationError(f"a transfer cannot be tried {self.max_retries} times again")


@dataclass(slots=True)
class TransferTotals:
    """What the transfers of a simulation came to.

    Attributes:
        exposed_s: for how long requests waited for KV, all together.
        network_s: of that, the time of the bytes themselves, with the queue of the network.
    """

    num_transfers: int = 0
    num_bytes: int = 0
    exposed_s: float = 0.0
    network_s: float = 0.0
    num_lost: int = 0
    num_recomputed: int = 0


@dataclass(slots=True, eq=False)
class Journey:
    """Where a request is. Exactly one of these holds: a scheduler has it, or its KV is held, or it is nowhere.

    Attributes:
        request: as its client sent it.
        number: order of arrival, unique in the cluster.
        carried: what it has so far, as of its last leg.
        replica_id: whose scheduler has it; -1 while none does.
        hands_off: that one computes its prompt only.
        held_by: who holds its KV (`hold`); -1 if nobody does.
        target_id: who is to go on with it; -1 if that is open.
        landing: blocks reserved on the target.
        ticket: of the transfer's end, or of the end of a lease; -1 while there is none.
        prompt_began_s: when its prompt began to be computed.
        waits_since_s: since when its client waits for the KV.
        num_losses: transfers lost in a row.
    """

    request: Request
    number: int
    carried: Carried | None = None
    replica_id: int = -1
    hands_off: bool = False
    held_by: int = -1
    hold: Landing | None = None
    target_id: int = -1
    landing: Landing | None = None
    ticket: int = -1
    prompt_began_s: float = 0.0
    waits_since_s: float = 0.0
    network_since_s: float = 0.0
    num_losses: int = 0

    @property
    def num_kv_tokens(self) -> int:
        """Tokens whose KV the next leg needs: all known ones but the newest output."""
        num_output = 0 if self.carried is None else len(self.carried.output)
        return self.request.num_prompt_tokens + max(0, num_output - 1)


@dataclass(slots=True)
class _Site:
    """A replica, and who waits for room on it."""

    replica: SimulatedReplica
    inbound: deque[Journey] = field(default_factory=deque)


def _never() -> bool:
    return False


_Fact = Queued | Rejected | Admitted | Preempted | FirstToken | Finished | JourneyEvent


class Journeys:
    """Drives requests across replicas; it is the observer of the replicas, and tells the observer one story each.

    Args:
        loses: whether the next transfer is lost; asked once for each, in order.
    Attributes:
        totals: what the transfers came to.
    """

    def __init__(
        self,
        loop: EventLoop,
        network: Network,
        observer: Observer,
        config: TransferConfig,
        loses: Callable[[], bool] = _never,
    ) -> None:
        self.totals = TransferTotals()
        self._loop = loop
        self._network = network
        self._observer = observer
        self._config = config
        self._loses = loses
        self._live: dict[str, Journey] = {}
        self._sites: dict[int, _Site] = {}
        self._num_arrived = 0

    def enter(self, replicas: Mapping[int, SimulatedReplica], fleet: Fleet, router: Router) -> None:
        """Take the replicas over; called once, by the cluster."""
        self._sites = {replica_id: _Site(replica) for replica_id, replica in replicas.items()}
        self._fleet = fleet
        self._router = router

    def number_of(self, state: RequestState) -> int:
        """Return a number for a request that no other has, on whatever replica it is."""
        return self._live[state.request_id].number

    # -- arrivals -----------------------------------------------------------------------------------------------------

    def arrive(self, group: Sequence[Request], decision: Decision, now_s: float) -> None:
        """Send a request that has just come in where the router said, with its sequences, or refuse it."""
        if isinstance(decision, Placement):
            refusal = self._refusal(group, decision, now_s)
            for request in group:
                self._observer.arrived(request, decision, now_s)
            if refusal:
                self._observer.record(decision.replica_id, refusal)
                return
            journeys = [Journey(request, self._num_arrived + number) for number, request in enumerate(group)]
            self._num_arrived += len(group)
            self._live.update((journey.request.request_id, journey) for journey in journeys)
            self._send(journeys, decision, now_s)
        else:
            for request in group:
                self._observer.arrived(request, decision, now_s)

    def _refusal(self, group: Sequence[Request], placement: Placement, now_s: float) -> list[Event]:
        """Refuse what no replica could finish, before anything is computed."""
        if self._sites[placement.replica_id].replica.role != "prefill" or not has_second_leg(group[0], None):
            return []
        seconds = [site.replica for site in self._sites.values() if site.replica.role != "prefill"]
        found = [replica.scheduler.refusal(group[:1]) for replica in seconds]
        if not found or any(refusal is None for refusal in found):
            return []
        assert found[0] is not None
        return [Rejected(request.request_id, now_s, *found[0]) for request in group]

    def _send(self, journeys: Sequence[Journey], placement: Placement, now_s: float) -> None:
        """Start a leg: of new requests of one group, or of a single one that goes on."""
        replica, first = self._sites[placement.replica_id].replica, journeys[0]
        hands_off = replica.role == "prefill"
        keep = hands_off and has_second_leg(first.request, first.carried)
        legs = [prompt_leg(j.request, j.carried) if hands_off else j.request for j in journeys]
        for journey in journeys:
            journey.replica_id, journey.hands_off = replica.replica_id, keep
            journey.prompt_began_s = now_s
        if first.carried is None:
            replica.receive(legs, now_s, keep=keep)
        else:
            self._continue(first, legs[0], None, now_s, keep=keep)
        self._fleet.dispatched(replica.replica_id)
        if keep and self._config.style.reserves_ahead:
            for journey in journeys:
                self._choose_target(journey, now_s, placement.decode_id)

    def _continue(
        self, journey: Journey, leg: Request, landing: Landing | None, now_s: float, *, keep: bool = False
    ) -> None:
        """Queue a request at a replica that it has not been at, between two steps."""
        replica = self._sites[journey.replica_id].replica
        replica.expect(journey.request.request_id, journey.request.num_prompt_tokens)

        def resume(now_s: float) -> None:
            replica.report(replica.scheduler.resume(leg, journey.carried, now_s, landing=landing, keep=keep))

        replica.post(resume, now_s)

    # -- what replicas report -----------------------------------------------------------------------------------------

    def arrived(self, request: Request, decision: Decision, now_s: float) -> None:  # noqa: ARG002 - the protocol's
        """Replicas report no arrivals.

        Raises:
            InvariantError: one does.
        """
        raise InvariantError(f"a replica says that request {request.request_id} has arrived")

    def record(self, replica_id: int, events: Sequence[Event | JourneyEvent]) -> None:
        told: list[Event | JourneyEvent] = []
        leaving: list[Journey] = []
        for event in events:
            if isinstance(event, Tokens):
                continue
            journey = self._live[event.request_id]
            if isinstance(event, Finished) and journey.hands_off and event.reason is FinishReason.LENGTH:
                leaving.append(journey)
            elif self._take_in(journey, event):
                told.append(event)
        if told:
            self._observer.record(replica_id, told)
        for journey in leaving:
            self._leave_prompt(journey, self._loop.now_s)
        if self._sites[replica_id].inbound:
            self._ask_for_room(replica_id, self._loop.now_s)

    def _take_in(self, journey: Journey, event: _Fact) -> bool:
        """Note what happened to a request; return whether its client's story tells of it."""
        match event:
            case Queued():
                return journey.carried is None
            case Admitted():
                journey.prompt_began_s = event.now_s
            case Finished() | Rejected():
                self._end(journey, event.now_s)
            case _:
                pass
        return True

    def _end(self, journey: Journey, now_s: float) -> None:
        """Let go of what a request has elsewhere when it ends."""
        del self._live[journey.request.request_id]
        departure = self._sites[journey.replica_id].replica.scheduler.collect(journey.request.request_id)
        if departure is not None:  # it was to be handed off, and a stop token ended it
            journey.held_by, journey.hold = journey.replica_id, departure.landing
            self._release_hold(journey, now_s)
        self._leave_target(journey, now_s)

    # -- handoffs -----------------------------------------------------------------------------------------------------

    def _leave_prompt(self, journey: Journey, now_s: float) -> None:
        """The prompt is done and its first token is out: the KV goes to the target."""
        source = self._sites[journey.replica_id].replica
        departure = source.scheduler.collect(journey.request.request_id)
        if departure is None:
            raise InvariantError(f"the KV of {journey.request.request_id} was not kept")
        journey.carried, journey.hold = departure.carried, departure.landing
        journey.held_by, journey.replica_id = journey.replica_id, -1
        journey.waits_since_s = now_s
        if journey.landing is not None:
            self._drop_ticket(journey)  # the lease of the reservation
            self._transfer(journey, now_s, layers_since_s=self._layers_since_s(journey))
        elif journey.target_id < 0:
            self._choose_target(journey, now_s)

    def _layers_since_s(self, journey: Journey) -> float | None:
        return journey.prompt_began_s if self._config.style is TransferStyle.LAYERWISE else None

    def _choose_target(self, journey: Journey, now_s: float, target_id: int | None = None) -> None:
        if target_id is None:
            decision = self._router.hand_off(RouteQuery(journey.request, now_s), self._fleet)
            if not isinstance(decision, Placement):
                raise InvariantError(f"nobody decodes: {decision.message}")
            target_id = decision.replica_id
        journey.target_id = target_id
        target = self._sites[target_id]
        target.replica.expect(journey.request.request_id, journey.request.num_prompt_tokens)
        self._fleet.dispatched(target_id)
        target.inbound.append(journey)
        self._ask_for_room(target_id, now_s)

    def _ask_for_room(self, replica_id: int, now_s: float) -> None:
        self._sites[replica_id].replica.post(partial(self._reserve, replica_id), now_s)

    def _reserve(self, replica_id: int, now_s: float) -> None:
        """Reserve room for who waits for it, in order, as long as there is some. Runs between two steps."""
        site = self._sites[replica_id]
        while site.inbound:
            journey = site.inbound[0]
            landing = site.replica.scheduler.reserve(journey.request, journey.carried, journey.num_kv_tokens, now_s)
            if landing is None:
                return
            site.inbound.popleft()
            journey.landing = landing
            if journey.hold is not None:
                self._transfer(journey, now_s)
            else:
                until_s = now_s + self._config.lease_s
                journey.ticket = self._loop.schedule(
                    until_s, EventKind.TRANSFER, journey.number, partial(self._reservation_over, journey)
                )

    def _reservation_over(self, journey: Journey, now_s: float) -> None:
        """The prompt was not done in time: others need the room. It asks again when it is."""
        journey.ticket = -1
        self._leave_target(journey, now_s)

    def _transfer(self, journey: Journey, now_s: float, *, layers_since_s: float | None = None) -> None:
        landing = journey.landing
        assert landing is not None
        target = self._sites[journey.target_id].replica
        num_tokens = landing.num_tokens - landing.num_matched * target.scheduler.kv.block_size
        num_bytes = int(num_tokens * self._config.kv_bytes_per_token)
        self._observer.record(
            journey.held_by,
            [HandedOff(journey.request.request_id, now_s, journey.target_id, landing.num_tokens)],
        )
        journey.network_since_s = now_s
        end_s = self._network.send(journey.held_by, journey.target_id, num_bytes, now_s, layers_since_s=layers_since_s)
        if self._loses():
            over_s = now_s + self._config.lease_s
            journey.ticket = self._loop.schedule(
                over_s, EventKind.TRANSFER, journey.number, partial(self._lost, journey)
            )
        else:
            journey.ticket = self._loop.schedule(
                end_s, EventKind.TRANSFER, journey.number, partial(self._come, journey, num_bytes)
            )

    def _come(self, journey: Journey, num_bytes: int, now_s: float) -> None:
        """The KV is on the target: the request goes on there after the step in progress."""
        exposed_s = now_s - journey.waits_since_s
        totals = self.totals
        totals.num_transfers += 1
        totals.num_bytes += num_bytes
        totals.exposed_s += exposed_s
        totals.network_s += now_s - journey.network_since_s
        self._observer.record(
            journey.target_id,
            [Transferred(journey.request.request_id, now_s, journey.held_by, num_bytes, exposed_s)],
        )
        self._release_hold(journey, now_s)
        landing, journey.landing, journey.ticket = journey.landing, None, -1
        journey.replica_id, journey.target_id, journey.hands_off = journey.target_id, -1, False
        journey.num_losses = 0
        assert landing is not None
        replica = self._sites[journey.replica_id].replica
        replica.forget(journey.request.request_id)
        replica.post(partial(self._land, replica, landing), now_s)
        self._continue(journey, journey.request, landing, now_s)

    @staticmethod
    def _land(replica: SimulatedReplica, landing: Landing, now_s: float) -> None:
        replica.scheduler.land(landing, now_s)

    def _lost(self, journey: Journey, now_s: float) -> None:
        """The lease is over and the KV has not come: once more, or the target computes it."""
        self.totals.num_lost += 1
        journey.ticket = -1
        self._observer.record(journey.target_id, [TransferLost(journey.request.request_id, now_s, journey.held_by)])
        target_id = journey.target_id
        self._leave_target(journey, now_s)
        journey.num_losses += 1
        if journey.num_losses <= self._config.max_retries:
            self._choose_target(journey, now_s, target_id)
            return
        self.totals.num_recomputed += 1
        self._release_hold(journey, now_s)
        journey.replica_id, journey.hands_off = target_id, False
        self._continue(journey, journey.request, None, now_s)

    # -- letting go ---------------------------------------------------------------------------------------------------

    def _release_hold(self, journey: Journey, now_s: float) -> None:
        """Let the source forget the KV; what is in its prefix cache stays there."""
        hold, journey.hold = journey.hold, None
        replica_id, journey.held_by = journey.held_by, -1
        if hold is None:
            return
        replica, hint = self._sites[replica_id].replica, journey.request.cache_hint
        replica.post(lambda now_s: replica.scheduler.release(hold, now_s, hint=hint), now_s)
        if self._sites[replica_id].inbound:
            self._ask_for_room(replica_id, now_s)

    def _leave_target(self, journey: Journey, now_s: float) -> None:
        """Give up what a request has, or waits for, on its target; no write can come any more."""
        self._drop_ticket(journey)
        if journey.target_id < 0:
            return
        site = self._sites[journey.target_id]
        landing, journey.landing, journey.target_id = journey.landing, None, -1
        site.replica.forget(journey.request.request_id)
        if landing is None:
            site.inbound.remove(journey)
            return
        site.replica.post(lambda now_s: site.replica.scheduler.release(landing, now_s), now_s)
        if site.inbound:
            self._ask_for_room(site.replica.replica_id, now_s)

    def _drop_ticket(self, journey: Journey) -> None:
        if journey.ticket >= 0:
            self._loop.cancel(journey.ticket)
            journey.ticket = -1
