"""Live requests that try whether a replica that was out is well again.

The next request that it could serve goes there, whatever a router would say: where requests come one at a time,
somebody else always looks better, and it would stay away for ever. One at a time is on trial at each. It should be one
that can be tried again elsewhere if it fails, so that its client sees no error. Trials that end well cost nothing; of
those that do not there are a few, and then no more than a share of the requests, however many replicas are half open:
one client after the other would have to wait for them.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Final

_MAX_LEFT: Final = 4.0
"""Trials that may go badly before they are bound to a share of the requests."""


class Trials:
    """Who awaits a trial, and how many more may go badly. True if somebody awaits one."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        self._left = _MAX_LEFT

    def __bool__(self) -> bool:
        return bool(self._since)

    def awaited(self, replica_id: int, since_s: float) -> None:
        """Hear that a replica needs a request to show that it is well."""
        self._since[replica_id] = since_s

    def called_off(self, replica_id: int) -> None:
        """Hear that it no longer does."""
        self._since.pop(replica_id, None)

    def due(self, replica_ids: Container[int], since_s: float) -> int | None:
        """Return which of these must get the next request, None for nobody.

        Args:
            since_s: who has waited since then or longer is due.
        """
        if self._left < 1:
            return None
        return next((each for each, at_s in self._since.items() if at_s <= since_s and each in replica_ids), None)

    def began(self, replica_id: int, share: float) -> bool:
        """Hear that a request was sent to a replica; return whether it is on trial.

        Args:
            share: of the requests that may be on trial.
        """
        if self._since.pop(replica_id, None) is None:
            self._left = min(_MAX_LEFT, self._left + share)
            return False
        self._left = max(0.0, self._left - 1)
        return True

    def cost_nothing(self) -> None:
        """Hear that one has ended well, or was given up for other reasons."""
        self._left = min(_MAX_LEFT, self._left + 1)
