"""Heads that a connection has brought before: a client says the same with each request, but for its body's length.

What httptools has taken once it would take again, so a head that equals an earlier one in every other byte is not
parsed again. Only heads whose meaning is plain are kept: a POST of HTTP/1.1 with one Content-Length, no other framing,
no name given twice, on a connection that stays open.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from expediter.gateway.http.wire import HttpRequest

_LENGTH: Final = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ?([0-9]{1,9})\r\n")
_MAX_HEADS: Final = 8
_MAX_BYTES: Final = 4096
_CHANGING: Final = frozenset({b"transfer-encoding", b"connection", b"expect", b"upgrade"})
"""Names that change what follows a head."""


def without_length(head: bytes) -> tuple[bytes, bytes] | None:
    """Return a head without the line that gives the body's length, and that length; None if it gives none."""
    match = _LENGTH.search(head)
    return None if match is None else (head[: match.start()] + head[match.end() - 2 :], match[1])


class Split(NamedTuple):
    """A head at the beginning of some bytes.

    Attributes:
        rest: the head without the line that gives the body's length.
        length: the value of that line.
        body_at: where the body begins.
    """

    rest: bytes
    length: int
    body_at: int


def split_head(data: bytes) -> Split | None:
    """Return the head that data begins with, None if it is not whole or gives no length."""
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return None
    match = _LENGTH.search(data, 0, end + 2)
    if match is None:
        return None
    return Split(data[: match.start()] + data[match.end() - 2 : end], int(match[1]), end + 4)


class KnownHeads:
    """The heads of one connection, few and forgotten together."""

    def __init__(self) -> None:
        self._requests: dict[bytes, HttpRequest] = {}

    def learn(self, rest: bytes, request: HttpRequest) -> None:
        """Keep a head that was parsed and belongs to a request that is whole, if it is one of the plain ones."""
        fields = request.fields
        if request.method != "POST" or request.version != "1.1" or request.length is None:
            return
        if len(fields) != len(request.headers) or not _CHANGING.isdisjoint(fields):
            return
        if len(rest) > _MAX_BYTES:
            return
        if len(self._requests) >= _MAX_HEADS:
            self._requests.clear()
        self._requests[rest] = request.again(0, b"", request.arrived_s)  # its body is not kept

    def request(self, split: Split, body: bytes, now_s: float) -> HttpRequest | None:
        """Return the request with this head and body, None if the head is not known."""
        known = self._requests.get(split.rest)
        return None if known is None else known.again(split.length, body, now_s)
