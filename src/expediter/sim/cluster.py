"""A virtual cluster: replicas behind a router, fed with requests at their arrival times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from expediter.control.fleet import Fleet
from expediter.control.routing.base import Placement, RouteQuery, Router
from expediter.core.errors import ConfigurationError
from expediter.core.request import Request
from expediter.sim.failures import Failures
from expediter.sim.journeys import Journeys
from expediter.sim.loop import EventKind, EventLoop
from expediter.sim.observer import Observer
from expediter.sim.replica import SimulatedReplica

_PROGRESS_EVERY = 64


class Cluster:
    """Routes each request when it arrives and runs until all work is done.

    Only the next request exists ahead of its arrival, so a long trace takes no more memory than what is in flight.

    Args:
        journeys: drives requests that may need more than one replica; None if each stays where it was sent.
        failures: lets replicas fail; needs `journeys`.
    Attributes:
        fleet: the replicas as the router sees them.
    """

    def __init__(
        self,
        replicas: Sequence[SimulatedReplica],
        router: Router,
        loop: EventLoop,
        observer: Observer,
        journeys: Journeys | None = None,
        failures: Failures | None = None,
    ) -> None:
        self._replicas = {replica.replica_id: replica for replica in replicas}
        self._router = router
        self._loop = loop
        self._observer = observer
        self._pending: Iterator[Sequence[Request]] = iter(())
        self._next: Sequence[Request] | None = None
        self._num_arrived = 0
        self.fleet = Fleet()
        for replica in replicas:
            self.fleet.join(replica.replica_id, replica.snapshot, replica.profile)
            replica.on_load_change = partial(self.fleet.mark, replica.replica_id)
        self._progress: Callable[[int], None] | None = None
        self._journeys = journeys
        self._failures = failures
        if journeys is not None:
            journeys.enter(self._replicas, self.fleet, router)

    @property
    def num_steps(self) -> int:
        """Steps of all replicas together."""
        return sum(replica.num_steps for replica in self._replicas.values())

    def run(self, groups: Iterable[Sequence[Request]], progress: Callable[[int], None] | None = None) -> None:
        """Serve the requests to their ends.

        Args:
            groups: requests as `Scheduler.add_group` takes them, each with its sequences, in order of `arrival_s`, from
                0 s on.
            progress: told the number of arrivals from time to time.
        Raises:
            ConfigurationError: the requests are not in order of arrival.
        """
        self._pending = iter(groups)
        self._progress = progress
        self._expect_next()
        if self._journeys is not None:
            self._journeys.begin()
        if self._failures is not None and self._journeys is not None:
            self._failures.begin(self._replicas, self._journeys, lambda: self._next is not None)
        self._loop.run()
        if self._journeys is not None:
            self._journeys.finish()
        if progress is not None:
            progress(self._num_arrived)

    def _expect_next(self) -> None:
        self._next = next(self._pending, None)
        if self._next is None:
            return
        first = self._next[0]
        if first.arrival_s < self._loop.now_s:
            raise ConfigurationError(f"request {first.request_id} arrives before the one ahead of it")
        self._loop.schedule(first.arrival_s, EventKind.ARRIVAL, self._num_arrived, self._arrive)

    def _arrive(self, now_s: float) -> None:
        group = self._next
        assert group is not None
        self._num_arrived += 1
        decision = self._router.route(RouteQuery.of(group, now_s), self.fleet)
        if self._journeys is not None:
            self._journeys.arrive(group, decision, now_s)
        else:
            for request in group:
                self._observer.arrived(request, decision, now_s)
            if isinstance(decision, Placement):
                self._replicas[decision.replica_id].receive(group, now_s, num_expected_hits=decision.num_cached_tokens)
                self.fleet.dispatched(decision.replica_id)
        if self._progress is not None and self._num_arrived % _PROGRESS_EVERY == 0:
            self._progress(self._num_arrived)
        self._expect_next()
