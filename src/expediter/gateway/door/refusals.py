"""What the door itself tells clients, in OpenAI's shape."""

from __future__ import annotations

from expediter.control.health import Failure
from expediter.gateway.errors import ApiError, overloaded
from expediter.gateway.http.reply import Answer
from expediter.telemetry.exchanges import Outcome


def answer(error: ApiError, shown_id: bytes | None = None, path: str = "") -> Answer:
    """Return an error as a whole response, in the shape of the API at `path`."""
    headers = [(b"content-type", b"application/json")]
    headers += [(name.lower().encode("ascii"), value.encode("ascii")) for name, value in (error.headers or {}).items()]
    if shown_id is not None:
        headers.append((b"x-request-id", shown_id))
    return Answer(error.status, headers, error.body_at(path))


def no_key() -> ApiError:
    return ApiError(401, "a valid API key is needed", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def nobody_up(message: str, retry_after_s: float) -> ApiError:
    return overloaded(message, "no_backend", retry_after_s)


def queue_full(retry_after_s: float) -> ApiError:
    return overloaded("all backends are busy and the queue is full", "queue_full", retry_after_s)


def too_late(retry_after_s: float) -> ApiError:
    return overloaded("the request cannot be answered in time", "late", retry_after_s)


def shutting_down(retry_after_s: float) -> ApiError:
    return overloaded("the server is shutting down", "shutting_down", retry_after_s)


def backend_failed(failure: Failure) -> ApiError:
    """Return the error for a request that a backend, or several in a row, failed to answer."""
    match failure:
        case Failure.CONNECT:
            return overloaded("no backend can be reached", "no_backend")
        case Failure.TIMEOUT:
            return ApiError(504, "the backend made no progress", type="server_error", code="backend_timeout")
    return ApiError(502, "the backend did not finish the request", type="server_error", code="backend_error")


def internal_error() -> ApiError:
    return ApiError(500, "internal error", type="server_error")


def recorded_code(error: ApiError) -> str | None:
    """Return what a record says of an error: of a limit its kind, of all others their code."""
    return error.type if outcome_of(error.status) is Outcome.OVER_LIMIT else error.code


def outcome_of(status: int) -> Outcome:
    """Return how an exchange counts whose response has this status."""
    if status < 400:
        return Outcome.OK
    if status == 429:
        return Outcome.OVER_LIMIT
    if status == 503:
        return Outcome.NO_CAPACITY
    return Outcome.CLIENT_ERROR if status < 500 else Outcome.FAILED


def broken_request(status: int, message: str) -> ApiError:
    """Return the error for what is no request that the server can take."""
    if status == 503:
        return overloaded(message)
    return ApiError(status, message, type="server_error" if status >= 500 else "invalid_request_error")
