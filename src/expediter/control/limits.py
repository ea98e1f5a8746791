"""What each tenant may use: requests and tokens per minute, and requests at one time.

A request is *reserved* before any work is done for it, with the most tokens that it may take, and *settled* when it has
ended, with those that it took. In between its tokens count as used, so that requests that come together cannot exceed
together what each of them alone would not.

A rate is a leaky bucket used as a meter: what is used rises with every reservation, and falls evenly by the limit per
minute. A tenant that was idle may have a minute's worth at once, and the limit's pace from then on; over any time since
the start it gets at most the limit's share of that time and one minute's worth. Unlike with a window that begins anew,
the time at which there will be room is known exactly. Source: ITU-T I.371, the continuous-state leaky bucket.

Several processes that share the limits each know their own part. They tell each other how much they have given out
since they started, and each counts the others' as if it had given it out itself, from when it hears of it.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from expediter.core.ranges import require_at_least

_MINUTE_S: Final = 60.0
_ROUNDING: Final = 1e-6
"""Who comes back exactly when it was told to must not fail for a bit of the last place."""
_DURATION_WEIGHT: Final = 0.1
_UNKNOWN_DURATION_S: Final = 1.0


class Limit(enum.Enum):
    """What can be exceeded."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    CONCURRENCY = "concurrency"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one tenant; None is no bound.

    Args:
        max_requests_per_minute: requests that were let in.
        max_tokens_per_minute: prompt and output tokens together, cached ones included.
        max_concurrent_requests: let in and not ended, waiting ones included.
    Raises:
        ConfigurationError: a bound is below 1.
    """

    max_requests_per_minute: int | None = None
    max_tokens_per_minute: int | None = None
    max_concurrent_requests: int | None = None

    def __post_init__(self) -> None:
        require_at_least(1, self, "max_requests_per_minute", "max_tokens_per_minute", "max_concurrent_requests")


NO_LIMITS: Final = Limits()


class Exceeded(NamedTuple):
    """Why a request was not let in.

    Attributes:
        limit: the one that takes longest.
        retry_after_s: when there is room if nobody else comes; exact for rates, expected for concurrency, infinite if
            the request alone takes more than the limit allows.
    """

    limit: Limit
    retry_after_s: float


class Usage(NamedTuple):
    """What was given out to a tenant since the start.

    Attributes:
        num_requests, num_tokens: net of what was given back; they may fall as well as rise.
        num_running: reserved and not settled, now.
    """

    num_requests: int = 0
    num_tokens: int = 0
    num_running: int = 0


NOTHING: Final = Usage()


@dataclass(slots=True, eq=False)
class _Account:
    """One tenant. `used_*` is what the meters show at `metered_s`."""

    limits: Limits
    metered_s: float
    used_requests: float = 0.0
    used_tokens: float = 0.0
    num_requests: int = 0
    num_tokens: int = 0
    running: dict[int, float] = field(default_factory=dict)  # since when, by reservation, oldest first
    next_number: int = 0
    duration_s: float | None = None
    others: Usage | None = None

    def meter(self, now_s: float) -> None:
        """Let the meters fall to now."""
        minutes = (now_s - self.metered_s) / _MINUTE_S
        if minutes <= 0:
            return
        self.metered_s = now_s
        limits = self.limits
        if limits.max_requests_per_minute is not None:
            self.used_requests = max(0.0, self.used_requests - minutes * limits.max_requests_per_minute)
        if limits.max_tokens_per_minute is not None:
            self.used_tokens = max(0.0, self.used_tokens - minutes * limits.max_tokens_per_minute)

    def charge(self, num_requests: int, num_tokens: int) -> None:
        """Count what was given out, or, if negative, what has come back."""
        limits = self.limits
        if limits.max_requests_per_minute is not None:
            self.used_requests = max(0.0, self.used_requests + num_requests)
        if limits.max_tokens_per_minute is not None:
            self.used_tokens = max(0.0, self.used_tokens + num_tokens)

    def hear(self, others: Usage) -> None:
        """Count what other processes have given out since they were last heard of.

        Nobody knows when they gave out what is heard at first: of that, as much is counted as a meter holds at most.
        """
        known, self.others = self.others, others
        if known is None:
            limits = self.limits
            first_requests = min(others.num_requests, limits.max_requests_per_minute or 0)
            self.charge(first_requests, min(others.num_tokens, limits.max_tokens_per_minute or 0))
        else:
            self.charge(others.num_requests - known.num_requests, others.num_tokens - known.num_tokens)

    def exceeded(self, num_tokens: int, now_s: float) -> Exceeded | None:
        """Return the limit that keeps a request out longest, if any does."""
        limits = self.limits
        found: Exceeded | None = None
        if limits.max_concurrent_requests is not None:
            num_running = len(self.running) + (0 if self.others is None else self.others.num_running)
            if num_running >= limits.max_concurrent_requests:
                found = Exceeded(Limit.CONCURRENCY, self._next_end_s(num_running, now_s))
        limit = limits.max_requests_per_minute
        if limit is not None and self.used_requests + 1 - limit > _ROUNDING:
            found = _longer(found, Exceeded(Limit.REQUESTS, _wait_s(self.used_requests, 1, limit)))
        limit = limits.max_tokens_per_minute
        if limit is not None and self.used_tokens + num_tokens - limit > _ROUNDING:
            found = _longer(found, Exceeded(Limit.TOKENS, _wait_s(self.used_tokens, num_tokens, limit)))
        return found

    def _next_end_s(self, num_running: int, now_s: float) -> float:
        """Return in how many seconds one of those that run ends: by Little's law, one per duration and place.

        If the oldest runs for longer than is usual, that is the better guess of how long they take.
        """
        usual_s = _UNKNOWN_DURATION_S if self.duration_s is None else self.duration_s
        oldest_s = now_s - next(iter(self.running.values()), now_s)
        return max(usual_s, oldest_s) / num_running

    def ended(self, number: int, now_s: float) -> None:
        took_s = now_s - self.running.pop(number)
        if self.duration_s is None:
            self.duration_s = took_s
        else:
            self.duration_s += _DURATION_WEIGHT * (took_s - self.duration_s)


def _wait_s(used: float, needed: int, limit: int) -> float:
    """Return in how many seconds a meter that has no room for `needed` more has it; infinity if it never will."""
    return math.inf if needed > limit else (used + needed - limit) * _MINUTE_S / limit


def _longer(one: Exceeded | None, other: Exceeded) -> Exceeded:
    """Return which of two limits keeps a request out longer; the first if both do alike."""
    return one if one is not None and one.retry_after_s >= other.retry_after_s else other


class Reservation:
    """What one request holds of its tenant's limits, until `settle` or `cancel`; further calls do nothing."""

    __slots__ = ("_account", "_num_tokens", "_number")

    def __init__(self, account: _Account, number: int, num_tokens: int) -> None:
        self._account: _Account | None = account
        self._number = number
        self._num_tokens = num_tokens

    def settle(self, num_tokens: int, now_s: float) -> None:
        """The request has ended and took so many tokens, prompt and output: more or fewer than were reserved."""
        self._end(0, num_tokens, now_s)

    def cancel(self, now_s: float) -> None:
        """The request was not served at all, and not for its tenant's fault: it does not count."""
        self._end(-1, 0, now_s)

    def _end(self, num_requests: int, num_tokens: int, now_s: float) -> None:
        account, self._account = self._account, None
        if account is None:
            return
        change = num_tokens - self._num_tokens
        account.meter(now_s)
        account.charge(num_requests, change)
        account.num_requests += num_requests
        account.num_tokens += change
        account.ended(self._number, now_s)


class TenantLimits:
    """The limits of all tenants, and what each has used.

    Args:
        limits: by tenant; who is not in it has none.
    """

    def __init__(self, limits: Mapping[str, Limits] | None = None) -> None:
        self._limits = dict(limits or {})
        self._accounts: dict[str, _Account] = {}

    def replace(self, limits: Mapping[str, Limits], now_s: float) -> None:
        """Apply other limits from now on; what is used stays used, and what is reserved stays reserved."""
        self._limits = dict(limits)
        for tenant, account in self._accounts.items():
            account.meter(now_s)
            account.limits = limits.get(tenant, NO_LIMITS)
            if account.limits.max_requests_per_minute is None:
                account.used_requests = 0.0
            if account.limits.max_tokens_per_minute is None:
                account.used_tokens = 0.0

    def reserve(self, tenant: str, num_tokens: int, now_s: float, others: Usage = NOTHING) -> Reservation | Exceeded:
        """Let a request in and count it at once, or say which limit keeps it out, in which case nothing is counted.

        Args:
            num_tokens: the most that it may take, prompt and output.
            others: sums over the other processes that share the limits. A process that starts again must go on with
                the sums of its predecessor.
        """
        account = self._account(tenant, now_s, others)
        exceeded = account.exceeded(num_tokens, now_s)
        if exceeded is not None:
            return exceeded
        account.charge(1, num_tokens)
        account.num_requests += 1
        account.num_tokens += num_tokens
        number = account.next_number
        account.next_number = number + 1
        account.running[number] = now_s
        return Reservation(account, number, num_tokens)

    def refusal(self, tenant: str, now_s: float, others: Usage = NOTHING) -> Exceeded | None:
        """Return which limit would keep any request out, whatever its size; nothing is counted."""
        return self._account(tenant, now_s, others).exceeded(1, now_s)

    def _account(self, tenant: str, now_s: float, others: Usage) -> _Account:
        """Return a tenant's account, brought up to now."""
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = _Account(self._limits.get(tenant, NO_LIMITS), now_s)
        account.meter(now_s)
        if others is not NOTHING:
            account.hear(others)
        return account

    def listen(self, others_of: Callable[[str], Usage], now_s: float) -> None:
        """Hear what other processes have given out to every tenant, whether it sends anything here or not.

        Who listens from the start on, and now and then, knows when the others' requests came.
        """
        for tenant in self._limits:
            self._account(tenant, now_s, others_of(tenant))

    def usage(self, tenant: str) -> Usage:
        """Return what this process has given out; what others have to hear."""
        account = self._accounts.get(tenant)
        if account is None:
            return NOTHING
        return Usage(account.num_requests, account.num_tokens, len(account.running))
