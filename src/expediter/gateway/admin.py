"""The admin API: backends come and go while the server runs, and its file is read again. It has a listener of its own.

It listens on loopback unless there is a key, and then every request needs it. A page in a browser on the same machine
can send requests to loopback, too: so what changes something has to be JSON, which a browser does not send elsewhere
without asking, and without a key the Host must be loopback, so that no name that was pointed there will do.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from expediter.core.errors import ConfigurationError
from expediter.gateway.backends.backend import Backend
from expediter.gateway.backends.config import BackendConfig
from expediter.gateway.backends.registry import Backends
from expediter.gateway.errors import ERROR_HANDLERS, ApiError, bad_request
from expediter.gateway.json_response import json_response
from expediter.gateway.reload import Reloaded

Reload = Callable[[], Awaitable[Reloaded]]
"""Reads the configuration file again."""
ADMIN_KEY_VARIABLE: Final = "EXPEDITER_ADMIN_KEY"
_CHALLENGE: Final = 'Bearer, Basic realm="Expediter admin key as the password", charset="UTF-8"'
_MAX_BODY_BYTES: Final = 1 << 16


class _Addition(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /backends: the fields of a table `[[backends]]`."""

    url: str
    name: str = ""
    models: list[str] = []
    api_key_env: str = ""
    max_requests: int | None = None
    kv_events: str = ""
    kv_replay: str = ""
    tokenizer: str = ""
    send_cache_salt: bool = False

    def config(self) -> BackendConfig:
        return BackendConfig(**{**msgspec.structs.asdict(self), "models": tuple(self.models)})


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine and no other can reach it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_admin_address(host: str, key: str) -> None:
    """Verify that an admin listener may be there.

    Raises:
        ConfigurationError: others could reach it, and it has no key.
    """
    if not key and not is_loopback(host):
        raise ConfigurationError(
            f"the admin listener on {host} could be reached from elsewhere and needs a key: set {ADMIN_KEY_VARIABLE}, "
            "or leave it on 127.0.0.1"
        )


def build_admin(
    backends: Backends, *, key: str = "", reload: Reload | None = None, pages: Sequence[BaseRoute] = ()
) -> ASGIApp:
    """Return the admin API.

    Args:
        pages: further routes, for who looks at the server.
        key: that every request needs; "" for none, on loopback only.
        reload: None if there is no configuration file.
    """
    api = _Pages(backends, reload)
    app = Starlette(
        routes=[
            Route("/backends", api.backends, methods=["GET"]),
            Route("/backends", api.add, methods=["POST"]),
            # Names may hold slashes; the longer path comes first.
            Route("/backends/{name:path}/drain", api.drain, methods=["POST"]),
            Route("/backends/{name:path}", api.remove, methods=["DELETE"]),
            Route("/reload", api.reload, methods=["POST"]),
            *pages,
        ],
        exception_handlers=ERROR_HANDLERS,
    )
    return _Guard(app, key)


class _Guard:
    """ASGI middleware in front of everything, routing included."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._hash = _hash(key.encode()) if key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        error = self._error(scope)
        if error is not None:
            await error.response()(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _error(self, scope: Scope) -> ApiError | None:
        """Return why a request is refused, if it is."""
        headers = dict(scope["headers"])
        if self._hash is not None:
            if not hmac.compare_digest(_hash(_key_in(headers.get(b"authorization", b""))), self._hash):
                return ApiError(
                    401, "the admin key is needed", code="invalid_api_key", headers={"WWW-Authenticate": _CHALLENGE}
                )
        elif not is_loopback(_host(headers.get(b"host", b""))):
            return ApiError(403, "the admin API answers to loopback addresses only", code="forbidden")
        if scope["method"] == "POST":
            kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
            if kind != b"application/json":
                return ApiError(415, "content-type must be application/json", code="unsupported_media_type")
        return None


class _Pages:
    """The handlers."""

    def __init__(self, backends: Backends, reload: Reload | None) -> None:
        self._backends = backends
        self._reload = reload

    async def backends(self, _: HttpRequest) -> Response:
        """All backends and what there is to know of them."""
        return json_response({"backends": self._backends.status()})

    async def add(self, request: HttpRequest) -> Response:
        """Take a backend in."""
        try:
            config = msgspec.json.decode(await _body(request), type=_Addition).config()
        except msgspec.DecodeError as error:
            raise bad_request(f"no backend: {error}") from error
        except ConfigurationError as error:
            raise bad_request(str(error)) from error
        try:
            backend = self._backends.add(config)
        except ConfigurationError as error:
            raise ApiError(409, str(error), code="conflict") from error
        return json_response({"name": backend.name}, 201)

    async def drain(self, request: HttpRequest) -> Response:
        """Send a backend no new requests."""
        backend = self._named(request)
        self._backends.drain(backend)
        return json_response({"name": backend.name, "num_in_flight": backend.num_in_flight})

    async def remove(self, request: HttpRequest) -> Response:
        """Forget a backend; what is in flight there goes on."""
        backend = self._named(request)
        self._backends.remove(backend)
        return json_response({"name": backend.name, "num_in_flight": backend.num_in_flight})

    async def reload(self, _: HttpRequest) -> Response:
        """Read the configuration file again."""
        if self._reload is None:
            raise ApiError(409, "there is no configuration file to read again", code="conflict")
        reloaded = await self._reload()
        if reloaded.error is not None:
            raise ApiError(409, f"nothing has changed: {reloaded.error}", code="conflict")
        return json_response({"reloaded": True, "after_restart": reloaded.after_restart})

    def _named(self, request: HttpRequest) -> Backend:
        backend = self._backends.named(request.path_params["name"])
        if backend is None or backend.is_own:
            names = ", ".join(each.name for each in self._backends if not each.is_own)
            raise ApiError(404, f"there is no such backend; there are: {names or 'none'}", code="not_found")
        return backend


async def _body(request: HttpRequest) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_BODY_BYTES:
            raise ApiError(413, f"the body is longer than {_MAX_BODY_BYTES} bytes", code="too_large")
    return bytes(body)


def _key_in(authorization: bytes) -> bytes:
    """Return the key of `Bearer KEY`, or of `Basic`, where it is the password: what a browser asks a person for."""
    scheme, _, given = authorization.partition(b" ")
    if scheme.lower() == b"bearer":
        return given.strip()
    if scheme.lower() != b"basic":
        return b""
    try:
        return base64.b64decode(given.strip(), validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


def _host(header: bytes) -> str:
    """Return the host of a Host header, without its port."""
    text = header.decode("latin-1")
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0]


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
