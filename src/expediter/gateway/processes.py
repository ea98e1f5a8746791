"""What the processes of one gateway know of each other: loads and used limits in shared memory, placements by datagram.

Each process has a row and writes nothing else; reading the others' takes no lock. A number may be a moment old, never
torn: it is one aligned double. Nothing here has to arrive for a request to be answered.
"""

from __future__ import annotations

import asyncio
import fcntl
import math
import mmap
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from expediter.control.limits import Exceeded, Reservation, TenantLimits, Usage
from expediter.gateway.backends.backend import Counts
from expediter.gateway.backends.registry import Backends
from expediter.gateway.backends.sharing import Sharing
from expediter.telemetry.process_place import ProcessPlace

_MAX_NAMES: Final = 1024
_NAME_BYTES: Final = 192
_NUM_VALUES: Final = 3
_ROW_VALUES: Final = _MAX_NAMES * _NUM_VALUES
_NAMES_BYTES: Final = _MAX_NAMES * _NAME_BYTES
_MAX_DATAGRAM: Final = 16384
_DATAGRAMS_AT_ONCE: Final = 64
_PLACEMENTS: Final = "placements"
_BACKEND: Final = "backend "
_TENANT: Final = "tenant "
_LOOK_S: Final = 0.01
"""Between two looks for room that has come free elsewhere; who routes a request looks at the others' loads anyway."""
_LISTEN_S: Final = 0.25
"""Between two looks at what the others have given out to tenants that send nothing here."""

Values = tuple[int, int, int]
_NOTHING: Final[Values] = (0, 0, 0)


class SharedTable:
    """Three numbers per process and name, in a file that all processes map.

    Args:
        folder: theirs alone; the file is in it.
        slot: row of this process; it goes on with what its predecessor there has written.
    """

    def __init__(self, folder: Path, slot: int, num_slots: int) -> None:
        size = _NAMES_BYTES + num_slots * _ROW_VALUES * 8
        self._file = os.open(folder / "table", os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self._file, size)
        self._memory = mmap.mmap(self._file, size)
        self._values = memoryview(self._memory)[_NAMES_BYTES:].cast("d")
        self._own = slot * _ROW_VALUES
        self._others = [other * _ROW_VALUES for other in range(num_slots) if other != slot]
        self._columns: dict[str, int | None] = {}

    def publish(self, name: str, first: int, second: int, third: int) -> None:
        """Write this process's numbers of a name; none of a name for which there is no room."""
        column = self._column(name)
        if column is not None:
            at = self._own + column
            values = self._values
            values[at], values[at + 1], values[at + 2] = first, second, third

    def own(self, name: str) -> Values:
        """Return what this process, or its predecessor, has written."""
        column = self._column(name)
        return _NOTHING if column is None else self._at(self._own + column)

    def others(self, name: str) -> Values:
        """Return the sums over the other processes."""
        column = self._column(name)
        if column is None:
            return _NOTHING
        if len(self._others) == 1:
            return self._at(self._others[0] + column)
        first, second, third = zip(*(self._at(row + column) for row in self._others), strict=True)
        return sum(first), sum(second), sum(third)

    def clear(self, prefix: str) -> None:
        """Forget what this process, or its predecessor, has written of names that begin so."""
        for name in self.names(prefix):
            self.publish(name, *_NOTHING)

    def names(self, prefix: str) -> list[str]:
        """Return the names that begin so, of any process."""
        names: list[str] = []
        for number in range(_MAX_NAMES):
            name = self._name(number)
            if not name:
                break
            if name.startswith(prefix.encode()):
                names.append(name.decode())
        return names

    def _at(self, at: int) -> Values:
        values = self._values
        return int(values[at]), int(values[at + 1]), int(values[at + 2])

    def _column(self, name: str) -> int | None:
        """Return where a name's numbers are in each row; the first process that asks takes a place for it."""
        if name in self._columns:
            return self._columns[name]
        key = name.encode()[:_NAME_BYTES]
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            found = self._find(key)
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)
        self._columns[name] = None if found is None else found * _NUM_VALUES
        return self._columns[name]

    def _find(self, key: bytes) -> int | None:
        for number in range(_MAX_NAMES):
            known = self._name(number)
            if not known:
                begin = number * _NAME_BYTES
                self._memory[begin : begin + len(key)] = key
                return number
            if known == key:
                return number
        return None

    def _name(self, number: int) -> bytes:
        return self._memory[number * _NAME_BYTES : (number + 1) * _NAME_BYTES].rstrip(b"\0")


class SharedLoads:
    """The loads of backends; the numbers are those of `Counts`. What a predecessor had there has ended with it."""

    def __init__(self, table: SharedTable) -> None:
        self._table = table
        table.clear(_BACKEND)

    def publish(self, name: str, counts: Counts) -> None:
        """Tell the others what this process has at a backend."""
        self._table.publish(_BACKEND + name, *counts)

    def others(self, name: str) -> Counts:
        """Return what the others have there."""
        return Counts(*self._table.others(_BACKEND + name))


class SharedLimits:
    """Tenants' limits over all processes; the three numbers are those of `Usage`.

    What a predecessor has given out counts on, but for its requests in flight, which have ended with it.
    """

    def __init__(self, limits: TenantLimits, table: SharedTable) -> None:
        self._limits = limits
        self._table = table
        self._before: dict[str, Usage] = {}
        for name in table.names(_TENANT):
            self._take_up(name.removeprefix(_TENANT))

    def listen(self, now_s: float) -> None:
        """Hear what the others have given out, so that it is known when."""
        self._limits.listen(self._others, now_s)

    def reserve(self, tenant: str, num_tokens: int, now_s: float) -> Reservation | Exceeded:
        """As `TenantLimits.reserve`."""
        if tenant not in self._before:
            self._take_up(tenant)
        reserved = self._limits.reserve(tenant, num_tokens, now_s, self._others(tenant))
        self._publish(tenant)
        return reserved

    def refusal(self, tenant: str, now_s: float) -> Exceeded | None:
        """As `TenantLimits.refusal`."""
        return self._limits.refusal(tenant, now_s, self._others(tenant))

    def publish(self) -> None:
        """Tell the others what has been settled meanwhile."""
        for tenant in self._before:
            self._publish(tenant)

    def _take_up(self, tenant: str) -> None:
        """Go on with what this process's row says."""
        num_requests, num_tokens, _ = self._table.own(_TENANT + tenant)
        self._before[tenant] = Usage(num_requests, num_tokens, 0)
        self._publish(tenant)

    def _others(self, tenant: str) -> Usage:
        return Usage(*self._table.others(_TENANT + tenant))

    def _publish(self, tenant: str) -> None:
        usage, before = self._limits.usage(tenant), self._before[tenant]
        self._table.publish(
            _TENANT + tenant,
            before.num_requests + usage.num_requests,
            before.num_tokens + usage.num_tokens,
            usage.num_running,
        )


class Placements:
    """Tells the other processes what was sent where, and hears it from them.

    Attributes:
        num_dropped: messages that somebody had no room for; a hit may be missed for each.
    """

    def __init__(self, own: Path, others: Sequence[Path]) -> None:
        self.num_dropped = 0
        self._others = [str(other) for other in others]
        self._path = own
        own.unlink(missing_ok=True)  # of a predecessor that was killed
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind(str(own))

    def start(self, hear: Callable[[bytes], None]) -> None:
        """Begin to hear the others."""
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._receive, hear)

    def stop(self) -> None:
        """Hear no more."""
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        self._path.unlink(missing_ok=True)

    def tell(self, datagram: bytes) -> None:
        """Tell all others."""
        for other in self._others:
            try:
                self._socket.sendto(datagram, other)
            except OSError:  # full, or not there at the moment
                self.num_dropped += 1

    def _receive(self, hear: Callable[[bytes], None]) -> None:
        for _ in range(_DATAGRAMS_AT_ONCE):
            try:
                datagram = self._socket.recv(_MAX_DATAGRAM)
            except BlockingIOError:
                return
            hear(datagram)


class SharedKnowledge:
    """One process's part in it.

    Attributes:
        loads: of backends.
        limits: of tenants, over all processes.
    """

    def __init__(self, place: ProcessPlace, limits: TenantLimits) -> None:
        own = place.own(_PLACEMENTS)
        assert place.folder is not None
        assert own is not None
        self._table = SharedTable(place.folder, place.slot, place.num_slots)
        self._placements = Placements(own, place.others(_PLACEMENTS))
        self._timer: asyncio.TimerHandle | None = None
        self._listened_s = -math.inf
        self.loads = SharedLoads(self._table)
        self.limits = SharedLimits(limits, self._table)

    def start(self, backends: Backends) -> None:
        """Begin to tell the others, to look at them, and to hear them."""
        sharing = backends.sharing
        assert sharing is not None
        sharing.tell = self._placements.tell
        self._placements.start(sharing.heard)
        self._look(sharing)

    def stop(self) -> None:
        """Let go. What ends after this is counted no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._placements.stop()

    def _look(self, sharing: Sharing) -> None:
        now_s = time.monotonic()
        sharing.exchange(now_s)
        self.limits.publish()
        if now_s - self._listened_s >= _LISTEN_S:
            self._listened_s = now_s
            self.limits.listen(now_s)
        self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look, sharing)
