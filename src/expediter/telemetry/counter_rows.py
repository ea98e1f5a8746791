"""Rows of counters in memory that other processes can read, and that outlives the process that counts.

The gateway's processes count each for itself; whichever is asked for the metrics adds up all files. A process that is
started again in its predecessor's place goes on with its file, so no sum ever falls.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

Key = tuple[str, ...]
"""Name of a family of metrics, then the values of its labels."""

_SIZE: Final = 2 << 20
"""Of a file; what is not written takes no room on a disk or in memory."""
_HEADER: Final = struct.Struct("<Q")  # bytes in use; written last, so that a reader sees whole rows only
_ROW: Final = struct.Struct("<II")  # length of the key, number of values
_ALIGNMENT: Final = 8
_KEYS: Final = msgspec.msgpack.Decoder(Key)


class CounterRows:
    """Rows of float64 in a file, or in memory of this process alone.

    Args:
        path: of the file; None for no file. One process at a time may write to it.
    """

    def __init__(self, path: Path | None = None) -> None:
        if path is None:
            self._memory = mmap.mmap(-1, _SIZE)
        else:
            with path.open("a+b") as file:
                file.truncate(_SIZE)
                self._memory = mmap.mmap(file.fileno(), _SIZE)
        self.values: Final = memoryview(self._memory).cast("d")
        """All values; a row's begin at what `place` returned."""
        self._places = {key: place for key, place, _ in _rows(self._memory)}
        self._end = max(_used(self._memory), _HEADER.size)

    def place(self, key: Key, num_values: int, *, spare: int = 0) -> int | None:
        """Return where in `values` a row begins, made of zeros if it is new.

        Args:
            spare: bytes that must be left behind it.
        Returns:
            None if there is no room for it.
        """
        known = self._places.get(key)
        if known is not None:
            return known
        name = msgspec.msgpack.encode(key)
        start = _aligned(self._end + _ROW.size + len(name))
        end = start + num_values * 8
        if end + spare > _SIZE:
            return None
        _ROW.pack_into(self._memory, self._end, len(name), num_values)
        self._memory[self._end + _ROW.size : self._end + _ROW.size + len(name)] = name
        self._memory[start:end] = bytes(end - start)  # a predecessor may have died half-way through a longer row
        self._end = end
        _HEADER.pack_into(self._memory, 0, end)
        place = start // 8
        self._places[key] = place
        return place

    def rows(self) -> dict[Key, list[float]]:
        """Return what is counted here."""
        return {key: list(self.values[place : place + number]) for key, place, number in _rows(self._memory)}


def read_rows(path: Path) -> dict[Key, list[float]]:
    """Return what another process counts."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        return {key: list(struct.unpack_from(f"<{number}d", memory, place * 8)) for key, place, number in _rows(memory)}


def summed(parts: Sequence[dict[Key, list[float]]]) -> dict[Key, list[float]]:
    """Return the sums of rows of the same key."""
    total: dict[Key, list[float]] = {}
    for rows in parts:
        for key, values in rows.items():
            known = total.get(key)
            total[key] = values if known is None else [a + b for a, b in zip(known, values, strict=True)]
    return total


def _used(memory: mmap.mmap) -> int:
    return int(_HEADER.unpack_from(memory, 0)[0])


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _rows(memory: mmap.mmap) -> Iterator[tuple[Key, int, int]]:
    """Yield key, place and number of values of each row."""
    offset, end = _HEADER.size, _used(memory)
    while offset < end:
        name_length, number = _ROW.unpack_from(memory, offset)
        name_at = offset + _ROW.size
        start = _aligned(name_at + name_length)
        yield _KEYS.decode(memory[name_at : name_at + name_length]), start // 8, number
        offset = start + number * 8
