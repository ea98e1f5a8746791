"""Whose turn it is to have a grammar compiled, so that nobody's grammars are in the way of everybody's.

Tenants share the workers by time: who has taken least of it lately is next. One tenant never has all of them at once,
so that one is free for others whatever it sends. A tenant whose grammars take all their time, one after the other, is
turned away for a moment that doubles with each; what is known to compile is not concerned, since it is remembered.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from expediter.core.errors import CapacityError

_MEMORY_S: Final = 60.0
"""After so long without another, the time that was taken counts 1/e."""
_FREE_FAILURES: Final = 3
"""In a row; with the last of them a tenant is turned away."""
_FORGIVEN_S: Final = 600.0
"""After so long without another, failures count no more."""
_MIN_PAUSE_S: Final = 1.0
_MAX_PAUSE_S: Final = 120.0
_BUSY: Final = "too many grammars wait to be compiled"
_PAUSED: Final = "too many of your grammars took too long to compile"


@dataclass(slots=True, eq=False)
class _Share:
    """What one tenant has of the workers.

    Attributes:
        waiting: who gets one of them next, oldest first; each is told when it began.
        begun_s: when each of those began that it has now.
        taken_s: in workers' seconds, fading, as of `seen_s`; what is under way is not in it.
        num_failures: in a row, the last at `failed_s`.
    """

    waiting: deque[asyncio.Future[float]] = field(default_factory=deque)
    begun_s: list[float] = field(default_factory=list)
    taken_s: float = 0.0
    seen_s: float = 0.0
    num_failures: int = 0
    failed_s: float = 0.0
    paused_until_s: float = -math.inf

    def taken(self, now_s: float) -> float:
        """Return the time that it has taken lately, what is under way included."""
        self.taken_s *= math.exp((self.seen_s - now_s) / _MEMORY_S)
        self.seen_s = now_s
        return self.taken_s + sum(now_s - begun_s for begun_s in self.begun_s)

    def ended(self, begun_s: float, now_s: float) -> None:
        """Count a worker that it has given back."""
        self.taken(now_s)
        self.begun_s.remove(begun_s)
        self.taken_s += now_s - begun_s


class Turns:
    """The turns of all tenants.

    Args:
        num_workers: that can be had at once; a tenant has all but one of them at most, if there are several.
        max_wait_s: longest time to wait.
        now: the clock; None for that of the event loop.
    Attributes:
        max_running: of one tenant.
    """

    def __init__(self, num_workers: int, *, max_wait_s: float, now: Callable[[], float] | None = None) -> None:
        self._num_free = num_workers
        self.max_running = max(1, num_workers - 1)
        self._max_wait_s = max_wait_s
        self._now = now or (lambda: asyncio.get_running_loop().time())
        self._shares: dict[str, _Share] = {}

    def check(self, tenant: str) -> None:
        """See whether a tenant may have another grammar compiled.

        Raises:
            CapacityError: too many of them took too long.
        """
        share = self._shares.get(tenant)
        if share is None:
            return
        pause_s = share.paused_until_s - self._now()
        if pause_s > 0:
            raise CapacityError(_PAUSED, retry_after_s=pause_s)

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a turn, and have it until the block ends.

        Raises:
            CapacityError: it did not come in time, or the tenant is turned away meanwhile.
        """
        share = self._shares.setdefault(tenant, _Share())
        turn: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        share.waiting.append(turn)
        self._deal()
        try:
            async with asyncio.timeout(self._max_wait_s):
                begun_s = await turn
        except (TimeoutError, asyncio.CancelledError) as error:
            if turn.done() and not turn.cancelled() and turn.exception() is None:  # it came at that very moment
                self._give_back(share, turn.result())
            if isinstance(error, TimeoutError):
                raise CapacityError(_BUSY) from error
            raise
        finally:
            if turn in share.waiting:
                share.waiting.remove(turn)
        try:
            yield
        finally:
            self._give_back(share, begun_s)

    def ended(self, tenant: str, *, in_time: bool) -> None:
        """Hear how a grammar of a tenant went; if too many go badly, what waits is turned away, too."""
        share, now_s = self._shares.setdefault(tenant, _Share()), self._now()
        if in_time or now_s - share.failed_s > _FORGIVEN_S:
            share.num_failures = 0
        if in_time:
            return
        share.num_failures, share.failed_s = share.num_failures + 1, now_s
        num_counted = share.num_failures - _FREE_FAILURES
        if num_counted < 0:
            return
        pause_s = min(_MAX_PAUSE_S, _MIN_PAUSE_S * 2.0**num_counted)
        share.paused_until_s = now_s + pause_s
        while share.waiting:
            turn = share.waiting.popleft()
            if not turn.done():
                turn.set_exception(CapacityError(_PAUSED, retry_after_s=pause_s))

    def _give_back(self, share: _Share, begun_s: float) -> None:
        share.ended(begun_s, self._now())
        self._num_free += 1
        self._deal()

    def _deal(self) -> None:
        """Give free workers to those whose turn it is."""
        while self._num_free:
            now_s = self._now()
            able = [each for each in self._shares.values() if each.waiting and len(each.begun_s) < self.max_running]
            if not able:
                return
            share = min(able, key=lambda each: each.taken(now_s))
            turn = share.waiting.popleft()
            if not turn.done():
                turn.set_result(now_s)
                share.begun_s.append(now_s)
                self._num_free -= 1
