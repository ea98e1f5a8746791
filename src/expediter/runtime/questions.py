"""Questions to a replica that wait for their answers."""

from __future__ import annotations

import asyncio

from expediter.core.explanation import Span

Answer = tuple[Span, ...] | None


class Questions:
    """Who wants to know what held which request; lives on the gateway's event loop."""

    def __init__(self) -> None:
        self._open: dict[str, list[asyncio.Future[Answer]]] = {}

    def ask(self, request_id: str) -> asyncio.Future[Answer]:
        """Return what `answer` will settle."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._open.setdefault(request_id, []).append(future)
        return future

    def answer(self, request_id: str, spans: Answer) -> None:
        """Tell everybody who asked for this request."""
        for future in self._open.pop(request_id, ()):
            if not future.done():
                future.set_result(spans)

    def give_up(self) -> None:
        """The replica is gone: nothing is known any more."""
        for request_id in tuple(self._open):
            self.answer(request_id, None)
