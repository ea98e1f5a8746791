"""What a client is told: OpenAI's shape, and nothing of our insides."""

from __future__ import annotations

import json

import pytest
from starlette.exceptions import HTTPException

from expediter.core.errors import CapacityError, InvariantError, ReplicaError, RequestError
from expediter.gateway.errors import ApiError, to_api_error


@pytest.mark.parametrize(
    ("error", "status", "message", "param"),
    [
        (ApiError(418, "as it is", param="p"), 418, "as it is", "p"),
        (RequestError("wrong", param="n"), 400, "wrong", "n"),
        (CapacityError("no replica is up"), 503, "no replica is up", None),
        (ReplicaError("pid 7 at /secret"), 500, "the request could not be finished", None),
        (HTTPException(404), 404, "Not Found", None),
        (InvariantError("/secret"), 500, "internal error", None),
        (ValueError("/secret"), 500, "internal error", None),
    ],
)
def test_mapping(error: Exception, status: int, message: str, param: str | None) -> None:
    mapped = to_api_error(error)
    assert mapped.status == status
    body = json.loads(mapped.response().body)
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert (body["error"]["message"], body["error"]["param"]) == (message, param)
    assert mapped.response().headers["content-type"] == "application/json"
