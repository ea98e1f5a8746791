"""Who of a fleet is well enough to get requests: outlier ejection with a cap, half-open probing, and panic.

A replica is judged by the requests that it was sent. One that refuses a connection or makes no progress is ejected at
once, one that fails otherwise after some failures in a row or too large a share of them. It stays away for a moment
that doubles each time, and is then asked by a probe. If nobody had listened, an answer brings it back; otherwise it is
half open, and with the first answer to a live request it is back. Nobody is ever taken out because of what a client did
wrong.

Either way the next request that it could serve goes there on trial (`control/trials.py`).

Ejection must not make things worse: when more than a share of a fleet would be out, the verdicts are more likely to be
wrong than the replicas, or the rest would break under all the load. Those who answer, if badly, are then used as if
nothing had happened (panic). If nobody is up, everybody is tried: a door that stays shut for longer than the trouble
behind it lasts is worse than a failed attempt.

Source: Envoy's outlier detection and panic threshold; the circuit breaker's half-open state (Nygard, Release It!).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from expediter.control.trials import Trials
from expediter.core.errors import ConfigurationError
from expediter.core.ranges import require_above_zero, require_at_least, require_not_negative, require_share


class Failure(enum.Enum):
    """How a replica failed a request. A 4xx is none: the replica did its work."""

    CONNECT = "connect"
    """No connection: refused, unreachable, or not in time."""
    STATUS_5XX = "status_5xx"
    TIMEOUT = "timeout"
    """No progress for too long."""
    BROKEN = "broken"
    """The connection ended before the response, or what came was no HTTP."""


class HealthState(enum.Enum):
    """What is thought of a replica."""

    UP = "up"
    EJECTED = "ejected"
    PROBING = "probing"
    """Half open or in doubt: a probe or one live request will tell."""


_AT_ONCE: Final = frozenset({Failure.CONNECT, Failure.TIMEOUT})
_FADE_SHARE: Final = 0.01
"""Of the window, in which successes need not fade one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthConfig:
    """When a replica is ejected, for how long, and how many may be.

    Args:
        max_failures_in_a_row: this many eject; a refused connection or a timeout ejects alone.
        max_failed_share: of the requests of about `window_s`, if there were `min_requests`; more eject.
        min_ejection_s, max_ejection_s: the first ejection, and the longest; each one in a row is twice as long.
        jitter: by what share an ejection may be shorter, drawn at random: not everybody is probed at once.
        stable_s: after being up so long, an ejection is the first in a row again.
        max_ejected_share: of those who could serve a request; if more would be out, all who can be reached are used.
        idle_probe_s: one of whom nothing was heard for so long is probed.
        max_trial_share: of the requests, on trial, once some trials have gone badly.
        max_trial_wait_s: for so long a trial waits for a request that can be tried again elsewhere; then any will do.
    Raises:
        ConfigurationError: a number is out of range.
    """

    max_failures_in_a_row: int = 3
    max_failed_share: float = 0.5
    window_s: float = 10.0
    min_requests: float = 10.0
    min_ejection_s: float = 0.25
    max_ejection_s: float = 4.0
    jitter: float = 0.25
    stable_s: float = 30.0
    max_ejected_share: float = 0.75
    idle_probe_s: float = 5.0
    max_trial_share: float = 0.25
    max_trial_wait_s: float = 2.0

    def __post_init__(self) -> None:
        require_at_least(1, self, "max_failures_in_a_row")
        require_share(self, "max_failed_share", "jitter", "max_ejected_share", "max_trial_share")
        require_above_zero(
            self, "window_s", "min_requests", "min_ejection_s", "stable_s", "idle_probe_s", "max_trial_share"
        )
        require_not_negative(self, "max_trial_wait_s")
        if not self.min_ejection_s <= self.max_ejection_s < math.inf:
            raise ConfigurationError(f"max_ejection_s must be at least min_ejection_s, not {self.max_ejection_s}")


@dataclass(slots=True, eq=False)
class _Member:
    """One replica.

    Attributes:
        until_s: while ejected, when it is probed.
        is_asked: a probe is under way.
        is_doubted: it is only silent, and a probe shall ask why.
        is_cleared: half open, the probe went well, and a live request may try.
        cleared_s: when a probe last said that a live request may try.
        is_tried: a live request tries.
        is_unreachable: what it was ejected for is that nobody listens.
        num_ok, num_failed: requests, fading with the window.
    """

    heard_s: float
    up_since_s: float
    faded_s: float
    state: HealthState = HealthState.UP
    until_s: float = 0.0
    is_asked: bool = False
    is_doubted: bool = False
    is_cleared: bool = False
    cleared_s: float = 0.0
    is_tried: bool = False
    is_unreachable: bool = False
    num_ejections: int = 0
    num_failures_in_a_row: int = 0
    num_ok: float = 0.0
    num_failed: float = 0.0


class FleetHealth:
    """What is thought of each replica of a fleet. What is told of one that is not in it changes nothing.

    Args:
        rng: draws jitter; nobody else uses it.
    Attributes:
        num_out: replicas that are not up.
        generation: rises whenever `usable` may answer something else than before.
    """

    def __init__(self, config: HealthConfig, rng: np.random.Generator) -> None:
        self._config = config
        self._rng = rng
        self._members: dict[int, _Member] = {}
        self._trials = Trials()
        self.num_out = 0
        self.generation = 0

    @property
    def is_calm(self) -> bool:
        """Whether everybody is up, and nobody waits for a request on trial: good news change nothing."""
        return not self.num_out and not self._trials

    @property
    def awaits_trials(self) -> bool:
        """Whether somebody waits for a request on trial."""
        return bool(self._trials)

    def configure(self, config: HealthConfig) -> None:
        """Judge by other rules from now on; what was thought of each stays."""
        self._config = config
        self.generation += 1

    # ---- who is in it

    def join(self, replica_id: int, now_s: float) -> None:
        """Take a replica to be up; one that is in the fleet already begins anew."""
        self.leave(replica_id)
        self._members[replica_id] = _Member(now_s, now_s, now_s)
        self.generation += 1

    def leave(self, replica_id: int) -> None:
        """Forget a replica."""
        member = self._members.pop(replica_id, None)
        self._trials.called_off(replica_id)
        self.generation += 1
        if member is not None and member.state is not HealthState.UP:
            self.num_out -= 1

    def state(self, replica_id: int) -> HealthState:
        """Return what is thought of a replica; one that is not in the fleet is ejected."""
        member = self._members.get(replica_id)
        return HealthState.EJECTED if member is None else member.state

    def serves(self, replica_id: int) -> bool:
        """Return whether a replica is up, or only doubted: nothing has been held against it."""
        member = self._members.get(replica_id)
        return member is not None and (member.state is HealthState.UP or member.is_doubted)

    # ---- what is heard of them

    def back_in_s(self, replica_id: int, now_s: float) -> float:
        """Return in how many seconds a replica that is out may be back at the earliest; 0 if it is not out."""
        member = self._members.get(replica_id)
        return 0.0 if member is None or member.state is HealthState.UP else max(0.0, member.until_s - now_s)

    def began(self, replica_id: int) -> bool:
        """Hear that a request was sent to a replica while somebody is out or awaits a trial.

        Returns:
            Whether it is the one that tries if the replica is well again. `succeeded`, `failed` or, for such a one,
            `abandoned` follows.
        """
        if not self._trials.began(replica_id, self._config.max_trial_share):
            return False
        self._members[replica_id].is_tried = True
        return True

    def answered(self, replica_id: int, now_s: float) -> None:
        """Hear the first byte of a response below 500: the replica is back, if it was away."""
        member = self._members.get(replica_id)
        if member is None:
            return
        member.heard_s = max(member.heard_s, now_s)
        member.is_asked = False  # whatever a probe says after this, it is older news
        if member.is_tried:
            member.is_tried = False
            self._trials.cost_nothing()
        if member.state is not HealthState.UP:
            self._bring_back(replica_id, member, now_s)

    def succeeded(self, replica_id: int, now_s: float) -> None:
        """Hear that a request was answered to its end, with whatever status below 500."""
        member = self._members.get(replica_id)
        if member is None:
            return
        if member.is_asked or member.is_tried or member.state is not HealthState.UP:
            self.answered(replica_id, now_s)
        member.heard_s = max(member.heard_s, now_s)
        if now_s > member.faded_s + _FADE_SHARE * self._config.window_s:
            self._fade(member, now_s)
        member.num_ok += 1
        member.num_failures_in_a_row = 0

    def failed(self, replica_id: int, failure: Failure, now_s: float, *, is_trial: bool = False) -> bool:
        """Hear that a request failed; return whether that ends the replica's service now.

        Args:
            is_trial: as `began` said.
        """
        member = self._members.get(replica_id)
        if member is None:
            return False
        member.heard_s = max(member.heard_s, now_s)
        if member.state is not HealthState.UP and not member.is_doubted:
            # The others were sent there before it was ejected, or in panic: nothing new.
            if is_trial:
                self._eject(replica_id, member, failure, now_s)
            return False
        if is_trial:
            member.is_tried = False
        self._fade(member, now_s)
        member.num_failed += 1
        member.num_failures_in_a_row += 1
        if failure in _AT_ONCE or self._is_outlier(member):
            self._eject(replica_id, member, failure, now_s)
            return True
        return False

    def abandoned(self, replica_id: int) -> None:
        """Hear that the request that tried was given up for reasons that say nothing about the replica."""
        member = self._members.get(replica_id)
        if member is not None and member.is_tried:
            member.is_tried = False
            self._trials.awaited(replica_id, member.cleared_s)
            self._trials.cost_nothing()

    # ---- probes

    def doubt(self, replica_id: int, now_s: float) -> None:
        """Say that a replica is suspiciously silent: others are preferred until a probe, due now, has asked it."""
        member = self._members.get(replica_id)
        if member is not None and member.state is HealthState.UP:
            member.state = HealthState.PROBING
            member.is_doubted = True
            member.until_s = now_s
            self.num_out += 1
            self.generation += 1
            self._trials.called_off(replica_id)

    def due_probes(self, now_s: float) -> list[int]:
        """Return who is to be probed; from now on they count as asked, and `probed` must say what came of it."""
        due = [replica_id for replica_id, member in self._members.items() if self._is_due(member, now_s)]
        for replica_id in due:
            member = self._members[replica_id]
            member.is_asked = True
            if member.state is HealthState.EJECTED:
                member.state = HealthState.PROBING
        return due

    def probed(self, replica_id: int, failure: Failure | None, now_s: float) -> bool:
        """Hear how a probe went, None if well; return whether it ends the replica's service now."""
        member = self._members.get(replica_id)
        if member is None or not member.is_asked:
            return False
        member.is_asked = False
        member.heard_s = max(member.heard_s, now_s)
        if failure is not None:
            was_serving = member.state is HealthState.UP or member.is_doubted
            self._eject(replica_id, member, failure, now_s)
            return was_serving
        if member.is_doubted:
            member.is_doubted = False
            member.state = HealthState.UP
            self.num_out -= 1
            self.generation += 1
        elif member.state is not HealthState.UP:
            # That it listens again a probe can tell; that it works again, only a request.
            if member.is_unreachable:
                self._bring_back(replica_id, member, now_s)
            else:
                member.is_cleared = True
            member.cleared_s = now_s
            self._trials.awaited(replica_id, now_s)
        return False

    # ---- who gets requests

    def on_trial(self, replica_ids: Container[int], now_s: float, *, can_retry: bool) -> int | None:
        """Return who must get a request on trial, of those that could serve it; None if a router may choose.

        Args:
            can_retry: whether the request can be tried again elsewhere if it fails.
        """
        return self._trials.due(replica_ids, now_s if can_retry else now_s - self._config.max_trial_wait_s)

    def usable(self, replica_ids: Sequence[int]) -> Sequence[int]:
        """Return who of those that could serve a request may get it; never nobody, if there is anybody.

        Cost: none while all are up.
        """
        if not self.num_out:
            return replica_ids
        members = [(each, self._members[each]) for each in replica_ids]
        up = [each for each, member in members if member.state is HealthState.UP]
        reached = [each for each, member in members if member.state is not HealthState.UP and not member.is_unreachable]
        if not up:
            return reached or replica_ids
        if reached and len(members) - len(up) > self._config.max_ejected_share * len(members):
            return up + reached
        return up

    # ---- moves

    def _is_due(self, member: _Member, now_s: float) -> bool:
        if member.is_asked or member.is_cleared:
            return False
        if member.state is HealthState.UP:
            return now_s >= member.heard_s + self._config.idle_probe_s
        return now_s >= member.until_s

    def _is_outlier(self, member: _Member) -> bool:
        config, num_requests = self._config, member.num_ok + member.num_failed
        if member.num_failures_in_a_row >= config.max_failures_in_a_row:
            return True
        return num_requests >= config.min_requests and member.num_failed > config.max_failed_share * num_requests

    def _eject(self, replica_id: int, member: _Member, failure: Failure, now_s: float) -> None:
        config = self._config
        was_serving = member.state is HealthState.UP or member.is_doubted
        self.generation += 1
        if member.state is HealthState.UP:
            self.num_out += 1
        if was_serving and now_s >= member.up_since_s + config.stable_s:
            member.num_ejections = 0
        length_s = min(config.max_ejection_s, config.min_ejection_s * 2.0 ** min(member.num_ejections, 32))
        member.num_ejections += 1
        member.until_s = now_s + length_s * (1 - config.jitter * float(self._rng.random()))
        member.state = HealthState.EJECTED
        member.is_unreachable = failure is Failure.CONNECT
        member.is_doubted = member.is_cleared = member.is_tried = False
        self._trials.called_off(replica_id)

    def _bring_back(self, replica_id: int, member: _Member, now_s: float) -> None:
        self.num_out -= 1
        self.generation += 1
        member.state = HealthState.UP
        member.up_since_s = now_s
        member.is_doubted = member.is_cleared = member.is_tried = member.is_unreachable = False
        member.num_failures_in_a_row = 0
        member.num_ok = member.num_failed = 0.0
        self._trials.called_off(replica_id)

    def _fade(self, member: _Member, now_s: float) -> None:
        elapsed_s = now_s - member.faded_s
        if elapsed_s > 0:
            kept = math.exp(-elapsed_s / self._config.window_s)
            member.num_ok *= kept
            member.num_failed *= kept
            member.faded_s = now_s
