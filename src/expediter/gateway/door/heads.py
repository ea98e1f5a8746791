"""Which headers pass the door, in either direction: those on a list, and no others."""

from __future__ import annotations

from typing import Final

from expediter.gateway.backends.backend import Backend
from expediter.gateway.http.response_heads import ResponseHead
from expediter.gateway.http.wire import CHUNKED_HEADER, Headers, HttpRequest, status_line

TRACEPARENT: Final = b"traceparent"
_TO_BACKEND: Final = frozenset({b"content-type", b"accept", b"user-agent", TRACEPARENT, b"tracestate", b"session_id"})
_TO_BACKEND_PREFIXES: Final = (b"x-session-", b"openai-", b"anthropic-")
_TO_CLIENT: Final = frozenset({b"content-type", b"content-encoding", b"retry-after", b"cache-control"})
_TO_CLIENT_PREFIXES: Final = (b"openai-", b"x-ratelimit-", b"anthropic-")
_PASSED: Final = "passed"
OWN_ID: Final = b"x-expediter-request-id"
"""Tells a backend that is an Expediter the door's id of a request, so that both parts of its story can be joined."""


def forwarded_headers(request: HttpRequest, request_id: bytes, shown_id: bytes, *, is_traced: bool) -> bytes:
    """Return what every backend is told with a request, up to the end of the head.

    Args:
        request_id: the door's. `shown_id`: the client's own, or the door's.
        is_traced: each attempt has a span of its own, which stands for the client's as the backend's parent.
    """
    passed = request.memory.get(_PASSED)
    if not isinstance(passed, bytes):
        parts: list[bytes] = []
        for name, value in request.headers:
            if is_traced and name == TRACEPARENT:
                continue
            if name in _TO_BACKEND or name.startswith(_TO_BACKEND_PREFIXES):
                parts += (name, b": ", value, b"\r\n")
        passed = request.memory[_PASSED] = b"".join(parts)
    ids = b"x-request-id: %b\r\n%b: %b\r\n" % (shown_id, OWN_ID, request_id)
    return b"%b%b\r\n" % (passed, ids)


def request_line(request: HttpRequest, backend: Backend, traceparent: bytes | None, num_body_bytes: int) -> bytes:
    """Return the part of a forwarded head that differs between attempts.

    For one head of a client's and one backend it is always the same, but for the trace and the length.

    Args:
        traceparent: None if no trace is kept.
    """
    line = request.memory.get(backend.replica_id)
    if not isinstance(line, bytes):
        address, authorization = backend.address, backend.authorization
        method, path, host = (each.encode("ascii") for each in (request.method, address.base_path, address.host_header))
        key = b"" if authorization is None else b"authorization: %b\r\n" % authorization
        line = b"%b %b%b HTTP/1.1\r\nhost: %b\r\n%b" % (method, path, request.target, host, key)
        request.memory[backend.replica_id] = line
    parent = b"" if traceparent is None else b"traceparent: %b\r\n" % traceparent
    return b"%b%bcontent-length: %d\r\n" % (line, parent, num_body_bytes)


def passed_headers(head: ResponseHead, shown_id: bytes) -> Headers:
    """Return what a client is told of a backend's headers."""
    passed = [pair for pair in head.headers if pair[0] in _TO_CLIENT or pair[0].startswith(_TO_CLIENT_PREFIXES)]
    passed.append((b"x-request-id", shown_id))
    return passed


def framed_head(head: ResponseHead, shown_id: bytes) -> bytes:
    """Return the head for a body that is passed on with its framing, without the last line."""
    passed = head.memory.get(_PASSED)
    if passed is None:
        parts = [status_line(head.status)]
        for name, value in head.headers:
            if name in _TO_CLIENT or name.startswith(_TO_CLIENT_PREFIXES):
                parts += (name, b": ", value, b"\r\n")
        passed = head.memory[_PASSED] = b"".join(parts)
    if head.is_chunked:
        return b"%bx-request-id: %b\r\n%b" % (passed, shown_id, CHUNKED_HEADER)
    return b"%bx-request-id: %b\r\ncontent-length: %d\r\n" % (passed, shown_id, head.length or 0)
