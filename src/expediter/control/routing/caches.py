"""What is known of the replicas' prefix caches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from expediter.control.fleet import Fleet, Member
from expediter.control.prefix_index import PrefixIndex, cached_tokens, root_key
from expediter.control.routing.base import RouteQuery
from expediter.core.request import Request


class CacheView(Protocol):
    """Says how much of a prompt each replica holds."""

    def cached(self, query: RouteQuery, fleet: Fleet) -> Mapping[int, int]:
        """Return by slot how many leading tokens of the prompt need no computing; 0 for who is not in it.

        At least one token is always left to compute.
        """
        ...

    def placed(self, query: RouteQuery, member: Member) -> None:
        """Hear that a replica gets the request that was just asked about; it will hold its prompt."""
        ...


class IndexedCaches:
    """What was sent where, in one `PrefixIndex`: for any engine, and a prompt is known before it is computed.

    Args:
        index: may be shared by the fleets of several models, if a replica has the same slot in all of them.
        model: prompts of different models never share.
        shared_by_tenants: of replicas whose caches know nothing of our tenants; only what a request asks for itself,
            behind the slash of its salt, keeps prompts apart there.
    """

    def __init__(self, index: PrefixIndex, model: str = "", *, shared_by_tenants: bool = False) -> None:
        self.index = index
        self._shared_by_tenants = shared_by_tenants
        self._salt = f"{model}\0" if model else ""
        self._generation = 0
        self._stays: dict[int, int] = {}
        self._asked: tuple[Request | None, list[int]] = (None, [])

    def cached(self, query: RouteQuery, fleet: Fleet) -> Mapping[int, int]:
        self._follow(fleet)
        found, num_tokens = self.index.match(self.keys(query.request)), len(query.request.prompt)
        if found and found[-1][0] == num_tokens:
            found[-1] = num_tokens - 1, found[-1][1]
        return cached_tokens(found)

    def placed(self, query: RouteQuery, member: Member) -> None:
        if member.profile.caches_prefixes:
            self.index.record(member.slot, self.keys(query.request))

    def root(self) -> int:
        """Return the number of the empty prefix of prompts without a salt."""
        return root_key(self._salt)

    def keys(self, request: Request) -> list[int]:
        """Return the numbers of a request's prefixes; those of the last one asked for are at hand."""
        if self._asked[0] is not request:
            salt = request.cache_salt
            if self._shared_by_tenants and salt.endswith("/"):
                salt = ""
            self._asked = request, self.index.keys(request.prompt, self._salt + salt)
        return self._asked[1]

    def _follow(self, fleet: Fleet) -> None:
        """Forget who has left; a replica that comes back starts with nothing."""
        if fleet.generation == self._generation:
            return
        self._generation = fleet.generation
        for slot in range(fleet.num_slots):
            stay = fleet.stay_at(slot)
            before = self._stays.get(slot, 0)
            if stay == before:
                continue
            self._stays[slot] = stay
            if before:
                self.index.remove(slot)
            max_tokens = fleet.profile(fleet.id_at(slot)).max_kv_tokens if stay else None
            if max_tokens is not None:
                self.index.limit(slot, max_tokens)


class AskedCaches:
    """What each replica's cache holds at this moment, by asking every one of them; for replicas in the same process.

    A prompt that is on its way counts for nothing until it is computed. A replica that cannot be asked holds nothing.
    """

    def cached(self, query: RouteQuery, fleet: Fleet) -> Mapping[int, int]:
        most = query.num_prompt_tokens - 1
        asked = ((member.slot, member.profile.cached_tokens) for member in fleet.members("prefill"))
        return {slot: min(ask(query.request), most) for slot, ask in asked if ask is not None}

    def placed(self, query: RouteQuery, member: Member) -> None:
        """Nothing to note: the replica knows."""
