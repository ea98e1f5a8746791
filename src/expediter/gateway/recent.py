"""Which requests of the scheduler a client means by a name."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

_Key = tuple[str, str]


class RecentRequests:
    """The requests behind the newest names, at most `limit` of them.

    A name counts for the tenant that used it only: a client's own id may be anything, another client's as well.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._ids: OrderedDict[_Key, tuple[str, ...]] = OrderedDict()

    def remember(self, tenant: str, names: Iterable[str], request_ids: Sequence[str]) -> None:
        """Let each name stand for all of these requests, and each id for itself; a name used again means the newest."""
        ids = tuple(request_ids)
        meanings: dict[_Key, tuple[str, ...]] = {(tenant, one): (one,) for one in ids}
        meanings |= {(tenant, name): ids for name in names}
        for key, meaning in meanings.items():
            self._ids[key] = meaning
            self._ids.move_to_end(key)
        while len(self._ids) > self._limit:
            self._ids.popitem(last=False)

    def find(self, tenant: str, name: str) -> tuple[str, ...]:
        """Return the requests that a name stands for; none if it is not known (any more)."""
        return self._ids.get((tenant, name), ())
