"""A value as a response."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.responses import Response


def json_response(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a value as JSON."""
    return Response(msgspec.json.encode(content), status, headers, "application/json")
