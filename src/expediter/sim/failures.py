"""Replicas that crash and come back or run slowly, and transfers that never come: on a schedule, or at random."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from expediter.core.errors import ConfigurationError
from expediter.core.events import ReplicaDown, ReplicaUp
from expediter.core.ranges import require_above_zero, require_share
from expediter.sim.journeys import Journeys
from expediter.sim.loop import EventKind, EventLoop
from expediter.sim.observer import Observer
from expediter.sim.replica import SimulatedReplica


def _check(value: float, name: str, least: float) -> None:
    if not least <= value < math.inf:
        raise ConfigurationError(f"{name} must be a number from {least:g}, not {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """A replica is lost.

    Args:
        replica: its number.
        at_s: when.
        down_s: until it serves again; None for a cold start, infinity for never.
    """

    replica: int
    at_s: float
    down_s: float | None = None

    def __post_init__(self) -> None:
        _check(self.at_s, "a crash's time", 0.0)
        if self.down_s is not None and not self.down_s > 0:
            raise ConfigurationError(f"a crashed replica must be down for more than 0 s, not {self.down_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """A replica's steps take `factor` times as long for a while."""

    replica: int
    at_s: float
    for_s: float
    factor: float = 3.0

    def __post_init__(self) -> None:
        _check(self.at_s, "a slowdown's time", 0.0)
        _check(self.for_s, "a slowdown's length", 0.0)
        _check(self.factor, "a slowdown's factor", 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureConfig:
    """What goes wrong.

    Random failures come as a Poisson process per replica, as long as requests arrive: then every run ends.

    Args:
        crashes, slowdowns: on a schedule. One that finds its replica down is none.
        crash_every_s, slow_every_s: mean time between those that come at random, per replica; None for none.
        down_s: how long a random crash lasts; None for a cold start.
        slow_for_s, slow_factor: of random slowdowns.
        lose_transfers: share of the transfers that never come.
        seed: of all that is random here.
    Raises:
        ConfigurationError: a figure is out of range.
    """

    crashes: tuple[Crash, ...] = ()
    slowdowns: tuple[Slowdown, ...] = ()
    crash_every_s: float | None = None
    slow_every_s: float | None = None
    down_s: float | None = None
    slow_for_s: float = 10.0
    slow_factor: float = 3.0
    lose_transfers: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        require_above_zero(self, "crash_every_s", "slow_every_s")
        for name in ("down_s", "slow_for_s"):  # for ever is a time, too
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigurationError(f"{name} must be above 0, not {value}")
        _check(self.slow_factor, "slow_factor", 1.0)
        require_share(self, "lose_transfers")

    @property
    def is_empty(self) -> bool:
        """Whether nothing goes wrong."""
        random = self.crash_every_s is not None or self.slow_every_s is not None or self.lose_transfers > 0
        return not (self.crashes or self.slowdowns or random)

    def check(self, num_replicas: int) -> None:
        """Verify that the replicas exist.

        Raises:
            ConfigurationError: one does not.
        """
        named = [crash.replica for crash in self.crashes] + [slowdown.replica for slowdown in self.slowdowns]
        for replica in named:
            if not 0 <= replica < num_replicas:
                raise ConfigurationError(
                    f"there is no replica {replica} to fail; they are numbered 0 to {num_replicas - 1}"
                )


NO_FAILURES: Final = FailureConfig()


@dataclass(slots=True)
class FailureTotals:
    """What went wrong while there was work.

    Attributes:
        down_s: replica-seconds without service, up to the last event of a request.
        num_interrupted: times that a request lost its replica or its KV and went on elsewhere.
    """

    num_crashes: int = 0
    num_slowdowns: int = 0
    num_interrupted: int = 0
    down_s: float = 0.0


class Failures:
    """Lets replicas fail in virtual time.

    Args:
        cold_start_s: by replica.
    Attributes:
        totals: what went wrong.
    """

    def __init__(
        self, config: FailureConfig, loop: EventLoop, observer: Observer, cold_start_s: Mapping[int, float]
    ) -> None:
        self.totals = FailureTotals()
        self._config = config
        self._loop = loop
        self._observer = observer
        self._cold_start_s = cold_start_s
        self._loss_rng = np.random.default_rng((config.seed, 0))
        self._rngs = {replica: np.random.default_rng((config.seed, 1, replica)) for replica in cold_start_s}
        self._down_since_s: dict[int, float] = {}
        self._outages: list[tuple[float, float]] = []
        self._num_slow: dict[int, int] = dict.fromkeys(cold_start_s, 0)

    def loses(self) -> bool:
        """Return whether the next transfer is lost."""
        share = self._config.lose_transfers
        return share > 0 and float(self._loss_rng.random()) < share

    def begin(
        self, replicas: Mapping[int, SimulatedReplica], journeys: Journeys, is_arriving: Callable[[], bool]
    ) -> None:
        """Schedule what goes wrong; called once, before the first arrival.

        Args:
            is_arriving: whether more requests will come.
        """
        self._replicas, self._journeys, self._is_arriving = replicas, journeys, is_arriving
        config = self._config
        for crash in config.crashes:
            self._at(crash.at_s, crash.replica, partial(self._crash, crash.replica, crash.down_s))
        for slow in config.slowdowns:
            self._at(slow.at_s, slow.replica, partial(self._slow, slow.replica, slow.for_s, slow.factor))
        for replica in replicas:
            if config.crash_every_s is not None:
                self._draw(replica, config.crash_every_s, partial(self._crash, replica, config.down_s))
            if config.slow_every_s is not None:
                slow_down = partial(self._slow, replica, config.slow_for_s, config.slow_factor)
                self._draw(replica, config.slow_every_s, slow_down)

    def _at(self, time_s: float, replica: int, action: Callable[[float], None]) -> None:
        if time_s < math.inf:
            self._loop.schedule(time_s, EventKind.FAILURE, replica, action)

    def _draw(self, replica: int, every_s: float, fail: Callable[[float], None]) -> None:
        """Schedule the next random failure of a replica, and the one after it then."""
        time_s = self._loop.now_s + float(self._rngs[replica].exponential(every_s))

        def happen(now_s: float) -> None:
            if self._is_arriving():
                fail(now_s)
                self._draw(replica, every_s, fail)

        self._at(time_s, replica, happen)

    @property
    def _matters(self) -> bool:
        """Whether there is, or will be, a request that a failure could concern."""
        return self._is_arriving() or self._journeys.num_live > 0

    def _crash(self, replica: int, down_s: float | None, now_s: float) -> None:
        if replica in self._down_since_s:
            return
        until_s = now_s + (self._cold_start_s[replica] if down_s is None else down_s)
        self._down_since_s[replica] = now_s
        if self._matters:
            self.totals.num_crashes += 1
            self._observer.record(replica, [ReplicaDown(now_s, until_s)])
        self.totals.num_interrupted += self._journeys.lose(replica, now_s)
        self._at(until_s, replica, partial(self._return, replica))

    def _return(self, replica: int, now_s: float) -> None:
        self._outages.append((self._down_since_s.pop(replica), now_s))
        if self._matters:
            self._observer.record(replica, [ReplicaUp(now_s)])
        self._journeys.take_back(replica, now_s)

    def _slow(self, replica: int, for_s: float, factor: float, now_s: float) -> None:
        if replica in self._down_since_s:
            return
        self.totals.num_slowdowns += self._matters
        self._num_slow[replica] += 1
        self._replicas[replica].slow_down(factor, now_s)
        self._at(now_s + for_s, replica, partial(self._end_slow, replica))

    def _end_slow(self, replica: int, now_s: float) -> None:
        self._num_slow[replica] -= 1
        if not self._num_slow[replica]:
            self._replicas[replica].slow_down(1.0, now_s)

    def finish(self, end_s: float) -> None:
        """Count the time that replicas were down until the last event of a request."""
        outages = [*self._outages, *((since_s, end_s) for since_s in self._down_since_s.values())]
        self.totals.down_s = sum(max(0.0, min(until_s, end_s) - since_s) for since_s, until_s in outages)
