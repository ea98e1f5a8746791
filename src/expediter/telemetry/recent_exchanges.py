"""The newest records, found again by the names that a client may know them by."""

from __future__ import annotations

from collections import deque
from typing import Final

from expediter.telemetry.exchanges import ExchangeRecord

_MAX_RECORDS: Final = 4096


class RecentExchanges:
    """Hears of every request (`ExchangeSink`) and keeps the last `max_records`.

    A name counts for the tenant that used it only. A client's own id used twice means both requests.
    """

    def __init__(self, max_records: int = _MAX_RECORDS) -> None:
        self._records: deque[ExchangeRecord] = deque(maxlen=max_records)

    def record(self, record: ExchangeRecord) -> None:
        self._records.append(record)

    def find(self, tenant: str, name: str) -> list[ExchangeRecord]:
        """Return the requests with this id of ours or of the client's, the newest first.

        Nothing is indexed: every request would pay for what hardly anybody asks.
        """
        return [
            record
            for record in reversed(self._records)
            if record.tenant == tenant and name in (record.request_id, record.client_request_id)
        ]
