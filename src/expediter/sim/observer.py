"""Who watches a simulation: the metrics, the event log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from expediter.core.events import Event
from expediter.core.request import Request


class Observer(Protocol):
    """Hears of everything in the order in which it happens."""

    def arrived(self, request: Request, replica_id: int, now_s: float) -> None:
        """A request came in and was sent to a replica."""
        ...

    def record(self, replica_id: int, events: Sequence[Event]) -> None:
        """A replica's scheduler reported events; `Tokens`, one per step, are left out."""
        ...


class Observers:
    """Several observers as one."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = list(observers)

    def add(self, observer: Observer) -> None:
        self._observers.append(observer)

    def arrived(self, request: Request, replica_id: int, now_s: float) -> None:
        for observer in self._observers:
            observer.arrived(request, replica_id, now_s)

    def record(self, replica_id: int, events: Sequence[Event]) -> None:
        for observer in self._observers:
            observer.record(replica_id, events)
