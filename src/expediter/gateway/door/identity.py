"""The door's ids of requests: unique over processes and restarts, and cheap."""

from __future__ import annotations

import secrets
from typing import Final

_COUNTER_BITS: Final = 40


class RequestIds:
    """Makes ids `req-` and 24 hexadecimal digits: a random part per process, and a counter."""

    def __init__(self) -> None:
        self._prefix = f"req-{secrets.token_hex(7)}"
        self._next = 0

    def new(self) -> str:
        """Return an id that no other request has."""
        self._next = (self._next + 1) % (1 << _COUNTER_BITS)
        return f"{self._prefix}{self._next:010x}"
