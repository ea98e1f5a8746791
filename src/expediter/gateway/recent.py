"""Which requests of the scheduler a client means by a name."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

_Key = tuple[str, str]


class _Meaning(NamedTuple):
    ids: tuple[str, ...]
    door_id: str


_NOTHING: Final = _Meaning((), "")


class RecentRequests:
    """The requests behind the newest names, at most `limit` of them.

    A name counts for the tenant that used it only: a client's own id may be anything, another client's as well.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._meanings: OrderedDict[_Key, _Meaning] = OrderedDict()

    def remember(self, tenant: str, names: Iterable[str], request_ids: Sequence[str], door_id: str = "") -> None:
        """Let each name stand for all of these requests, and each id for itself; a name used again means the newest.

        Args:
            door_id: what the door calls them.
        """
        ids = tuple(request_ids)
        meanings: dict[_Key, _Meaning] = {(tenant, one): _Meaning((one,), door_id) for one in ids}
        meanings |= {(tenant, name): _Meaning(ids, door_id) for name in (*names, door_id) if name}
        for key, meaning in meanings.items():
            self._meanings[key] = meaning
            self._meanings.move_to_end(key)
        while len(self._meanings) > self._limit:
            self._meanings.popitem(last=False)

    def find(self, tenant: str, name: str) -> tuple[str, ...]:
        """Return the requests that a name stands for; none if it is not known (any more)."""
        return self._meanings.get((tenant, name), _NOTHING).ids

    def door_id(self, tenant: str, name: str) -> str:
        """Return what the door calls them; "" if that is not known."""
        return self._meanings.get((tenant, name), _NOTHING).door_id
