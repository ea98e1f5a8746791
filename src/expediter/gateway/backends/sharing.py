"""What the processes of one gateway tell each other about backends, a few milliseconds late."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Protocol

import msgspec
import numpy as np

from expediter.control.prefix_index import PrefixKeys
from expediter.core.request import Request
from expediter.gateway.backends.backend import Backend, Counts
from expediter.gateway.backends.contents import Contents
from expediter.gateway.backends.hooks import Hooks

_LOOK_S: Final = 0.002
"""Between two looks at the others while requests come: who routes sees what was true then."""
_LOOK_ONE_S: Final = 5e-5
"""For each backend, so that looking takes a few hundredths of the time, however many there are."""
_MAX_KEYS: Final = 900
"""Of one prompt: a longer one's beginning will do, for a message has to fit into a datagram of 8 KiB."""
_MAX_KEYS_BYTES: Final = 7400
"""Of one message with several prompts."""

_Placed = tuple[str, str, bytes]
"""Model, name of the backend, numbers of the prompt's prefixes."""
_PLACED: Final = msgspec.msgpack.Decoder(list[_Placed])


class SharedLoads(Protocol):
    """What each process has at each backend."""

    def publish(self, name: str, counts: Counts) -> None:
        """Say what this process has at a backend."""
        ...

    def others(self, name: str) -> Counts:
        """Return what all other processes have there."""
        ...


class Sharing:
    """Tells the other processes what this one has sent where, and hears it from them.

    That a backend has got a request is told at once. All else is not done for each request: what has ended and what was
    placed is told, and the others are looked at, when a request comes 2 ms after the last look, or when whoever turns
    the clock says so. Until then a backend may get a request more than it takes.

    Args:
        backends: by number.
    Attributes:
        tell: called with a message for `heard` of the other processes; it may be lost. None if there are none.
    """

    def __init__(self, loads: SharedLoads, backends: Mapping[int, Backend], contents: Contents, hooks: Hooks) -> None:
        self.tell: Callable[[bytes], None] | None = None
        self._loads = loads
        self._backends = backends
        self._contents = contents
        self._hooks = hooks
        self._changed: dict[int, Backend] = {}
        self._placed: list[_Placed] = []
        self._num_bytes = 0
        self._look_s = 0.0

    # ---- what happens here

    def load_changed(self, backend: Backend) -> None:
        """Hear that this process has more or less at a backend."""
        self._changed[backend.replica_id] = backend

    def dispatched(self, backend: Backend, model: str, request: Request) -> None:
        """Hear that this process has sent a request to a backend."""
        self._loads.publish(backend.name, backend.counts)
        if self.tell is None:
            return
        keys = _packed(self._contents.keys(model, request))
        if not keys:
            return  # shorter than a block: there is nothing to be hit
        if self._num_bytes + len(keys) > _MAX_KEYS_BYTES:
            self._tell_placed()
        self._placed.append((model, backend.name, keys))
        self._num_bytes += len(keys) + len(model) + len(backend.name)

    # ---- to and from the others

    def look(self, now_s: float) -> None:
        """Exchange news, unless that was done a moment ago."""
        if now_s >= self._look_s:
            self.exchange(now_s)

    def exchange(self, now_s: float) -> None:
        """Tell the others what has changed here, and see what they have dispatched and ended."""
        self._look_s = now_s + max(_LOOK_S, _LOOK_ONE_S * len(self._backends))
        for backend in self._changed.values():
            self._loads.publish(backend.name, backend.counts)
        self._changed.clear()
        self._tell_placed()
        for backend in self._backends.values():
            counts = self._loads.others(backend.name)
            if counts != backend.elsewhere:
                self._elsewhere(backend, counts)

    def heard(self, message: bytes) -> None:
        """Note where another process has sent prompts; what is no such message changes nothing."""
        try:
            placed = _PLACED.decode(message)
            prompts = [np.frombuffer(keys, "<u8").tolist() for _, _, keys in placed]
        except (msgspec.DecodeError, ValueError):
            return
        named = {backend.name: backend for backend in self._backends.values()}
        for (model, name, _), numbers in zip(placed, prompts, strict=True):
            backend = named.get(name)
            if backend is not None and model in backend.models:
                self._contents.placed(backend, model, numbers)

    def _elsewhere(self, backend: Backend, counts: Counts) -> None:
        had_room, backend.elsewhere = backend.has_room, counts
        backend.load_changed()
        if backend.has_room != had_room:
            backend.standing_changed()
            if not had_room:
                self._hooks.on_room()

    def _tell_placed(self) -> None:
        if self._placed and self.tell is not None:
            self.tell(msgspec.msgpack.encode(self._placed))
        self._placed.clear()
        self._num_bytes = 0


def _packed(keys: PrefixKeys) -> bytes:
    return np.array(keys[:_MAX_KEYS], "<u8").tobytes()
