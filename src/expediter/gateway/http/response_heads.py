"""The heads of responses, read strictly: what is ambiguous is no response."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from expediter.gateway.http.wire import BODILESS, Headers

_STATUS_LINE: Final = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: [^\r\n]*)?\r\n")
_HEADER: Final = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([^\r\n\x00]*?)[ \t]*\r\n")


class ResponseHead(NamedTuple):
    """Status and headers of a response.

    Attributes:
        headers: but for Content-Length.
        length: of the body, None if it is chunked or ends with the connection.
        is_chunked: body bytes come with their framing.
        is_event_stream: the body is `text/event-stream`.
        memory: for what is made of the headers; heads that differ in their length alone share it.
    """

    status: int
    headers: Headers
    length: int | None
    is_chunked: bool
    is_event_stream: bool
    memory: dict[str, bytes]

    def with_length(self, length: int) -> ResponseHead:
        """Return the same head for a body of another length."""
        return ResponseHead(self.status, self.headers, length, False, self.is_event_stream, self.memory)


class ResponseError(Exception):
    """A response is malformed."""


def parse_response_head(raw: bytes) -> tuple[ResponseHead, bool]:
    """Return a response's head, and whether the connection may be used again behind its body.

    Args:
        raw: status line and headers, without the empty line that ends them.
    Raises:
        ResponseError: it is malformed, or its body's end is ambiguous.
    """
    first = _STATUS_LINE.match(raw)
    if first is None:
        raise ResponseError
    status, position = int(first[2]), first.end()
    keeps_alive = first[1] == b"1"
    headers: Headers = []
    length: int | None = None
    is_chunked = is_event_stream = False
    for match in _HEADER.finditer(raw, position):
        if match.start() != position:
            raise ResponseError
        position = match.end()
        name, value = match[1].lower(), match[2]
        if name != b"content-length":
            headers.append((name, value))
        else:
            if not value.isdigit() or (length is not None and length != int(value)):
                raise ResponseError
            length = int(value)
        if name == b"transfer-encoding":
            if is_chunked or value.lower() != b"chunked":
                raise ResponseError
            is_chunked = True
        elif name == b"content-type":
            is_event_stream = is_event_stream or value.startswith(b"text/event-stream")
        elif name == b"connection":
            tokens = value.lower()
            keeps_alive = b"close" not in tokens and (keeps_alive or b"keep-alive" in tokens)
    if position != len(raw) or (is_chunked and length is not None):
        raise ResponseError
    if status in BODILESS:
        length, is_chunked = 0, False
    head = ResponseHead(status, headers, length, is_chunked, is_event_stream, {})
    return head, keeps_alive and (is_chunked or length is not None)
