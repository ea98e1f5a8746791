"""Which of a gateway's processes one is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    """A place that one process has at a time; one that is started again takes its predecessor's.

    Args:
        folder: what the processes share, which nobody else may enter; None for a gateway of one process.
        slot: the place, from 0.
        num_slots: of places.
    """

    folder: Path | None = None
    slot: int = 0
    num_slots: int = 1

    def own(self, name: str) -> Path | None:
        """Return this process's file of a kind; None if nobody shares it."""
        return None if self.folder is None else self.folder / f"{name}-{self.slot}"

    def others(self, name: str) -> list[Path]:
        """Return the files of this kind of the other processes."""
        if self.folder is None:
            return []
        return [self.folder / f"{name}-{slot}" for slot in range(self.num_slots) if slot != self.slot]


ALONE = ProcessPlace()
