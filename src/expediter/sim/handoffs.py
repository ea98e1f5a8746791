"""Who goes on with a request whose prompt is done, and its way there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from expediter.control.fleet import Fleet
from expediter.control.handoff import TransferStyle, has_second_leg
from expediter.control.routing.base import Placement, Refusal, RouteQuery, Router
from expediter.core.errors import InvariantError
from expediter.core.events import RejectReason
from expediter.core.request import Request
from expediter.kvcache.landing import Landing
from expediter.sim.journey import NOWHERE, Journey
from expediter.sim.loop import EventLoop
from expediter.sim.network import Network
from expediter.sim.observer import Observer
from expediter.sim.replica import SimulatedReplica
from expediter.sim.transfers import TransferConfig, Transfers


class Handoffs:
    """Finds targets for journeys whose KV is held, and sends them there.

    Args:
        resume: called when a journey goes on at the replica that it names now, with its landing there if it has one.
        reject: called when it cannot go on, with why.
        loses: whether the next transfer is lost; asked once for each, in order.
        can_fail: replicas may go and come back: a journey that finds no target is stranded until one is up.
    Attributes:
        transfers: of the KV.
    """

    def __init__(
        self,
        loop: EventLoop,
        network: Network,
        observer: Observer,
        config: TransferConfig,
        *,
        resume: Callable[[Journey, Landing | None, float], None],
        reject: Callable[[Journey, Refusal, float], None],
        loses: Callable[[], bool],
        can_fail: bool,
    ) -> None:
        self.transfers = Transfers(
            loop,
            network,
            observer,
            config,
            arrive=self._go_on,
            recompute=lambda journey, now_s: self._go_on(journey, None, now_s),
            turn_back=self._turn_back,
            loses=loses,
        )
        self._resume = resume
        self._reject = reject
        self._can_fail = can_fail
        self._stranded: list[Journey] = []
        self._replicas: Mapping[int, SimulatedReplica] = {}
        self._seconds: list[SimulatedReplica] = []

    def enter(self, replicas: Mapping[int, SimulatedReplica], fleet: Fleet, router: Router) -> None:
        """Take the replicas over; called once."""
        self._replicas, self._fleet, self._router = replicas, fleet, router
        if any(replica.role == "prefill" for replica in replicas.values()):
            self._seconds = [replica for replica in replicas.values() if replica.role != "prefill"]
        self.transfers.enter(replicas)

    def refusal(self, group: Sequence[Request]) -> tuple[RejectReason, str] | None:
        """Return why no replica could finish a new request, or None; where prompts stay, the replica says so itself."""
        refusal = None
        if self._seconds and has_second_leg(group[0], None):
            for replica in self._seconds:
                refusal = replica.scheduler.refusal(group[:1])
                if refusal is None:
                    break
        return refusal

    # -- the target ---------------------------------------------------------------------------------------------------

    def reserve_ahead(self, journey: Journey, now_s: float) -> None:
        """Ask for room while the prompt is computed, if transfers are of a style that does."""
        if not self.transfers.config.style.reserves_ahead:
            return
        target_id = journey.chosen_id
        if target_id not in self._fleet:
            found = self._router.hand_off(RouteQuery(journey.request, now_s), self._fleet)
            target_id = found.replica_id if isinstance(found, Placement) else NOWHERE
        if target_id != NOWHERE:
            self._ask(journey, target_id, now_s)

    def leave_prompt(self, journey: Journey, now_s: float) -> None:
        """The prompt is done and its first token is out: the KV goes to the target."""
        departure = self._replicas[journey.replica_id].scheduler.passage.collect(journey.request_id)
        if departure is None:
            raise InvariantError(f"the KV of {journey.request_id} was not kept")
        journey.carried, journey.hold = departure.carried, departure.landing
        journey.held_by, journey.replica_id = journey.replica_id, NOWHERE
        journey.waits_since_s, journey.num_losses, journey.turns_back = now_s, 0, False
        if journey.landing is not None:
            is_layerwise = self.transfers.config.style is TransferStyle.LAYERWISE
            self.transfers.start(journey, now_s, layers_since_s=journey.prompt_began_s if is_layerwise else None)
        elif journey.target_id == NOWHERE:
            self.choose_target(journey, now_s)

    def choose_target(self, journey: Journey, now_s: float) -> None:
        """Ask who goes on with a request whose KV is held, if that is open; refused, that is its end."""
        chosen_id, journey.chosen_id = journey.chosen_id, NOWHERE
        if chosen_id in self._fleet:
            self._ask(journey, chosen_id, now_s)
            return
        decision = self._router.hand_off(RouteQuery(journey.request, now_s), self._fleet)
        if isinstance(decision, Placement):
            self._ask(journey, decision.replica_id, now_s)
        elif decision.reason is RejectReason.NO_REPLICA and self._can_fail:
            self._stranded.append(journey)
        else:
            self._reject(journey, decision, now_s)

    def _ask(self, journey: Journey, target_id: int, now_s: float) -> None:
        if target_id == journey.held_by:
            self._turn_back(journey, now_s)
            return
        self.transfers.ask(journey, target_id, now_s)
        self._fleet.dispatched(target_id)

    # -- going on -----------------------------------------------------------------------------------------------------

    def _turn_back(self, journey: Journey, now_s: float) -> None:
        """It goes on where its KV is; nothing is sent."""
        if journey.hold is None:
            return  # it was lost in the same moment
        hold, journey.hold, journey.turns_back = journey.hold, None, False
        journey.replica_id, journey.held_by, journey.hands_off = journey.held_by, NOWHERE, False
        self._resume(journey, hold, now_s)

    def _go_on(self, journey: Journey, landing: Landing | None, now_s: float) -> None:
        """It goes on at the target after the step in progress, which computes the KV that did not come."""
        journey.replica_id, journey.target_id, journey.hands_off = journey.target_id, NOWHERE, False
        self._resume(journey, landing, now_s)

    # -- who has no target --------------------------------------------------------------------------------------------

    def take_stranded(self) -> list[Journey]:
        """Return the journeys that wait for a replica that can go on with them, in order; they do not any more."""
        stranded, self._stranded = self._stranded, []
        return stranded

    def holder_lost(self) -> None:
        """Forget the stranded whose KV is gone."""
        self._stranded = [journey for journey in self._stranded if journey.hold is not None]
