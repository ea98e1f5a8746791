"""Errors on the wire, in OpenAI's shape. Messages are ours: no paths, no reprs of what a client sent."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from expediter.core.errors import CapacityError, ReplicaError, RequestError

logger = logging.getLogger(__name__)


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

    def response(self) -> Response:
        return Response(self.body(), self.status, dict(self.headers or {}), "application/json")


def bad_request(message: str, param: str | None = None) -> ApiError:
    """Return the error for input that can never work."""
    return ApiError(400, message, param=param)


def overloaded(message: str, code: str | None = None) -> ApiError:
    """Return the error for work that cannot be taken now."""
    return ApiError(503, message, type="service_unavailable", code=code, headers={"Retry-After": "1"})


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
            return overloaded(str(error))
        case ReplicaError():
            return replica_lost()
        case HTTPException():
            return ApiError(error.status_code, error.detail, headers=error.headers)
    logger.error("internal error", exc_info=error)
    return ApiError(500, "internal error", type="server_error")


async def handle_error(request: HttpRequest, error: Exception) -> Response:  # noqa: ARG001 - starlette's signature
    """Starlette's exception handler for all of the above."""
    return to_api_error(error).response()
