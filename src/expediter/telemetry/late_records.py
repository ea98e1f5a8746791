"""Records of requests that have just ended, told together to all who hear of them.

What counts a request takes a dozen small steps in as many places. Done at the end of each request, they would push that
much code and data out of the processor's caches, which the next request then has to fetch again; done for many requests
in a row they cost a fraction. Who asks what was counted has it settled first, so nobody sees the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from expediter.telemetry.exchanges import ExchangeRecord, ExchangeSink


class LateRecords:
    """Hears of every request (`ExchangeSink`) and tells the sinks when it is asked to.

    Attributes:
        record: see `ExchangeSink`.
    """

    def __init__(self, sinks: Sequence[ExchangeSink]) -> None:
        self._sinks = sinks
        self._held: list[ExchangeRecord] = []
        self.record: Callable[[ExchangeRecord], None] = self._held.append

    def settle(self) -> None:
        """Tell the sinks of all that has ended, in order."""
        if self._held:
            records = self._held.copy()
            self._held.clear()
            for sink in self._sinks:
                for record in records:
                    sink.record(record)
