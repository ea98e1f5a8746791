"""HTTP/1.1 messages as this package holds them: requests, heads, limits."""

from __future__ import annotations

import http
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

from expediter.core.ranges import require_above_zero

Headers = list[tuple[bytes, bytes]]
"""Names in lower case; values as they came, without the white space around them."""

_REQUEST_ID: Final = re.compile(rb"[\x21-\x7e]{1,128}")
_STATUS_LINES: Final = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode("ascii") for status in http.HTTPStatus
}
CHUNKED_HEADER: Final = b"transfer-encoding: chunked\r\n"
CLOSE_HEADER: Final = b"connection: close\r\n"
KEEP_ALIVE_HEADER: Final = b"connection: keep-alive\r\n"
LAST_CHUNK: Final = b"0\r\n\r\n"
BODILESS: Final = frozenset({204, 304})
"""Statuses whose responses have no body and say nothing of its length (RFC 9110, 6.4.1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """What a client may ask of the server's memory and patience.

    Args:
        max_head_bytes: request line and headers.
        max_headers: their number.
        max_body_bytes: of one request.
        max_buffered_bytes: bodies of all requests that have not been handed on yet, together.
        max_pipelined: requests that wait on one connection for the one before them.
        head_timeout_s: from the first byte of a request to the end of its head.
        body_timeout_s: from the end of the head to the end of the body.
        keep_alive_s: an idle connection stays open for so long; longer than the pools of usual proxies and clients
            keep theirs, which should close first.
        write_buffer_bytes: response bytes that wait for a slow reader before whoever makes them is told to pause.
        write_timeout_s: a reader that takes nothing for so long, with that much waiting, is cut off.
    Raises:
        ConfigurationError: a limit is not above 0.
    """

    max_head_bytes: int = 65536
    max_headers: int = 128
    max_body_bytes: int = 16 << 20
    max_buffered_bytes: int = 512 << 20
    max_pipelined: int = 16
    head_timeout_s: float = 10.0
    body_timeout_s: float = 60.0
    keep_alive_s: float = 120.0
    write_buffer_bytes: int = 65536
    write_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        require_above_zero(self, *self.__dataclass_fields__)


class HttpRequest:
    """A request as it came in.

    Attributes:
        method: in upper case.
        target: as in the request line.
        path: of the target, percent-decoded.
        query: of the target, without `?`, as it came.
        version: "1.1" or "1.0".
        headers: all of them but for Content-Length, in order.
        length: of the body, as the head says; None if it does not.
        fields: value of each name; of one that is given more than once, the last.
        body: the whole body; empty while only the head is here.
        arrived_s: when the head was complete, monotonic clock.
        peer: address of the client, None on a Unix socket.
        sock: local address.
        context: what the application has found out from the head, for when the body is here.
        memory: for what the application may want to know again at the next request with the same head, but for the
            length of its body.
    """

    __slots__ = (
        "arrived_s",
        "body",
        "context",
        "fields",
        "headers",
        "length",
        "memory",
        "method",
        "path",
        "peer",
        "query",
        "sock",
        "target",
        "version",
    )

    def __init__(
        self,
        method: str,
        target: bytes,
        version: str,
        headers: Headers,
        arrived_s: float,
        peer: tuple[str, int] | None = None,
        sock: tuple[str, int] | None = None,
    ) -> None:
        self.method = method
        self.target = target
        self.version = version
        self.fields = dict(headers)
        given = self.fields.pop(b"content-length", None)
        self.length = None if given is None else int(given)
        self.headers = headers if given is None else [pair for pair in headers if pair[0] != b"content-length"]
        self.body = b""
        self.arrived_s = arrived_s
        self.peer = peer
        self.sock = sock
        self.context: object = None
        self.memory: dict[str | int, object] = {}
        raw_path, _, self.query = origin_form(target).partition(b"?")
        path = raw_path.decode("ascii")
        self.path = unquote(path) if "%" in path else path

    def again(self, length: int, body: bytes, now_s: float) -> HttpRequest:
        """Return a request with the same head, but for the length of its body; it shares headers and memory."""
        other = HttpRequest.__new__(HttpRequest)
        other.method, other.target, other.version = self.method, self.target, self.version
        other.path, other.query = self.path, self.query
        other.headers, other.fields, other.length = self.headers, self.fields, length
        other.peer, other.sock = self.peer, self.sock
        other.context, other.memory = None, self.memory
        other.body, other.arrived_s = body, now_s
        return other

    def repeats(self, name: bytes) -> bool:
        """Return whether a header is given more than once."""
        if len(self.fields) == len(self.headers):
            return False
        return sum(known == name for known, _ in self.headers) > 1

    @property
    def fault(self) -> str:
        """What is wrong with the head, "" if nothing.

        httptools refuses what is malformed; here is what is well-formed and still ambiguous (RFC 9112, 3.2 and 6.1).
        """
        version, fields = self.version, self.fields
        if version not in {"1.0", "1.1"}:
            return "the version of HTTP is not supported"
        encoding = fields.get(b"transfer-encoding")
        if encoding is not None and (version == "1.0" or encoding.lower() != b"chunked"):
            return "the transfer encoding is not supported"
        if (b"host" not in fields and version == "1.1") or self.repeats(b"host"):
            return "exactly one Host header is needed"
        return ""

    @property
    def client_request_id(self) -> bytes | None:
        """See the function of this name."""
        return repeatable(self.fields.get(b"x-request-id"))


def client_request_id(headers: Iterable[tuple[bytes, bytes]], header: bytes = b"x-request-id") -> bytes | None:
    """Return a client's X-Request-Id, if it gave one that may be repeated; it is never used as an id of ours."""
    return repeatable(next((value for name, value in headers if name == header), None))


def repeatable(request_id: bytes | None) -> bytes | None:
    """Return an id that a client gave, if it may stand in a response and a log."""
    return request_id if request_id is not None and _REQUEST_ID.fullmatch(request_id) else None


def origin_form(target: bytes) -> bytes:
    """Return a target's path and query; an absolute one (RFC 9112, 3.2.2) loses its scheme and host."""
    if target.startswith(b"/"):
        return target
    scheme, separator, rest = target.partition(b"://")
    if not separator or scheme.lower() not in {b"http", b"https"}:
        return target
    slash = rest.find(b"/")
    return b"/" if slash < 0 else rest[slash:]


def response_head(status: int, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return status line and headers, without the empty line that ends a head."""
    parts = [status_line(status)]
    for name, value in headers:
        parts += (name, b": ", value, b"\r\n")
    return b"".join(parts)


def status_line(status: int) -> bytes:
    """Return the first line of a response."""
    return _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


def has_body(method: str, status: int) -> bool:
    """Return whether a response to this method with this status may have a body (RFC 9110, 6.4.1)."""
    return method != "HEAD" and status not in BODILESS
