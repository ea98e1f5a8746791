"""Errors on the wire, in OpenAI's shape or Anthropic's. Messages are ours: no paths, no reprs of what a client sent."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from expediter.control.limits import Exceeded, Limit, Limits
from expediter.core.errors import CapacityError, ExpediterError, ReplicaError, RequestError

logger = logging.getLogger(__name__)


CHAT_PATH: Final = "/v1/chat/completions"
MESSAGES_PATH: Final = "/v1/messages"
RESPONSES_PATH: Final = "/v1/responses"
_MESSAGES_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """What the client is told when its request fails.

    Attributes:
        status: HTTP status.
        type: OpenAI's error type.
        param: field at fault, if there is one.
        code: machine-readable reason, if there is one.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = headers

    def body(self) -> bytes:
        """Return the JSON body."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def body_at(self, path: str) -> bytes:
        """Return the JSON body in the shape of the API at a path: Anthropic's has one of its own."""
        if not path.startswith(MESSAGES_PATH):
            return self.body()
        kind = _MESSAGES_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": self.message}})

    def event_at(self, path: str, sequence_number: int) -> bytes:
        """Return the server-sent event that tells of it in a stream of the API at a path.

        Args:
            sequence_number: above that of every event before; OpenAI's responses number theirs, the others do not.
        """
        if path.startswith(MESSAGES_PATH):
            return b"event: error\ndata: %b\n\n" % self.body_at(path)
        if path.startswith(RESPONSES_PATH):
            told = {"code": self.code or self.type, "message": self.message, "param": self.param}
            event = {"type": "error", **told, "sequence_number": sequence_number}
            return b"event: error\ndata: %b\n\n" % msgspec.json.encode(event)
        return b"data: %b\n\n" % self.body()

    def response(self, path: str = "") -> Response:
        return Response(self.body_at(path), self.status, dict(self.headers or {}), "application/json")


def bad_request(message: str, param: str | None = None) -> ApiError:
    """Return the error for input that can never work."""
    return ApiError(400, message, param=param)


def no_such_model(names: Iterable[str]) -> ApiError:
    """Return the error for a model that is not there, or not for this tenant: it is told the same."""
    known = ", ".join(names) or "none at present"
    return ApiError(404, f"no such model; there is: {known}", param="model", code="model_not_found")


def overloaded(message: str, code: str | None = None, retry_after_s: float = 1.0) -> ApiError:
    """Return the error for work that cannot be taken now, but may be in so many seconds."""
    return ApiError(503, message, type="service_unavailable", code=code, headers=retry_after(retry_after_s))


def retry_after(seconds: float) -> dict[str, str]:
    """Return the header that says when to come back: whole seconds, not too early, at least 1; none for never."""
    return {"Retry-After": str(max(1, math.ceil(seconds)))} if math.isfinite(seconds) else {}


def over_limit(exceeded: Exceeded, limits: Limits) -> ApiError:
    """Return the error for a request that its tenant's limits keep out; in OpenAI's shape, with the limit as type."""
    match exceeded.limit:
        case Limit.REQUESTS:
            what = f"{limits.max_requests_per_minute} requests per minute"
        case Limit.TOKENS:
            what = f"{limits.max_tokens_per_minute} tokens per minute"
        case Limit.CONCURRENCY:
            what = f"{limits.max_concurrent_requests} requests at a time"
    message = f"the limit of {what} is reached"
    if not math.isfinite(exceeded.retry_after_s):
        message = f"the request may take more than the limit of {what}; shorten the prompt or lower max_tokens"
    headers = retry_after(exceeded.retry_after_s)
    return ApiError(429, message, type=exceeded.limit.value, code="rate_limit_exceeded", headers=headers)


def deadline_exceeded() -> ApiError:
    """Return the error for a request whose deadline passed while it waited."""
    return ApiError(504, "the deadline passed before the request was started", type="timeout", code="deadline_exceeded")


def replica_lost() -> ApiError:
    """Return the error for a request whose replica could not finish it."""
    return ApiError(500, "the request could not be finished", type="server_error", code="replica_error")


def to_api_error(error: Exception) -> ApiError:
    """Return what the client is told of an exception; what is not its fault keeps its details to the log."""
    match error:
        case ApiError():
            return error
        case RequestError():
            return bad_request(str(error), error.param)
        case CapacityError():
            return overloaded(str(error), retry_after_s=error.retry_after_s)
        case ReplicaError():
            return replica_lost()
        case RecursionError():
            return bad_request("the request is nested too deeply")
        case HTTPException():
            return ApiError(error.status_code, error.detail, headers=error.headers)
    logger.error("internal error", exc_info=error)
    return ApiError(500, "internal error", type="server_error")


async def handle_error(request: HttpRequest, error: Exception) -> Response:
    """Starlette's exception handler for all of the above."""
    return to_api_error(error).response(request.url.path)


ERROR_HANDLERS: Final = dict.fromkeys(
    (ApiError, ExpediterError, RecursionError, HTTPException, Exception), handle_error
)
"""Of every application here."""
