"""Who serves one model, who of them may get a request now, and the router that chooses among those."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Final

from expediter.control.fleet import Fleet
from expediter.control.health import FleetHealth
from expediter.control.routing.base import Placement, RouteQuery, Router
from expediter.core.request import Request
from expediter.gateway.backends.backend import Backend

_ON_TRIAL: Final = "it was out, and this request tries whether it is well again"


class ModelFleet:
    """The backends that serve a model. One that serves several is in several fleets, with one load and one slot.

    Who may get a request is kept ready, and worked out anew only after something has changed that it depends on.

    Args:
        health: of all backends.
    Attributes:
        members: by number.
        is_stale: who may get a request has changed, or may have.
    """

    def __init__(self, router: Router, health: FleetHealth) -> None:
        self.fleet = Fleet()
        self.members: dict[int, Backend] = {}
        self.is_stale = True
        self._router = router
        self._health = health
        self._seen_health = health.generation
        self._has_own = False

    def join(self, backend: Backend) -> None:
        """Take in a backend."""
        self.fleet.join(backend.replica_id, backend.snapshot, backend.profile, backend.slot)
        self.members[backend.replica_id] = backend
        self._changed()

    def leave(self, backend: Backend) -> None:
        """Let go of a backend."""
        self.fleet.leave(backend.replica_id)
        del self.members[backend.replica_id]
        self._changed()

    # ---- who gets a request

    def route(self, request: Request, now_s: float, excluded: Container[int] = ()) -> Placement | None:
        """Return who gets a request; None if nobody can take it now."""
        # An own pool says itself whether it takes requests, whenever it is asked.
        if self.is_stale or excluded or self._has_own or self._seen_health != self._health.generation:
            usable, members = self._usable(), self.members
            self._let_in({each for each in usable if members[each].has_room and each not in excluded})
            self.is_stale = bool(excluded)
            self._seen_health = self._health.generation
        decision = self._router.route(RouteQuery(request, now_s), self.fleet)
        return decision if isinstance(decision, Placement) else None

    def on_trial(self, request: Request, now_s: float, *, can_retry: bool) -> Placement | None:
        """Return who gets a request on trial, for it has been out; None if nobody has to.

        Args:
            can_retry: whether the request can be tried again elsewhere.
        """
        fit = [replica_id for replica_id, each in self.members.items() if each.takes_requests and each.has_room]
        tried_id = self._health.on_trial(fit, now_s, can_retry=can_retry)
        if tried_id is None:
            return None
        self._let_in((tried_id,))
        self.is_stale = True
        # Its session stays where it is at home.
        decision = self._router.route(RouteQuery(replace(request, session=""), now_s), self.fleet)
        return decision._replace(because=_ON_TRIAL) if isinstance(decision, Placement) else None

    def is_full(self, excluded: Container[int]) -> bool:
        """Return whether somebody who could take a request lacks only room."""
        return any(each not in excluded and not self.members[each].has_room for each in self._usable())

    def _usable(self) -> Sequence[int]:
        """Return who is well and takes requests, room or not."""
        return self._health.usable([replica_id for replica_id, each in self.members.items() if each.takes_requests])

    def _let_in(self, replica_ids: Container[int]) -> None:
        for replica_id in self.members:
            if replica_id in replica_ids:
                self.fleet.resume(replica_id)
            else:
                self.fleet.pause(replica_id)

    def _changed(self) -> None:
        self.is_stale = True
        self._has_own = any(member.is_own for member in self.members.values())
