"""Where the chunks of a chunked body end (RFC 9112, 7.1), so that they can be passed on as they are."""

from __future__ import annotations

import re
from typing import Final

from expediter.gateway.http.wire import LAST_CHUNK

_SIZE: Final = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]{0,255})?\r\n")
_PARTIAL: Final = re.compile(rb"[0-9A-Fa-f]{1,15}[ \t]*(?:;[^\r\n]{0,255})?\r?")
_MAX_SIZE_LINE: Final = 300
_MAX_TRAILER: Final = 16384
_MAX_HELD: Final = 65536
"""A chunk up to here is passed on whole or not at all; of a longer one, what is there goes on."""
NUM_PLAIN: Final = 4096


def _plain_starts() -> list[bytes | tuple[bytes, bytes]]:
    starts: list[bytes | tuple[bytes, bytes]] = [b"no chunk"] * NUM_PLAIN
    for size in range(1, NUM_PLAIN):
        lower, upper = b"%x\r\n" % size, b"%X\r\n" % size
        num_bytes = len(lower) + size + 2
        if num_bytes < NUM_PLAIN:
            starts[num_bytes] = lower if lower == upper else (lower, upper)
    return starts


PLAIN_STARTS: Final = _plain_starts()
"""By the number of bytes, below `NUM_PLAIN`, of a piece: how it begins if it is one whole chunk of the plain form.

That form is a size in as few hexadecimal digits as it takes and nothing behind it, which is what servers send. Whether
a piece is one whole chunk, which it usually is, is then seen without reading the size.
"""


class ChunkError(Exception):
    """The body is not chunked as it should be."""


class ChunkTracker:
    """Cuts a stream of bytes at the ends of chunks.

    Args:
        unwraps: return what the chunks carry instead of the chunks.
    Attributes:
        ended: the last chunk has been seen; bytes behind it are refused.
        at_boundary: what was passed on so far ends with a whole chunk, so that another may follow.
    """

    __slots__ = ("_held", "_left", "_payload", "at_boundary", "ended")

    def __init__(self, *, unwraps: bool = False) -> None:
        self._payload: list[bytes] | None = [] if unwraps else None
        self._held = b""
        self._left = 0  # of a long chunk: bytes that are still to come, the CRLF behind them included
        self.at_boundary = True
        self.ended = False

    @property
    def is_between(self) -> bool:
        """Whether all bytes that came have been passed on in whole chunks, and more are to come."""
        return not self._held and not self._left and not self.ended

    def feed(self, data: bytes) -> bytes:
        """Return what may be passed on now, framing included unless it unwraps. Trailers are left out.

        Raises:
            ChunkError: the framing is broken, or bytes follow the end.
        Cost: no copy, where data holds whole chunks.
        """
        if self._payload is None:
            return self._feed(data)
        self._feed(data)
        payload = b"".join(self._payload)
        self._payload.clear()
        return payload

    def _feed(self, data: bytes) -> bytes:
        if self._held:
            data, self._held = self._held + data, b""
        position = 0
        if self._left:
            position = self._skip(data)
            if self._left:
                return self._hold(data, position)
        while position < len(data):
            if self.ended:
                raise ChunkError("bytes follow the last chunk")
            match = _SIZE.match(data, position)
            if match is None:
                if len(data) - position > _MAX_SIZE_LINE or not _may_become_size(data, position):
                    raise ChunkError("a chunk's size is malformed")
                return self._hold(data, position)
            size = int(match[1], 16)
            if not size:
                return self._end(data, position, match.end())
            end = match.end() + size + 2
            if end > len(data):
                if size > _MAX_HELD:
                    self._left = end - match.end()
                    position = self._skip(data, match.end())
                return self._hold(data, position)
            if data[end - 2 : end] != b"\r\n":
                raise ChunkError("a chunk is longer than it says")
            if self._payload is not None:
                self._payload.append(data[match.end() : end - 2])
            position = end
        self.at_boundary = True
        return data

    def _hold(self, data: bytes, position: int) -> bytes:
        """Keep what begins at a position for later; return what comes before it."""
        self._held = data[position:]
        self.at_boundary = not self._left
        return data[:position]

    def _skip(self, data: bytes, position: int = 0) -> int:
        """Go on in a long chunk; return where it, or what is there of it, ends. Its CRLF is not passed in parts."""
        there = len(data) - position
        if self._payload is not None:
            self._payload.append(data[position : position + min(there, self._left - 2)])
        if there >= self._left:
            position += self._left
            if data[position - 2 : position] != b"\r\n":
                raise ChunkError("a chunk is longer than it says")
            self._left = 0
            return position
        taken = min(there, self._left - 2)
        self._left -= taken
        return position + taken

    def _end(self, data: bytes, position: int, behind_size: int) -> bytes:
        """Take the last chunk, and trailers if there are any."""
        if data[behind_size : behind_size + 2] == b"\r\n":
            end = behind_size + 2
        else:
            found = data.find(b"\r\n\r\n", behind_size)
            if found < 0:
                if len(data) - position > _MAX_TRAILER:
                    raise ChunkError("the trailers are too large")
                return self._hold(data, position)
            end = found + 4
        if end < len(data):
            raise ChunkError("bytes follow the last chunk")
        self.ended = self.at_boundary = True
        if end - position == len(LAST_CHUNK):
            return data
        return data[:position] + LAST_CHUNK


def _may_become_size(data: bytes, position: int) -> bool:
    """Return whether more bytes can make the rest a chunk's size."""
    return _PARTIAL.fullmatch(data, position) is not None
