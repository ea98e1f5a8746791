"""Heads that came before: who is at the other end says the same each time, but for the length of the body.

What was parsed once would be parsed to the same again, so a head that equals an earlier one in every byte beside the
digits of its length is not. Of requests only heads are kept whose meaning is plain: a POST of HTTP/1.1 with one
Content-Length, no other framing, no name given twice, on a connection that stays open.
"""

from __future__ import annotations

import re
from typing import Final

from expediter.gateway.http.wire import HttpRequest

_LENGTH: Final = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ?([0-9]{1,9})\r\n")
_MAX_DIGITS: Final = 9
_MAX_HEADS: Final = 8
_MAX_BYTES: Final = 4096
_CHANGING: Final = frozenset({b"transfer-encoding", b"connection", b"expect", b"upgrade"})
"""Names that change what follows a head."""


class HeadPattern:
    """A head, for any length of its body.

    Args:
        head: whole, the empty line included.
    Attributes:
        length: that this head gives for its body; None if it gives none: then only the same in every byte fits.
        is_plain: it may be kept: it is short, and speaks of a length once at most.
    """

    __slots__ = ("_after", "_before", "length")

    length: int | None

    def __init__(self, head: bytes) -> None:
        match = _LENGTH.search(head)
        if match is None:
            self.length, self._before, self._after = None, head, b""
        else:
            self.length = int(match[1])
            self._before, self._after = head[: match.start(1)], head[match.end(1) :]

    @property
    def is_plain(self) -> bool:
        head = self._before + self._after
        return len(head) <= _MAX_BYTES and head.lower().count(b"content-length") <= 1

    def find(self, data: bytes) -> tuple[int, int] | None:
        """Return the body's length, 0 if the head gives none, and where the body begins; None if data begins otherwise.

        Cost: two comparisons of bytes.
        """
        before = self._before
        if not data.startswith(before):
            return None
        begin = len(before)
        if self.length is None:
            return 0, begin
        end = data.find(b"\r", begin, begin + _MAX_DIGITS + 1)
        digits = data[begin:end]
        if end < 0 or not digits.isdigit() or not data.startswith(self._after, end):
            return None
        return int(digits), end + len(self._after)


def pattern_of(message: bytes) -> HeadPattern | None:
    """Return the pattern of the head that a whole message begins with; None if that gives no length, or another one."""
    end = message.find(b"\r\n\r\n") + 4
    pattern = HeadPattern(message[:end])
    found = None if pattern.length is None else pattern.find(message)
    return pattern if found is not None and sum(found) == len(message) else None  # the body's length, and its place


class KnownHeads:
    """The heads of one connection's requests, few and forgotten together."""

    def __init__(self) -> None:
        self._requests: list[tuple[HeadPattern, HttpRequest]] = []

    def learn(self, pattern: HeadPattern, request: HttpRequest) -> None:
        """Keep a head that was parsed and belongs to a request that is whole, if it is one of the plain ones."""
        fields = request.fields
        if request.method != "POST" or request.version != "1.1" or request.length != pattern.length:
            return
        if len(fields) != len(request.headers) or not _CHANGING.isdisjoint(fields):
            return
        if not pattern.is_plain:
            return
        if len(self._requests) >= _MAX_HEADS:
            self._requests.clear()
        self._requests.append((pattern, request.again(0, b"", request.arrived_s)))  # its body is not kept

    def request(self, data: bytes, now_s: float) -> HttpRequest | None:
        """Return the request that data is, as a whole and with nothing behind it; None if its head is not known."""
        for pattern, known in self._requests:
            found = pattern.find(data)
            if found is not None:
                length, body_at = found
                return known.again(length, data[body_at:], now_s) if body_at + length == len(data) else None
        return None
