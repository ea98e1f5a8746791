"""The fleet and the router of each model, and the index of prefixes that they share."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from expediter.control.fleet import Fleet
from expediter.control.health import FleetHealth
from expediter.control.prefix_index import PrefixIndex, PrefixKeys
from expediter.control.routing.base import Placement, RouteQuery, Router
from expediter.control.routing.build import RoutingConfig, make_router
from expediter.control.routing.caches import IndexedCaches
from expediter.control.speed import Speed
from expediter.core.request import Request
from expediter.gateway.backends.backend import Backend

if TYPE_CHECKING:  # an extra: only models with a tokenizer need it
    from expediter.engine.tokenizer import Tokenizer

EXACT_BLOCK_TOKENS: Final = 16
"""Of the index of a model whose token ids are known."""
_ON_TRIAL: Final = "it was out, and this request tries whether it is well again"


@dataclass(slots=True, eq=False)
class _Group:
    """Who serves one model.

    Attributes:
        texts: makes token ids of prompts, so that KV events tell what is cached; None: prompts are compared as bytes.
        has_own: whether one of them says itself whether it takes requests.
        num_paused: of them, at the last look.
    """

    fleet: Fleet
    router: Router
    caches: IndexedCaches
    texts: Tokenizer | None
    members: dict[int, Backend] = field(default_factory=dict)
    has_own: bool = False
    num_paused: int = 0


class ModelFleets:
    """Who serves which model. A backend that serves several is in several fleets, with one load and one slot.

    Args:
        routing: of every model.
        health: says who may get requests.
    """

    def __init__(self, routing: RoutingConfig, health: FleetHealth) -> None:
        self._routing = routing
        self._health = health
        self._index = routing.index()
        self._groups: dict[str, _Group] = {}

    @property
    def models(self) -> list[str]:
        """All models that somebody serves, in the order in which they were found."""
        return list(self._groups)

    def knows(self, model: str) -> bool:
        return model in self._groups

    def members(self, model: str) -> Iterable[Backend]:
        """Return who serves a model."""
        return self._groups[model].members.values()

    # ---- who serves what

    def serves(self, backend: Backend, models: Sequence[str], texts: Tokenizer | None) -> bool:
        """Say which models a backend serves now; return whether some are new.

        Args:
            texts: of the models that nobody has served yet, if their prompts are to be compared by token ids.
        """
        for model in backend.models:
            if model not in models:
                self._leave(model, backend)
        added = [model for model in dict.fromkeys(models) if model not in backend.models]
        backend.models = tuple(dict.fromkeys(models))
        for model in added:
            group = self._groups.get(model)
            if group is None:
                group = self._groups[model] = self._group(model, texts)
            group.fleet.join(backend.replica_id, backend.snapshot, backend.profile, backend.slot)
            group.members[backend.replica_id] = backend
            group.has_own = group.has_own or backend.is_own
            self._sync(group)
        return bool(added)

    def _group(self, model: str, texts: Tokenizer | None) -> _Group:
        if texts is None:
            caches = IndexedCaches(self._index, model)
        else:
            # Blocks as small as any engine's, so that events can be told apart; an index of the same size of its own.
            index = replace(self._routing, index_block_tokens=EXACT_BLOCK_TOKENS).index()
            caches = IndexedCaches(index, model, shared_by_tenants=True)
        return _Group(Fleet(), make_router(self._routing, caches), caches, texts)

    def _leave(self, model: str, backend: Backend) -> None:
        group = self._groups[model]
        group.fleet.leave(backend.replica_id)
        del group.members[backend.replica_id]
        group.has_own = any(member.is_own for member in group.members.values())
        if not group.members:
            del self._groups[model]

    # ---- who gets what

    def route(self, request: Request, model: str, now_s: float, excluded: Container[int]) -> Placement | None:
        """Return who gets a request for a model that is known; None if nobody can take it now."""
        group = self._groups[model]
        if group.num_paused or self._health.num_out or excluded or group.has_own:
            self._sync(group, excluded)
        decision = group.router.route(RouteQuery(request, now_s), group.fleet)
        return decision if isinstance(decision, Placement) else None

    def on_trial(self, request: Request, model: str, now_s: float, *, can_retry: bool) -> Placement | None:
        """Return who gets a request on trial, for it has been out; None if nobody has to.

        Args:
            can_retry: whether the request can be tried again elsewhere.
        """
        group = self._groups[model]
        fit = [replica_id for replica_id, each in group.members.items() if each.takes_requests and each.has_room]
        tried_id = self._health.on_trial(fit, now_s, can_retry=can_retry)
        if tried_id is None:
            return None
        self._let_in(group, (tried_id,))
        decision = group.router.route(RouteQuery(request, now_s), group.fleet)
        return decision._replace(because=_ON_TRIAL) if isinstance(decision, Placement) else None

    def queue_s(self, model: str, backend: Backend) -> float:
        """Return how long it takes until a new prompt's turn comes at a backend."""
        return self._groups[model].fleet.queue_s(backend.replica_id)

    def is_full(self, model: str, excluded: Container[int]) -> bool:
        """Return whether somebody who could take a request for a model lacks only room."""
        group = self._groups[model]
        usable = self._usable(group)
        return any(
            replica_id in usable and replica_id not in excluded and not backend.has_room
            for replica_id, backend in group.members.items()
        )

    def dispatched(self, backend: Backend) -> None:
        """Say that a request was just sent to a backend."""
        for model in backend.models:
            self._groups[model].fleet.dispatched(backend.replica_id)

    def mark(self, backend: Backend) -> None:
        """Say that a backend's load may have changed."""
        for model in backend.models:
            self._groups[model].fleet.mark(backend.replica_id)

    def say_speed(self, backend: Backend, speed: Speed) -> None:
        """Say how fast a backend is."""
        if speed == backend.profile.speed:
            return
        backend.profile = replace(backend.profile, speed=speed)
        for model in backend.models:
            self._groups[model].fleet.learned(backend.replica_id, speed)

    def sync(self, backend: Backend) -> None:
        """Let exactly those take requests who may, wherever a backend is."""
        for model in backend.models:
            self._sync(self._groups[model])

    def _sync(self, group: _Group, excluded: Container[int] = ()) -> None:
        """Let those take requests who are well and have room."""
        usable, members = self._usable(group), group.members
        self._let_in(group, [each for each in usable if members[each].has_room and each not in excluded])

    def _let_in(self, group: _Group, replica_ids: Container[int]) -> None:
        group.num_paused = 0
        for replica_id in group.members:
            if replica_id in replica_ids:
                group.fleet.resume(replica_id)
            else:
                group.fleet.pause(replica_id)
                group.num_paused += 1

    def _usable(self, group: _Group) -> Sequence[int]:
        """Return who is well and takes requests, room or not."""
        ready = [replica_id for replica_id, backend in group.members.items() if backend.takes_requests]
        return self._health.usable(ready)

    # ---- what they hold

    @property
    def index_bytes(self) -> int:
        """Memory of the indexes."""
        return sum(index.num_bytes for index in self._indexes())

    def num_known_tokens(self, backend: Backend) -> int:
        """Return the prompt tokens that a backend is taken to hold."""
        return sum(index.num_held_tokens(backend.slot) for index in self._indexes())

    def texts(self, model: str) -> Tokenizer | None:
        """Return what makes token ids of a model's prompts, where they are compared by those."""
        group = self._groups.get(model)
        return None if group is None else group.texts

    def limit(self, backend: Backend, max_tokens: int) -> None:
        """Say that a backend holds no more than that."""
        for index in self._indexes():
            index.limit(backend.slot, max_tokens)

    def forget(self, backend: Backend) -> None:
        """Say that a backend holds nothing."""
        for index in self._indexes():
            index.remove(backend.slot)
            if backend.profile.max_kv_tokens is not None:
                index.limit(backend.slot, backend.profile.max_kv_tokens)

    def keys(self, model: str, request: Request) -> PrefixKeys:
        """Return the numbers of a prompt's prefixes."""
        group = self._groups.get(model)
        return [] if group is None else group.caches.keys(request)

    def root(self, model: str) -> int:
        """Return the number of the empty prefix of a model's prompts."""
        return self._groups[model].caches.root()

    def note(self, backend: Backend, model: str, keys: PrefixKeys) -> None:
        """Note that a backend will hold a prompt that was sent there by somebody else, or holds one."""
        self._groups[model].caches.index.record(backend.slot, keys)

    def drop(self, backend: Backend, model: str, keys: PrefixKeys) -> None:
        """Note that a backend has dropped the blocks at the ends of these prefixes."""
        self._groups[model].caches.index.drop(backend.slot, keys)

    def _indexes(self) -> Iterable[PrefixIndex]:
        """Return the one that models share, and those of models whose token ids are known."""
        yield self._index
        for group in self._groups.values():
            if group.texts is not None:
                yield group.caches.index
