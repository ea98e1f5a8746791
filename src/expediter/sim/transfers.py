"""KV on its way between replicas: room on the target, bytes over the network, leases for what does not come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from expediter.control.handoff import TransferStyle
from expediter.core.errors import ConfigurationError
from expediter.core.events import HandedOff, TransferLost, Transferred
from expediter.kvcache.landing import Landing, LandingStatus
from expediter.sim.journey import NOWHERE, Journey
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
        lease_s: renewed as long as bytes come. A transfer of which nothing comes for so long is given up as lost, and
            its blocks can be used again; blocks that were reserved ahead of it are given back after as long.
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
        exposed_s: for how long requests waited for KV that came, all together.
        network_s: of that, the time of the bytes themselves, with the queue of the network.
        num_lost: that did not come within their lease.
        num_recomputed: requests whose target computed the prompt itself, because its KV was lost once too often.
    """

    num_transfers: int = 0
    num_bytes: int = 0
    exposed_s: float = 0.0
    network_s: float = 0.0
    num_lost: int = 0
    num_recomputed: int = 0


@dataclass(slots=True)
class _Site:
    """A replica, and who waits for room on it, in order."""

    replica: SimulatedReplica
    inbound: deque[Journey] = field(default_factory=deque)


class Transfers:
    """Moves the KV of journeys. Blocks are reserved, filled and released between the steps of their replicas.

    Args:
        arrive: called when a journey's KV is on its target, which has the blocks: it goes on there.
        recompute: called when it is not, once too often: it goes on there all the same.
        turn_back: called when it goes on where its KV is.
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
        *,
        arrive: Callable[[Journey, Landing, float], None],
        recompute: Callable[[Journey, float], None],
        turn_back: Callable[[Journey, float], None],
        loses: Callable[[], bool],
    ) -> None:
        self.totals = TransferTotals()
        self.config = config
        self._loop = loop
        self._network = network
        self._observer = observer
        self._arrive = arrive
        self._recompute = recompute
        self._turn_back = turn_back
        self._loses = loses
        self._sites: dict[int, _Site] = {}

    def enter(self, replicas: Mapping[int, SimulatedReplica]) -> None:
        """Take the replicas over; called once."""
        self._sites = {replica_id: _Site(replica) for replica_id, replica in replicas.items()}

    # -- room ---------------------------------------------------------------------------------------------------------

    def ask(self, journey: Journey, target_id: int, now_s: float) -> None:
        """Let a journey wait for room on its target; the transfer begins when there is some, and KV to be sent."""
        journey.target_id = target_id
        site = self._sites[target_id]
        site.replica.expect(journey.request_id, journey.request.num_prompt_tokens)
        site.inbound.append(journey)
        self._post_reserving(site, now_s)

    def room_changed(self, replica_id: int, now_s: float) -> None:
        """Say that something came or went on a replica: who waits for room there may get it now."""
        site = self._sites[replica_id]
        if site.inbound:
            self._post_reserving(site, now_s)

    def _post_reserving(self, site: _Site, now_s: float) -> None:
        site.replica.post(partial(self._reserve, site), now_s)

    def _reserve(self, site: _Site, now_s: float) -> None:
        """Reserve room in order, as long as there is some. Runs between two steps."""
        while site.inbound:
            journey = site.inbound[0]
            landing = site.replica.scheduler.passage.reserve(
                journey.request, journey.carried, journey.num_kv_tokens, now_s
            )
            if landing is None:
                self._break_circle(site, now_s)
                return
            site.inbound.popleft()
            journey.landing = landing
            if journey.hold is not None:
                self.start(journey, now_s)
            else:
                over = partial(self._reservation_over, journey)
                self._schedule(journey, now_s + self.config.lease_s, over)

    def _break_circle(self, site: _Site, now_s: float) -> None:
        """Let a request go on where its KV is, if there is no room and waiting for it may be in vain.

        A running request that was to move does not wait. And where nothing runs and nothing comes, it is KV that waits
        to be sent which fills the replica, perhaps to one that is full for the same reason: both would wait for ever.
        """
        landings = site.replica.scheduler.kv.landings
        comes = any(landing.status is not LandingStatus.LANDED or landing.owner >= 0 for landing in landings)
        is_stuck = site.replica.scheduler.num_running == 0 and len(landings) > 0 and not comes
        held = (each for each in site.inbound if each.hold is not None)
        journey = next((each for each in held if each.turns_back or is_stuck), None)
        if journey is not None:
            site.inbound.remove(journey)
            site.replica.forget(journey.request_id)
            journey.target_id = NOWHERE
            self._loop.schedule(now_s, EventKind.CONTROL, journey.number, partial(self._turn_back, journey))

    def _reservation_over(self, journey: Journey, now_s: float) -> None:
        """The prompt was not done in time, and others need the room. It asks again when it is."""
        journey.ticket = -1
        self.leave_target(journey, now_s)

    def _schedule(self, journey: Journey, time_s: float, action: Callable[[float], None]) -> None:
        journey.ticket = self._loop.schedule(time_s, EventKind.TRANSFER, journey.number, action)

    # -- bytes --------------------------------------------------------------------------------------------------------

    def start(self, journey: Journey, now_s: float, *, layers_since_s: float | None = None) -> None:
        """Send what a journey's landing lacks, from who holds it.

        Args:
            layers_since_s: since when its layers have been coming out; None if none of it was sent before now.
        """
        self._drop_ticket(journey)  # the lease of a reservation
        landing = journey.landing
        assert landing is not None
        kv = self._sites[journey.target_id].replica.scheduler.kv
        num_tokens = landing.num_tokens - landing.num_matched * kv.block_size
        num_bytes = int(num_tokens * self.config.kv_bytes_per_token)
        handed_off = HandedOff(journey.request_id, now_s, journey.target_id, landing.num_tokens)
        self._observer.record(journey.held_by, [handed_off])
        journey.sent_s = now_s
        held_by, target_id = journey.held_by, journey.target_id
        passage = self._network.send(held_by, target_id, num_bytes, now_s, layers_since_s=layers_since_s)
        journey.passage = passage
        if self._loses():
            self._schedule(journey, now_s + self.config.lease_s, partial(self._lost, journey))
        else:
            self._schedule(journey, passage.end_s, partial(self._come, journey, num_bytes))

    def _come(self, journey: Journey, num_bytes: int, now_s: float) -> None:
        exposed_s = now_s - journey.waits_since_s
        totals = self.totals
        totals.num_transfers += 1
        totals.num_bytes += num_bytes
        totals.exposed_s += exposed_s
        totals.network_s += now_s - journey.sent_s
        transferred = Transferred(journey.request_id, now_s, journey.held_by, num_bytes, exposed_s)
        self._observer.record(journey.target_id, [transferred])
        self.release_hold(journey, now_s)
        landing, journey.landing, journey.passage, journey.ticket = journey.landing, None, None, -1
        assert landing is not None
        replica = self._sites[journey.target_id].replica
        replica.post(lambda now_s: self._land(replica, landing, now_s), now_s)
        replica.forget(journey.request_id)
        self._arrive(journey, landing, now_s)

    @staticmethod
    def _land(replica: SimulatedReplica, landing: Landing, now_s: float) -> None:
        replica.scheduler.passage.land(landing, now_s)

    def _lost(self, journey: Journey, now_s: float) -> None:
        """The lease is over and the KV has not come: once more, or the target computes it."""
        self.totals.num_lost += 1
        journey.passage, journey.ticket = None, -1
        target_id = journey.target_id
        self._observer.record(target_id, [TransferLost(journey.request_id, now_s, journey.held_by)])
        self.leave_target(journey, now_s)
        journey.num_losses += 1
        if journey.num_losses <= self.config.max_retries:
            self.ask(journey, target_id, now_s)
            return
        self.totals.num_recomputed += 1
        self.release_hold(journey, now_s)
        journey.target_id = target_id
        self._recompute(journey, now_s)

    # -- letting go ---------------------------------------------------------------------------------------------------

    def release_hold(self, journey: Journey, now_s: float) -> None:
        """Let the source forget the KV; what is in its prefix cache stays there."""
        hold, journey.hold = journey.hold, None
        replica_id, journey.held_by = journey.held_by, NOWHERE
        if hold is None:
            return
        replica, hint = self._sites[replica_id].replica, journey.request.cache_hint
        replica.post(lambda now_s: replica.scheduler.passage.release(hold, now_s, hint=hint), now_s)
        self.room_changed(replica_id, now_s)

    def leave_target(self, journey: Journey, now_s: float, *, writes_until_s: float | None = None) -> None:
        """Give up what a journey has, or waits for, on its target.

        Args:
            writes_until_s: until when bytes may still come; nobody gets the blocks before.
        """
        self._stop(journey, now_s)
        if journey.target_id == NOWHERE:
            return
        site = self._sites[journey.target_id]
        landing, journey.landing, journey.target_id = journey.landing, None, NOWHERE
        replica = site.replica
        replica.forget(journey.request_id)
        if landing is None:
            site.inbound.remove(journey)
            return
        self.give_up(replica.replica_id, landing, journey.number, now_s, writes_until_s=writes_until_s)

    def give_up(
        self, replica_id: int, landing: Landing, number: int, now_s: float, *, writes_until_s: float | None = None
    ) -> None:
        """Release a landing between two steps of its replica, and end its quarantine when that is over.

        Args:
            number: of the journey that it was for.
            writes_until_s: as in `leave_target`.
        """
        site = self._sites[replica_id]
        replica = site.replica
        replica.post(
            lambda now_s: replica.scheduler.passage.release(landing, now_s, writes_until_s=writes_until_s), now_s
        )
        if writes_until_s is not None and writes_until_s > now_s:
            until = partial(self._end_quarantine, site, replica.incarnation)
            self._loop.schedule(writes_until_s, EventKind.TRANSFER, number, until)
        self.room_changed(replica_id, now_s)

    def _end_quarantine(self, site: _Site, incarnation: int, now_s: float) -> None:
        if site.replica.incarnation == incarnation:
            site.replica.post(site.replica.scheduler.passage.end_quarantine, now_s)
            self.room_changed(site.replica.replica_id, now_s)

    def source_lost(self, journey: Journey, now_s: float) -> None:
        """Who held a journey's KV is gone; bytes under way may still come."""
        is_under_way = journey.landing is not None
        journey.hold, journey.held_by = None, NOWHERE
        until_s = now_s + self.config.lease_s if is_under_way else None
        self.leave_target(journey, now_s, writes_until_s=until_s)

    def target_lost(self, journey: Journey, now_s: float) -> None:
        """Who was to go on with a journey is gone, and what was reserved there with it."""
        self._stop(journey, now_s)
        journey.landing, journey.target_id = None, NOWHERE

    def replica_lost(self, replica_id: int) -> None:
        """Forget who waited for room on a replica that is gone."""
        self._sites[replica_id].inbound.clear()

    def _stop(self, journey: Journey, now_s: float) -> None:
        """End a transfer under way, or the lease of a reservation."""
        self._drop_ticket(journey)
        if journey.passage is not None:
            self._network.give_up(journey.passage, now_s)
            journey.passage = None

    def _drop_ticket(self, journey: Journey) -> None:
        if journey.ticket >= 0:
            self._loop.cancel(journey.ticket)
            journey.ticket = -1
