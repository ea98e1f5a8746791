"""Looks after the backends while the server runs: finds out what they serve, reads their metrics, probes them.

Nothing here is needed for a request to go through. If metrics are late, they are ignored; if a backend cannot be asked,
what it was sent tells how it is.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

from expediter.control.health import Failure
from expediter.control.patience import Suspicion
from expediter.core.errors import ReplicaError
from expediter.core.ports import Clock
from expediter.core.ranges import require_above_zero
from expediter.gateway.backends.asking import Asker
from expediter.gateway.backends.backend import Backend, Kind, Reported
from expediter.gateway.backends.registry import Backends

logger = logging.getLogger(__name__)

_UNREACHED: Final = (aiohttp.ClientError, OSError, TimeoutError, ReplicaError)
_NUM_AGREEING: Final = 3
"""Pages of metrics in a row that must show requests of others: in one alone they may be ours, just ended or begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchConfig:
    """How often backends are looked at, in seconds.

    Args:
        tick_s: between two looks at what we know ourselves.
        scrape_s: between two pages of metrics; older ones than `stale_s` do not count.
        discover_s: between two questions what it serves; `retry_s` while that is not known.
        silent_s: without a byte from a backend that has requests, before a probe asks why.
    Raises:
        ConfigurationError: a time is not above 0.
    """

    tick_s: float = 0.1
    scrape_s: float = 1.0
    stale_s: float = 5.0
    discover_s: float = 10.0
    retry_s: float = 1.0
    silent_s: float = 1.0

    def __post_init__(self) -> None:
        require_above_zero(self, "tick_s", "scrape_s", "stale_s", "discover_s", "retry_s", "silent_s")


@dataclass(slots=True, eq=False)
class _Watched:
    """One backend, as it is looked after.

    Attributes:
        is_asked: whether it has been asked what it serves, in vain or not.
        others: requests of others that its last pages of metrics showed.
        work: what the last of them that said so said it had computed.
        is_complained_of: it was written down that it does not answer.
        is_subscribed: its KV events are followed.
    """

    asker: Asker
    suspicion: Suspicion
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    is_asked: asyncio.Event = field(default_factory=asyncio.Event)
    others: deque[int] = field(default_factory=lambda: deque(maxlen=_NUM_AGREEING))
    work: float | None = None
    is_complained_of: bool = False
    is_subscribed: bool = False


class Watcher:
    """One per door; `start` before, `stop` after."""

    def __init__(self, backends: Backends, clock: Clock, config: WatchConfig | None = None) -> None:
        self._backends = backends
        self._clock = clock
        self._config = config or WatchConfig()
        self._watched: dict[int, _Watched] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Begin. When this returns, all have been asked once what they serve, and who is there has answered."""
        self._follow()
        await asyncio.gather(*(watched.is_asked.wait() for watched in self._watched.values()))
        self._spawn(self._tick_for_ever())

    async def stop(self) -> None:
        """End; nothing runs on."""
        tasks = [*self._tasks, *(task for each in self._watched.values() for task in each.tasks)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for watched in self._watched.values():
            await watched.asker.close()
        self._watched.clear()

    async def fetch_json(self, name: str, path: str) -> object | None:
        """Ask another Expediter behind us for something; None if it is none, or does not answer in time."""
        backend = self._backends.named(name)
        watched = None if backend is None else self._watched.get(backend.replica_id)
        if backend is None or watched is None or backend.kind is not Kind.EXPEDITER:
            return None
        try:
            return await watched.asker.json(path)
        except _UNREACHED:
            return None

    # ---- one backend

    async def _look_after(self, backend: Backend, watched: _Watched) -> None:
        config, due_s = self._config, 0.0
        while True:
            try:
                if self._clock.now() >= due_s:
                    is_known = await self._discover(backend, watched)
                    due_s = self._clock.now() + (config.discover_s if is_known else config.retry_s)
                watched.is_asked.set()
                self._subscribe(backend, watched)
                await self._scrape(backend, watched)
            except Exception:  # whatever a backend answers: the next look comes
                logger.exception("backend %s gave an answer that cannot be handled", backend.name)
                watched.is_asked.set()
            await asyncio.sleep(config.scrape_s)

    async def _discover(self, backend: Backend, watched: _Watched) -> bool:
        """Ask what a backend serves; return whether that is known."""
        try:
            found = await watched.asker.discover()
        except _UNREACHED as error:
            if not watched.is_complained_of:
                watched.is_complained_of = True
                logger.warning("backend %s does not say what it serves: %s", backend.name, _in_words(error))
            return bool(backend.config.models)
        if watched.is_complained_of or not backend.models:
            logger.info("backend %s: %s, serves %s", backend.name, found.kind.value, ", ".join(found.models))
        watched.is_complained_of = False
        backend.kind = found.kind
        backend.max_model_len = found.max_model_len
        self._backends.limits(backend, found.max_requests)
        self._backends.contents.limit(backend, found.max_kv_tokens)
        self._backends.serves(backend, backend.config.models or found.models)
        return True

    async def _scrape(self, backend: Backend, watched: _Watched) -> None:
        asked_s, before = self._clock.now(), backend.num_in_flight
        try:
            load = await watched.asker.load()
        except _UNREACHED:
            return
        if load is None:
            return
        if load.work is not None:
            if watched.work is not None and load.work != watched.work:
                backend.worked_s = asked_s
            watched.work = load.work
        ours = max(before, backend.num_in_flight)
        watched.others.append(max(0, load.num_running + load.num_waiting - ours))
        num_others = min(watched.others) if len(watched.others) == _NUM_AGREEING else 0
        self._backends.contents.limit(backend, load.max_kv_tokens)
        self._backends.reported(backend, Reported(asked_s, load.num_running, load.num_waiting, load.kv_use, num_others))

    def _subscribe(self, backend: Backend, watched: _Watched) -> None:
        """Follow a backend's KV events, once it is known whose prompts they speak of."""
        if not backend.config.kv_events or watched.is_subscribed or not backend.models:
            return
        from expediter.gateway.backends.kv_events import KvSubscription  # noqa: PLC0415 - pyzmq is an extra

        watched.is_subscribed = True
        watched.tasks.append(asyncio.create_task(KvSubscription(self._backends.contents, backend).run()))

    async def _probe(self, backend: Backend, asker: Asker) -> None:
        try:
            failure = await asker.probe()
        except Exception:  # as above; without a verdict it would never be probed again
            logger.exception("a probe of backend %s failed", backend.name)
            failure = Failure.BROKEN
        self._backends.health.probed(backend, failure, self._clock.now())

    # ---- all of them

    async def _tick_for_ever(self) -> None:
        last_s = self._clock.now()
        while True:
            await asyncio.sleep(self._config.tick_s)
            now_s = self._clock.now()
            # While this loop itself was late, nothing could be read: nobody was silent.
            was_late = now_s - last_s > self._config.tick_s + self._config.silent_s / 2
            last_s = now_s
            try:
                self._tick(now_s, was_late=was_late)
            except Exception:  # a bug of ours must not end the watch over everybody
                logger.exception("a look at the backends failed")

    def _tick(self, now_s: float, *, was_late: bool) -> None:
        self._follow()
        for backend in self._backends:
            if backend.is_own:
                continue
            if not was_late:
                self._doubt_if_silent(backend, now_s)
            reported = backend.reported
            if reported is not None and now_s > reported.at_s + self._config.stale_s:
                self._backends.reported(backend, None)
        self._backends.look_at_the_clock(now_s)
        for backend in self._backends.health.due_probes(now_s):
            self._spawn(self._probe(backend, self._watched[backend.replica_id].asker))

    def _doubt_if_silent(self, backend: Backend, now_s: float) -> None:
        if backend.live and self._watched[backend.replica_id].suspicion.arises(backend.heard_s(), now_s):
            self._backends.health.doubt(backend, now_s)

    def _follow(self) -> None:
        """Look after who has come, and no longer after who has gone."""
        here = {backend.replica_id: backend for backend in self._backends if not backend.is_own}
        for replica_id in self._watched.keys() - here.keys():
            self._spawn(self._leave(self._watched.pop(replica_id)))
        for replica_id, backend in here.items():
            if replica_id not in self._watched:
                self._watched[replica_id] = watched = _Watched(Asker(backend), Suspicion(self._config.silent_s))
                watched.tasks.append(asyncio.create_task(self._look_after(backend, watched)))

    async def _leave(self, watched: _Watched) -> None:
        for task in watched.tasks:
            task.cancel()
        await asyncio.gather(*watched.tasks, return_exceptions=True)
        await watched.asker.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _in_words(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError) and isinstance(error.os_error, ConnectionRefusedError):
        return "nobody listens there yet"
    return str(error) or "no answer in time"
