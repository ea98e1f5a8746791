"""The backends behind the door: who there is, who gets a request, and what came of it.

Each model has a fleet and a router of its own; a backend that serves several is in several fleets, with one load. What
was sent where is kept in one index for all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Final, NamedTuple, Protocol

import msgspec
import numpy as np

from expediter.control.fleet import Fleet, ReplicaProfile
from expediter.control.health import Failure, FleetHealth, HealthConfig
from expediter.control.learning import Answer, LearnedTtft, hopeful
from expediter.control.routing.base import Candidate, Refusal, RouteQuery, Router
from expediter.control.routing.build import RoutingConfig, make_router
from expediter.control.routing.caches import IndexedCaches
from expediter.control.speed import Speed
from expediter.core.errors import ConfigurationError
from expediter.core.ports import Clock
from expediter.core.request import Request
from expediter.gateway.backends.backend import (
    Backend,
    BackendStatus,
    Chosen,
    Counts,
    Dispatch,
    Ending,
    Kind,
    Reported,
    Usage,
)
from expediter.gateway.backends.config import Address, BackendConfig
from expediter.telemetry.exchanges import BackendEvents

logger = logging.getLogger(__name__)

DEFAULT_ROUTING: Final = RoutingConfig(name="predicted_ttft", keep_sessions=True, index_block_tokens=128)
"""Of a server with backends."""
_MAX_TOLD_KEYS: Final = 900
"""A longer prompt's beginning will do: a message between processes has to fit into a datagram of 8 KiB."""
_OWN_ADDRESS: Final = Address("localhost", 0)


class Busy(NamedTuple):
    """Everybody who is up has as many requests as it takes: wait for `Backends.on_room`."""


class NobodyUp(NamedTuple):
    """Nobody can take the request now, and waiting for room would not help.

    Attributes:
        retry_after_s: when somebody is probed next, at least.
    """

    retry_after_s: float
    message: str = "no backend is up"


class SharedLoads(Protocol):
    """What the processes of one gateway tell each other of their dispatches."""

    def publish(self, name: str, counts: Counts) -> None:
        """Say what this process has at a backend."""
        ...

    def others(self, name: str) -> Counts:
        """Return what all other processes have there."""
        ...


@dataclass(slots=True, eq=False)
class _Group:
    """Who serves one model."""

    fleet: Fleet
    router: Router
    caches: IndexedCaches | None
    members: dict[int, Backend] = field(default_factory=dict)
    has_own: bool = False
    num_paused: int = 0


@dataclass(slots=True, eq=False)
class _Entry:
    """What is kept of a backend.

    Attributes:
        slot: its place in fleets and in the index.
        learned_s: when its speed was last heard of.
        tokens_ratio: tokens of prompts as the door counts them for each one of its own, smoothed.
    """

    backend: Backend
    slot: int
    learned: LearnedTtft = field(default_factory=LearnedTtft)
    learned_s: float = 0.0
    tokens_ratio: float = 1.0
    profile: ReplicaProfile = field(default_factory=ReplicaProfile)


def _nothing() -> None:
    """Nobody waits for room."""


def _nobody(_: Backend) -> None:
    """Nobody minds."""


class Backends:
    """All backends of one door; lives on its event loop, in one thread.

    Args:
        routing: of every model.
        environment: where backends' keys are, by the names in their configurations.
        events: hears of ejections and probes.
        shared: with the other processes of this gateway; None if it is the only one.
        seed: of jitter.
    Attributes:
        on_room: called when a backend takes requests again that did not: it had no room, or was not up.
        on_ejected: called when a backend is ejected that was in use; what waits there for its first byte may be sent
            elsewhere.
        on_placed: called at each dispatch with a message for `placed_elsewhere` of the other processes; None if there
            are none.
        on_gone: called when a backend is removed; who keeps connections to it closes those that are idle.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        routing: RoutingConfig = DEFAULT_ROUTING,
        health: HealthConfig | None = None,
        environment: Mapping[str, str] | None = None,
        events: BackendEvents | None = None,
        shared: SharedLoads | None = None,
        seed: int = 0,
    ) -> None:
        self.on_room: Callable[[], None] = _nothing
        self.on_ejected: Callable[[Backend], None] = _nobody
        self.on_gone: Callable[[Backend], None] = _nobody
        self.on_placed: Callable[[bytes], None] | None = None
        self.health = FleetHealth(health or HealthConfig(), np.random.default_rng(seed))
        self._clock = clock
        self._routing = routing
        self._index = routing.index()
        self._environment = environment or {}
        self._events = events
        self._shared = shared
        self._entries: dict[int, _Entry] = {}
        self._groups: dict[str, _Group] = {}
        self._next_id = 0

    # ---- who there is

    @property
    def models(self) -> list[str]:
        """All models that somebody serves, in the order in which they were found."""
        return list(self._groups)

    def knows(self, model: str) -> bool:
        return model in self._groups

    def __iter__(self) -> Iterator[Backend]:
        return (entry.backend for entry in self._entries.values())

    def named(self, name: str) -> Backend | None:
        return next((backend for backend in self if backend.name == name), None)

    def add(self, config: BackendConfig) -> Backend:
        """Take a backend in. It gets requests as soon as its models are known, at once if the configuration says them.

        Raises:
            ConfigurationError: its name is taken, the variable with its key is not set, or what its KV events need is
                not installed.
        """
        if config.kv_events and find_spec("zmq") is None:
            raise ConfigurationError(f"backend {config.url!r}: kv_events needs pip install 'expediter[kv-events]'")
        authorization = None
        if config.api_key_env:
            key = self._environment.get(config.api_key_env, "")
            if not key:
                raise ConfigurationError(f"backend {config.url!r}: {config.api_key_env} is not set")
            authorization = f"Bearer {key}".encode()
        backend = self._enter(config, config.shown_name, config.address)
        backend.authorization = authorization
        self.serves(backend, config.models)
        return backend

    def add_own(
        self,
        name: str,
        models: Iterable[str],
        is_ready: Callable[[], bool],
        *,
        up_in_s: Callable[[], float] | None = None,
        max_requests: int | None = None,
    ) -> Backend:
        """Take in the pool of our own replicas, which counts as one backend and is never ejected.

        Args:
            is_ready: whether it takes requests.
            up_in_s: when it is likely to take some if it does not.
            max_requests: most at once; None for no limit.
        """
        backend = self._enter(BackendConfig(url="unix:/own"), name, _OWN_ADDRESS)
        backend.kind, backend.is_ready, backend.up_in_s = Kind.OWN, is_ready, up_in_s
        backend.max_requests = max_requests
        self.serves(backend, tuple(models))
        return backend

    def drain(self, backend: Backend) -> None:
        """Send a backend no new requests; what is in flight goes on."""
        backend.is_draining = True
        self._sync_all(backend)

    def remove(self, backend: Backend) -> None:
        """Forget a backend; what is in flight there goes on, and counts for nothing."""
        backend.is_draining = True
        self.serves(backend, ())
        self.health.leave(backend.replica_id)
        entry = self._entries.pop(backend.replica_id, None)
        if entry is not None:
            self._index.remove(entry.slot)
            self.on_gone(backend)

    def serves(self, backend: Backend, models: tuple[str, ...]) -> None:
        """Say which models a backend serves now."""
        entry = self._entries.get(backend.replica_id)
        if entry is None:
            return
        for model in backend.models:
            if model not in models:
                self._leave(model, backend)
        added = [model for model in dict.fromkeys(models) if model not in backend.models]
        backend.models = tuple(dict.fromkeys(models))
        for model in added:
            group = self._groups.get(model)
            if group is None:
                caches = None if self._routing.prefix_knowledge == "exact" else IndexedCaches(self._index, model)
                group = self._groups[model] = _Group(Fleet(), make_router(self._routing, caches), caches)
            group.fleet.join(backend.replica_id, backend.snapshot, entry.profile, entry.slot)
            group.members[backend.replica_id] = backend
            group.has_own = group.has_own or backend.is_own
            self._sync(group)
        if added and not backend.is_draining:
            self.on_room()

    def limits(self, backend: Backend, *, max_kv_tokens: int | None) -> None:
        """Say what a backend's KV cache holds, in tokens as the door counts them."""
        entry = self._entries.get(backend.replica_id)
        if entry is not None and max_kv_tokens is not None:
            backend.max_kv_tokens = max_kv_tokens
            entry.profile = replace(entry.profile, max_kv_tokens=max_kv_tokens)
            self._index.limit(entry.slot, max_kv_tokens)

    def reported(self, backend: Backend, reported: Reported | None) -> None:
        """Say what a backend's metrics said, or None that they are too old to count."""
        backend.reported = reported
        self._mark(backend)

    def holds(self, backend: Backend, num_tokens: int, *, has_dropped: bool) -> None:
        """Say what a backend's cache holds, in its own tokens; once it drops something, it holds no more than that."""
        entry = self._entries.get(backend.replica_id)
        backend.num_cache_tokens = num_tokens
        if entry is not None and has_dropped:
            self._index.limit(entry.slot, round(num_tokens * entry.tokens_ratio))

    def forget_prefixes(self, backend: Backend) -> None:
        """Say that a backend's cache is empty."""
        entry = self._entries.get(backend.replica_id)
        if entry is not None:
            self._index.remove(entry.slot)
            if backend.max_kv_tokens is not None:
                self._index.limit(entry.slot, backend.max_kv_tokens)

    # ---- requests

    def choose(
        self, request: Request, model: str, now_s: float, *, excluded: Container[int] = ()
    ) -> Chosen | Busy | NobodyUp:
        """Return who gets a request. Whoever is chosen is taken to get it: say so with `dispatched` at once.

        Args:
            request: its prompt in whatever tokens the door counts in.
            excluded: numbers of backends that have failed it already.
        Cost: some 30 microseconds with four backends; see docs/routing.md.
        """
        group = self._groups.get(model)
        if group is None:
            return NobodyUp(1.0, "no backend serves this model")
        if self._shared is not None:
            self.look_around()
        if group.num_paused or self.health.num_out or excluded or group.has_own:
            self._sync(group, excluded)
        decision = group.router.route(RouteQuery(request, now_s), group.fleet)
        if isinstance(decision, Refusal):
            return self._refused(group, excluded)
        backend = group.members[decision.replica_id]
        speed = self._entries[decision.replica_id].profile.speed
        predicted_s = None
        if speed.is_known:
            num_cached = decision.num_cached_tokens
            predicted_s = backend.queue_s(speed) + speed.prefill_s(request.num_prompt_tokens - num_cached, num_cached)
        return Chosen(backend, decision, model, predicted_s)

    def dispatched(self, chosen: Chosen, request: Request, now_s: float, *, is_stream: bool) -> Dispatch:
        """Count a request where it goes, before a byte of it is sent."""
        backend, num_tokens = chosen.backend, request.num_prompt_tokens
        num_new = num_tokens - chosen.decision.num_cached_tokens
        dispatch = Dispatch(
            backend=backend,
            model=chosen.model,
            is_stream=is_stream,
            at_s=now_s,
            num_tokens=num_tokens,
            num_new=num_new,
            num_ahead=backend.num_pending_tokens,
            num_beside=backend.num_answered,
            is_trial=self.health.num_out > 0 and self.health.began(backend.replica_id),
            predicted_ttft_s=chosen.predicted_ttft_s,
            book=self,
            progress_s=now_s,
        )
        if not backend.live:
            backend.progress_s = now_s
        backend.live.add(dispatch)
        backend.num_dispatched += 1
        backend.num_pending_tokens += num_new
        backend.num_context_tokens += num_tokens
        for model in backend.models:
            self._groups[model].fleet.dispatched(backend.replica_id)
        if self._shared is not None:
            self._shared.publish(backend.name, backend.counts)
        if self.on_placed is not None:
            self._say_placed(chosen, request)
        if not backend.has_room:
            self._sync_all(backend)
        return dispatch

    def look_around(self) -> None:
        """See what the other processes have dispatched and ended since the last look."""
        if self._shared is None:
            return
        for entry in self._entries.values():
            backend = entry.backend
            counts = self._shared.others(backend.name)
            if counts != backend.elsewhere:
                had_room, backend.elsewhere = backend.has_room, counts
                self._mark(backend)
                if backend.has_room != had_room:
                    self._sync_all(backend)
                    if not had_room:
                        self.on_room()

    def placed_elsewhere(self, message: bytes) -> None:
        """Note where another process has sent a prompt; what is no such message changes nothing."""
        try:
            model, name, raw = msgspec.msgpack.decode(message, type=tuple[str, str, bytes])
            keys = np.frombuffer(raw, "<u8").tolist()
        except (msgspec.DecodeError, ValueError):
            return
        backend = self.named(name)
        if backend is not None and model in backend.models:
            self._index.record(self._entries[backend.replica_id].slot, keys)

    def _say_placed(self, chosen: Chosen, request: Request) -> None:
        caches = self._groups[chosen.model].caches
        keys = [] if caches is None else caches.keys(request)[:_MAX_TOLD_KEYS]
        if keys and self.on_placed is not None:
            told = (chosen.model, chosen.backend.name, np.array(keys, "<u8").tobytes())
            self.on_placed(msgspec.msgpack.encode(told))

    def answered(self, dispatch: Dispatch, now_s: float) -> None:
        """Hear of a dispatch's first byte; called by the dispatch."""
        backend = dispatch.backend
        backend.progress_s = now_s
        if dispatch.is_stream:
            self.settle(dispatch)
        self._heard(backend, self.health.answered, now_s)

    def over(self, dispatch: Dispatch, ending: Ending, now_s: float) -> None:
        """Hear that a dispatch has ended; called by the dispatch, once."""
        backend, failure = dispatch.backend, ending.failure
        had_room = backend.has_room
        backend.live.discard(dispatch)
        backend.num_context_tokens -= dispatch.num_tokens
        if dispatch.is_settled:
            backend.num_answered -= 1
        else:
            backend.num_pending_tokens -= dispatch.num_new
        self._changed(backend)
        if (
            dispatch.is_trial
            and self._events is not None
            and (failure is not None or dispatch.first_byte_s is not None)
        ):
            self._events.probed(backend.name, succeeded=failure is None)
        if failure is not None:
            backend.outcomes[failure.value] += 1
            if self.health.failed(backend.replica_id, failure, now_s, is_trial=dispatch.is_trial):
                self.ejected(backend, failure)
        else:
            assert ending.outcome is not None
            backend.outcomes[ending.outcome.value] += 1
            if dispatch.first_byte_s is not None:
                backend.progress_s = now_s
                self._heard(backend, self.health.succeeded, now_s)
                self._learn(dispatch, ending.usage)
            elif dispatch.is_trial:
                self.health.abandoned(backend.replica_id)
        if not had_room and not backend.is_draining:
            self._sync_all(backend)
            self.on_room()

    def settle(self, dispatch: Dispatch) -> None:
        """Take a dispatch's prompt off what is pending, once: it is computed, for all we know."""
        if not dispatch.is_settled and not dispatch.is_over:
            dispatch.is_settled = True
            dispatch.backend.num_pending_tokens -= dispatch.num_new
            dispatch.backend.num_answered += 1
            self._changed(dispatch.backend)

    def settle_expected(self, now_s: float) -> None:
        """Settle what must have been computed by now where the first byte comes with the last."""
        for entry in self._entries.values():
            for dispatch in entry.backend.live:
                expected_s = dispatch.predicted_ttft_s
                if not dispatch.is_stream and expected_s is not None and now_s >= dispatch.at_s + expected_s:
                    self.settle(dispatch)

    def hope(self, now_s: float) -> None:
        """Think well of those of whom nothing is known, or was heard for long, so that they are tried.

        Who was slow and gets nothing looks better with time; who is new looks like the fastest of its rivals.
        """
        for entry in self._entries.values():
            models = set(entry.backend.models)
            others = (each for each in self._entries.values() if each is not entry and each.learned.is_enough)
            rivals = [each.profile.speed for each in others if models & set(each.backend.models)]
            if entry.learned.is_enough:
                self._say_speed(entry, hopeful(entry.learned.speed(), rivals, now_s - entry.learned_s))
            elif rivals:
                self._say_speed(entry, replace(min(rivals, key=lambda speed: speed.token_s), is_known=False))

    # ---- health

    def ejected(self, backend: Backend, failure: Failure) -> None:
        """Hear that a backend that was in use is ejected."""
        logger.warning("backend %s is ejected: %s", backend.name, failure.value)
        if self._events is not None:
            self._events.ejected(backend.name)
        if failure is Failure.CONNECT:
            self.forget_prefixes(backend)  # its process is gone, and its cache with it
        self._sync_all(backend)
        self.on_ejected(backend)

    def probed(self, backend: Backend, failure: Failure | None, now_s: float) -> None:
        """Hear how a probe of a backend went."""
        is_trial = not self.health.serves(backend.replica_id)
        if is_trial and self._events is not None:
            self._events.probed(backend.name, succeeded=failure is None)
        if failure is None:
            self._heard(backend, lambda replica_id, at_s: self.health.probed(replica_id, None, at_s), now_s)
        elif self.health.probed(backend.replica_id, failure, now_s):
            self.ejected(backend, failure)

    def doubt(self, backend: Backend, now_s: float) -> None:
        """Say that a backend with requests has been silent for too long: a probe is due."""
        self.health.doubt(backend.replica_id, now_s)

    def due_probes(self, now_s: float) -> list[Backend]:
        """Return who is to be probed now; `probed` must follow for each."""
        due = [self._entries[replica_id].backend for replica_id in self.health.due_probes(now_s)]
        for backend in due:
            if backend.is_own:  # its supervisor knows how it is
                self.health.probed(backend.replica_id, None, now_s)
        return [backend for backend in due if not backend.is_own]

    def _heard(self, backend: Backend, tell: Callable[[int, float], object], now_s: float) -> None:
        """Tell something good; if that brings the backend back, there is room."""
        was_out, did_serve = self.health.num_out, self.health.serves(backend.replica_id)
        tell(backend.replica_id, now_s)
        if self.health.num_out < was_out:
            if not did_serve:
                logger.info("backend %s is up again", backend.name)
            self._sync_all(backend)
            self.on_room()

    # ---- fleets

    def _sync_all(self, backend: Backend) -> None:
        for model in backend.models:
            self._sync(self._groups[model])

    def _sync(self, group: _Group, excluded: Container[int] = ()) -> None:
        """Let exactly those take requests who may."""
        usable = self._usable(group)
        group.num_paused = 0
        for replica_id, backend in group.members.items():
            if replica_id in usable and backend.has_room and replica_id not in excluded:
                group.fleet.resume(replica_id)
            else:
                group.fleet.pause(replica_id)
                group.num_paused += 1

    def _usable(self, group: _Group) -> Container[int]:
        """Return who is well and takes requests, room or not."""
        ready = [replica_id for replica_id, backend in group.members.items() if backend.takes_requests]
        return self.health.usable(ready)

    def _refused(self, group: _Group, excluded: Container[int]) -> Busy | NobodyUp:
        usable = self._usable(group)
        full = (each for each, backend in group.members.items() if each in usable and not backend.has_room)
        if any(each not in excluded for each in full):
            return Busy()
        waits_s = (backend.up_in_s() for backend in group.members.values() if backend.up_in_s is not None)
        return NobodyUp(min(waits_s, default=1.0))

    def _leave(self, model: str, backend: Backend) -> None:
        group = self._groups[model]
        group.fleet.leave(backend.replica_id)
        del group.members[backend.replica_id]
        group.has_own = any(member.is_own for member in group.members.values())
        if not group.members:
            del self._groups[model]

    def _changed(self, backend: Backend) -> None:
        """Say that what we have at a backend has changed."""
        self._mark(backend)
        if self._shared is not None:
            self._shared.publish(backend.name, backend.counts)

    def _mark(self, backend: Backend) -> None:
        for model in backend.models:
            self._groups[model].fleet.mark(backend.replica_id)

    def _learn(self, dispatch: Dispatch, usage: Usage | None) -> None:
        """Learn from the time until a dispatch's first byte."""
        entry = self._entries.get(dispatch.backend.replica_id)
        if entry is None or dispatch.first_byte_s is None or (usage is None and not dispatch.is_stream):
            return
        num_new, num_output = dispatch.num_new, 0
        if usage is not None:
            if usage.num_prompt_tokens > 0:
                entry.tokens_ratio += 0.05 * (dispatch.num_tokens / usage.num_prompt_tokens - entry.tokens_ratio)
            if usage.num_cached_tokens is not None and usage.num_prompt_tokens > 0:
                share = 1 - min(1.0, usage.num_cached_tokens / usage.num_prompt_tokens)
                num_new = round(dispatch.num_tokens * share)
            num_output = 0 if dispatch.is_stream else usage.num_output_tokens
        elapsed_s = dispatch.first_byte_s - dispatch.at_s
        speed = entry.learned.observe(Answer(dispatch.num_ahead, num_new, dispatch.num_beside, num_output, elapsed_s))
        if speed is not None:
            entry.learned_s = dispatch.first_byte_s
            self._say_speed(entry, speed)
            if not all(each.learned.is_enough for each in self._entries.values()):
                self.hope(dispatch.first_byte_s)

    def _say_speed(self, entry: _Entry, speed: Speed) -> None:
        if speed == entry.profile.speed:
            return
        entry.profile = replace(entry.profile, speed=speed)
        for model in entry.backend.models:
            self._groups[model].fleet.learned(entry.backend.replica_id, speed)

    def _enter(self, config: BackendConfig, name: str, address: Address) -> Backend:
        if self.named(name) is not None:
            raise ConfigurationError(f"there is a backend {name!r} already")
        backend = Backend(self._next_id, config, name, address, max_requests=config.max_requests)
        taken = {entry.slot for entry in self._entries.values()}
        slot = next(slot for slot in range(len(taken) + 1) if slot not in taken)
        self._next_id += 1
        self._entries[backend.replica_id] = _Entry(backend, slot)
        self.health.join(backend.replica_id, self._clock.now())
        return backend

    # ---- what there is to see

    def names(self, candidates: Iterable[Candidate]) -> tuple[str, ...]:
        """Return the names of those that were compared; "" for one that is gone."""
        entries = self._entries
        return tuple(
            [entries[each.replica_id].backend.name if each.replica_id in entries else "" for each in candidates]
        )

    @property
    def index_bytes(self) -> int:
        """Memory of the index of prefixes."""
        return self._index.num_bytes

    def status(self) -> list[BackendStatus]:
        """Return what there is to know of each backend."""
        return [self._status(entry) for entry in self._entries.values()]

    def _status(self, entry: _Entry) -> BackendStatus:
        backend, reported = entry.backend, entry.backend.reported
        return BackendStatus(
            replica_id=backend.replica_id,
            name=backend.name,
            url=backend.config.url,
            kind=backend.kind.value,
            state=self._state(backend),
            models=backend.models,
            max_model_len=backend.max_model_len,
            max_requests=backend.max_requests,
            num_in_flight=backend.num_in_flight,
            num_pending_tokens=backend.num_pending_tokens,
            reported_age_s=None if reported is None else self._clock.now() - reported.at_s,
            num_running=None if reported is None else reported.num_running,
            num_waiting=None if reported is None else reported.num_waiting,
            kv_use=None if reported is None else reported.kv_use,
            speed=entry.profile.speed if entry.profile.speed.is_known else None,
            num_cache_tokens=backend.num_cache_tokens,
            num_known_tokens=self._index.num_held_tokens(entry.slot),
            num_dispatched=backend.num_dispatched,
            outcomes=dict(backend.outcomes),
        )

    def _state(self, backend: Backend) -> str:
        if backend.is_draining:
            return "draining"
        if not backend.models:
            return "unknown"
        if backend.is_ready is not None:
            return "up" if backend.is_ready() else "ejected"
        return "up" if self.health.serves(backend.replica_id) else self.health.state(backend.replica_id).value
