"""The OpenAPI document, from the bodies that are decoded: what it says of a field is what is checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from expediter import __version__
from expediter.gateway.bodies import refused_fields

PATH: Final = "/openapi.json"
JSON: Final = "application/json"
_Object = dict[str, Any]


class ErrorDetail(msgspec.Struct):
    """What went wrong: in words, of which kind, in which field, and for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(msgspec.Struct):
    """An error in OpenAI's shape."""

    error: ErrorDetail


class MessagesErrorDetail(msgspec.Struct):
    """What went wrong: of which kind, and in words."""

    type: str
    message: str


class MessagesError(msgspec.Struct, tag_field="type", tag="error"):
    """An error in Anthropic's shape."""

    error: MessagesErrorDetail


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One route.

    Args:
        body: what is posted; None for a GET.
        holds: fields that every answer has.
        content: types of an answer.
        refuses: statuses of errors beside those that any path may have.
        is_open: needs no key.
    """

    summary: str
    body: type[msgspec.Struct] | None = None
    holds: tuple[str, ...] = ()
    content: tuple[str, ...] = (JSON,)
    refuses: tuple[int, ...] = ()
    query: Mapping[str, str] | None = None
    error: type[msgspec.Struct] = Error
    is_open: bool = False

    @property
    def statuses(self) -> list[int]:
        """Return the statuses of its errors."""
        any_path = () if self.is_open else (401, 429)
        posted = (400, 404, 413, 500, 503, 504) if self.body is not None else ()
        return sorted({*any_path, *posted, *self.refuses})


_READY: Final = ("ready", "backends", "replicas")
_TEXT: Final = ("text/plain",)
OPERATIONS: Final[Mapping[str, Operation]] = {
    "/v1/models": Operation(summary="List the models.", holds=("object", "data")),
    "/v1/models/{name}": Operation(summary="Describe a model.", holds=("id", "object"), refuses=(404,)),
    "/health": Operation(summary="Say that the server is alive.", holds=("status",), is_open=True),
    "/ready": Operation(summary="Say whether it takes new work; 503 if not.", holds=_READY, is_open=True),
    "/version": Operation(summary="Return the version.", holds=("version",)),
    "/metrics": Operation(summary="Return the metrics for Prometheus.", content=_TEXT),
    "/server_info": Operation(summary="Return the set-up, for simulation.", holds=("preset", "policy")),
    "/steps": Operation(
        summary="Return the newest steps with their durations.",
        holds=("steps",),
        refuses=(400,),
        query={"since": "Sequence number of the first step that is wanted."},
    ),
    "/requests/{name}": Operation(
        summary="Say what held a request: by our id, the response's, or the client's own X-Request-Id.",
        refuses=(404, 503),
    ),
    "/dashboard": Operation(summary="Return the live page.", content=("text/html",), refuses=(403,)),
    "/dashboard/feed": Operation(
        summary="Return what the live page draws.",
        refuses=(400, 403),
        query={"since": "Index of the first interval that is wanted."},
    ),
    PATH: Operation(summary="Return this document.", holds=("openapi", "paths")),
}
"""What there is with and without replicas of our own; `api.operations` has those that only they serve."""
_REASONS: Final = {
    400: "The request can never be served as it is; `param` names the field.",
    401: "A valid API key is needed.",
    403: "It is on the admin listener.",
    404: "There is no such model, or no such thing.",
    413: "The body is too large.",
    429: "A limit of the tenant is reached; see `Retry-After`.",
    500: "The request could not be finished.",
    503: "The request cannot be taken now; see `Retry-After`.",
    504: "The deadline of the request passed while it waited.",
}


def document(paths: Sequence[str], operations: Mapping[str, Operation], forwarded: Sequence[str] = ()) -> _Object:
    """Return the document for the routes at these paths.

    Args:
        operations: what they do, and maybe others.
        forwarded: paths whose requests are passed on to backends as they are; what those take is theirs to say.
    Raises:
        KeyError: one of them is not described here.
    """
    described = {path: operations[path] for path in paths}
    kinds: list[type[msgspec.Struct]] = [Error, MessagesError]
    kinds += [operation.body for operation in described.values() if operation.body is not None]
    references, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    reference_of = dict(zip(kinds, references, strict=True))
    for kind in kinds:
        for name, taken in refused_fields(kind).items():
            components[kind.__name__]["properties"][name] = {"enum": [None, *taken]}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Expediter",
            "version": __version__,
            "description": "OpenAI's and Anthropic's APIs.",
        },
        "security": [{"bearer": []}, {"key": []}, {}],
        "paths": {path: _path(path, operation, reference_of) for path, operation in described.items()}
        | {path: _FORWARDED for path in forwarded if path not in described},
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


_FORWARDED: Final[_Object] = {
    "post": {
        "summary": "Pass a request on to a backend that serves its model.",
        "requestBody": {"required": True, "content": {JSON: {"schema": {"type": "object"}}}},
        "responses": {"default": {"description": "As the backend answers, or an error of the gateway's own."}},
    }
}


def _path(path: str, operation: Operation, reference_of: Mapping[type[msgspec.Struct], _Object]) -> _Object:
    error = {"content": {JSON: {"schema": reference_of[operation.error]}}}
    answer = {"type": "object", "required": list(operation.holds)}
    content = {kind: {"schema": answer} if kind == JSON else {} for kind in operation.content}
    told: _Object = {
        "summary": operation.summary,
        "responses": {
            "200": {"description": "As asked for.", "content": content},
            **{str(status): {"description": _REASONS[status], **error} for status in operation.statuses},
        },
    }
    if path == "/ready":
        told["responses"]["503"] = {"description": _REASONS[503], "content": content}
    if operation.is_open:
        told["security"] = []
    parameters = [
        {"name": name, "in": "query", "required": False, "description": text, "schema": {"type": "string"}}
        for name, text in (operation.query or {}).items()
    ]
    if "{name}" in path:
        parameters.append({"name": "name", "in": "path", "required": True, "schema": {"type": "string"}})
    if parameters:
        told["parameters"] = parameters
    if operation.body is None:
        return {"get": told}
    told["requestBody"] = {"required": True, "content": {JSON: {"schema": reference_of[operation.body]}}}
    return {"post": told}


def openapi_route(
    routes: Iterable[BaseRoute], operations: Mapping[str, Operation], forwarded: Sequence[str] = ()
) -> Route:
    """Return the route of the document that describes these routes and itself."""
    paths = dict.fromkeys(route.path.replace("{name:path}", "{name}") for route in routes if isinstance(route, Route))
    raw = msgspec.json.encode(document([*paths, PATH], operations, forwarded))

    async def describe(_: HttpRequest) -> Response:
        return Response(raw, media_type=JSON)

    return Route(PATH, describe, methods=["GET"])
