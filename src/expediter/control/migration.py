"""Which running request moves to which replica. Source: Llumnix (OSDI 2024, arXiv 2406.03243)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from expediter.core.errors import ConfigurationError
from expediter.scheduling.passage import Movable


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationConfig:
    """When requests move.

    Args:
        interval_s: between two looks at the replicas.
        source_below_tokens: freeness below which a replica gives requests away.
        target_above_tokens: freeness above which a replica takes some.
    Raises:
        ConfigurationError: a figure is out of range, or a replica could give and take at once.
    """

    interval_s: float = 1.0
    source_below_tokens: float = 256.0
    target_above_tokens: float = 1024.0

    def __post_init__(self) -> None:
        if not self.interval_s > 0:
            raise ConfigurationError(f"requests cannot move every {self.interval_s} s")
        if not self.source_below_tokens <= self.target_above_tokens:
            raise ConfigurationError(
                f"a replica gives requests away below a freeness of {self.source_below_tokens} tokens, which must not "
                f"be above the {self.target_above_tokens} from which it takes some"
            )


class MemoryLoad(NamedTuple):
    """What a replica said of its KV cache, in tokens.

    Attributes:
        num_tokens: size of the cache, M.
        num_virtual: what running requests use, and what the head of the queue asks for, sum of V: a queue that does not
            fit makes a replica less than empty.
        num_running: requests in the batch, B.
    """

    replica_id: int
    num_tokens: int
    num_virtual: int
    num_running: int

    @property
    def freeness(self) -> float:
        """(M - sum of V) / B: by how many tokens each running request can grow."""
        return (self.num_tokens - self.num_virtual) / max(1, self.num_running)


def pairs(loads: Sequence[MemoryLoad], config: MigrationConfig) -> list[tuple[int, int]]:
    """Return who gives a request to whom: the least free to the most free, the second least to the second most, ...

    Equal ones go by id. A replica is in one pair at most.
    """
    by_freeness = sorted(loads, key=lambda load: (load.freeness, load.replica_id))
    found: list[tuple[int, int]] = []
    for source, target in zip(by_freeness, reversed(by_freeness), strict=True):
        if source.freeness >= config.source_below_tokens or target.freeness <= config.target_above_tokens:
            break
        if source.num_running:
            found.append((source.replica_id, target.replica_id))
    return found


def choose(movable: Sequence[Movable]) -> Movable | None:
    """Return which request goes: of the lowest priority, the shortest, whose copy is the quickest."""
    return min(movable, key=lambda each: (-each.priority, each.num_tokens, each.request_id), default=None)
