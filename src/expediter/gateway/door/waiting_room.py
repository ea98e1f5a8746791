"""The central queues at work: one per model, for requests that no backend has room for."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

from expediter.control.waiting import CentralQueue, Leaver, QueueConfig, QueueFull
from expediter.core.ports import Clock
from expediter.core.request import Request


class Waiter(Protocol):
    """Somebody who waits."""

    @property
    def core(self) -> Request:
        """The request as control knows it."""

    @property
    def model(self) -> str: ...

    def called(self, now_s: float) -> bool:
        """It is this one's turn: return whether it has gone, to a backend or otherwise; False if there is no room."""

    def dismissed(self, leaver: Leaver) -> None:
        """It has left the queue without having been served."""


class QueueGauge(Protocol):
    """Shows the queue."""

    def queue(self, num_requests: int, num_tokens: int) -> None: ...


class WaitingRoom:
    """Who waits for room at the backends of a model, in what order, and for how long.

    Attributes:
        is_used: somebody has waited since the start. Before that it need not be told of anybody who comes or goes.
    """

    def __init__(self, config: QueueConfig, weights: Mapping[str, float], clock: Clock, gauge: QueueGauge) -> None:
        self._config = config
        self._weights = weights
        self._clock = clock
        self._gauge = gauge
        self._queues: dict[str, CentralQueue] = {}
        self._waiters: dict[str, Waiter] = {}
        self._is_calling_soon = False
        self.is_used = False

    def rearrange(self, config: QueueConfig, weights: Mapping[str, float]) -> None:
        """Take other bounds, another ordering, other weights; as `CentralQueue.rearrange`."""
        self._config, self._weights = config, weights
        for queue in self._queues.values():
            queue.rearrange(config, weights, self._clock.now())

    def __len__(self) -> int:
        return len(self._waiters)

    @property
    def num_tokens(self) -> int:
        """Prompt tokens that wait."""
        return sum(queue.num_tokens for queue in self._queues.values())

    def somebody_waits(self, model: str) -> bool:
        """Return whether a newcomer for this model has to wait behind others."""
        queue = self._queues.get(model)
        return queue is not None and len(queue) > 0

    # ---- a waiter's life

    def offer(self, waiter: Waiter, deadline_s: float) -> QueueFull | None:
        """Let somebody wait, or say when there may be room for it. Others may be dismissed for it, or it itself."""
        queue = self._queues.get(waiter.model)
        if queue is None:
            self.is_used = True
            queue = self._queues[waiter.model] = CentralQueue(self._config, self._weights)
        now_s = self._clock.now()
        full = queue.offer(waiter.core, now_s, deadline_s)
        if full is None:
            self._waiters[waiter.core.request_id] = waiter
        self._see_off(queue, now_s)
        self._show()
        return full

    def remove(self, waiter: Waiter) -> None:
        """Take out somebody who has gone."""
        if self._waiters.pop(waiter.core.request_id, None) is not None:
            self._queues[waiter.model].remove(waiter.core.request_id, self._clock.now())
            self._show()

    def started(self, waiter: Waiter, now_s: float) -> None:
        """Somebody has got a backend, whether it waited or not."""
        queue = self._queues.get(waiter.model)
        if queue is not None:
            queue.start(waiter.core, now_s)
            if self._waiters.pop(waiter.core.request_id, None) is not None:
                self._show()

    def prefilled(self, waiter: Waiter) -> None:
        """The first byte has come for somebody who had started."""
        queue = self._queues.get(waiter.model)
        if queue is not None:
            queue.prefilled(waiter.core.request_id)

    def ended(self, waiter: Waiter, num_output_tokens: int) -> None:
        """Somebody who had started is over, or starts again."""
        queue = self._queues.get(waiter.model)
        if queue is not None:
            queue.end(waiter.core.request_id, num_output_tokens)

    # ---- turns

    def call_soon(self) -> None:
        """Call those whose turn it is, once whatever made room is done with it."""
        if self._waiters and not self._is_calling_soon:
            self._is_calling_soon = True
            asyncio.get_running_loop().call_soon(self._call)

    def sweep(self, now_s: float) -> None:
        """Let those leave whose time is over."""
        for queue in self._queues.values():
            if queue.next_expiry_s <= now_s:
                self._see_off(queue, now_s)
        self._show()

    def _call(self) -> None:
        self._is_calling_soon = False
        now_s = self._clock.now()
        for queue in self._queues.values():
            while (request := queue.first(now_s)) is not None:
                if not self._waiters[request.request_id].called(now_s):
                    break
            self._see_off(queue, now_s)
        self._show()

    def _see_off(self, queue: CentralQueue, now_s: float) -> None:
        for leaver in queue.leavers(now_s):
            waiter = self._waiters.pop(leaver.request.request_id, None)
            if waiter is not None:
                waiter.dismissed(leaver)

    def _show(self) -> None:
        self._gauge.queue(len(self._waiters), self.num_tokens)
