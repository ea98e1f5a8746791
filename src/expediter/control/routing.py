"""Which replica gets a request: a pure function of a snapshot of the replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from expediter.core.errors import CapacityError, ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSnapshot:
    """What a router sees of one replica at one moment.

    Attributes:
        replica_id: stable number of the replica.
        num_requests: requests dispatched to it that have not ended, counted at dispatch.
        num_pending_tokens: prompt tokens dispatched to it whose KV has not been computed yet.
    """

    replica_id: int
    num_requests: int
    num_pending_tokens: int


class Router(Protocol):
    """Chooses among the replicas that are up."""

    def route(self, num_prompt_tokens: int, replicas: Sequence[ReplicaSnapshot]) -> int:
        """Return the `replica_id` for a prompt of that length.

        Raises:
            CapacityError: `replicas` is empty.
        """
        ...


class RoundRobin:
    """Each replica in turn, by ascending id; one that is away is passed over, not waited for."""

    def __init__(self) -> None:
        self._last = -1

    def route(self, num_prompt_tokens: int, replicas: Sequence[ReplicaSnapshot]) -> int:  # noqa: ARG002 - the protocol's argument; this policy looks at no length
        ids = sorted(replica.replica_id for replica in replicas)
        if not ids:
            raise CapacityError("no replica is up")
        self._last = next((i for i in ids if i > self._last), ids[0])
        return self._last


class LeastLoad:
    """Fewest pending prompt tokens, then fewest requests, then in turn: ties never pile up on the first replica."""

    def __init__(self) -> None:
        self._turn = RoundRobin()

    def route(self, num_prompt_tokens: int, replicas: Sequence[ReplicaSnapshot]) -> int:
        if not replicas:
            raise CapacityError("no replica is up")
        least = min((r.num_pending_tokens, r.num_requests) for r in replicas)
        tied = [r for r in replicas if (r.num_pending_tokens, r.num_requests) == least]
        return self._turn.route(num_prompt_tokens, tied)


_ROUTERS: dict[str, type[RoundRobin] | type[LeastLoad]] = {"least_load": LeastLoad, "round_robin": RoundRobin}
ROUTING_NAMES = tuple(_ROUTERS)


def make_router(name: str) -> Router:
    """Return a fresh router by name.

    Raises:
        ConfigurationError: there is none of that name; the message lists those that exist.
    """
    if name not in _ROUTERS:
        raise ConfigurationError(f"no routing policy {name!r}; there are: {', '.join(ROUTING_NAMES)}")
    return _ROUTERS[name]()
