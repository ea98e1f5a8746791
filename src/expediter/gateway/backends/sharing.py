"""What the processes of one gateway tell each other about backends."""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

import msgspec
import numpy as np

from expediter.gateway.backends.backend import Counts

_MAX_KEYS: Final = 900
"""A longer prompt's beginning will do: a message has to fit into a datagram of 8 KiB."""


class SharedLoads(Protocol):
    """What each process has at each backend."""

    def publish(self, name: str, counts: Counts) -> None:
        """Say what this process has at a backend."""
        ...

    def others(self, name: str) -> Counts:
        """Return what all other processes have there."""
        ...


class Placed(NamedTuple):
    """Where a prompt was sent.

    Attributes:
        keys: numbers of its prefixes.
    """

    model: str
    backend: str
    keys: list[int]

    def message(self) -> bytes:
        """Return it for a datagram, of a long prompt the beginning."""
        raw = np.array(self.keys[:_MAX_KEYS], "<u8").tobytes()
        return msgspec.msgpack.encode((self.model, self.backend, raw))

    @classmethod
    def of(cls, message: bytes) -> Placed | None:
        """Read a message; None if it is none."""
        try:
            model, backend, raw = msgspec.msgpack.decode(message, type=tuple[str, str, bytes])
            return cls(model, backend, np.frombuffer(raw, "<u8").tolist())
        except (msgspec.DecodeError, ValueError):
            return None
