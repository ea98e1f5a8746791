"""API keys: with any configured, every path needs one, except those that only say whether the server is there."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from expediter.gateway.errors import ApiError

OPEN_PATHS: Final = frozenset({"/health", "/ready"})
_SCHEME: Final = b"bearer "


class ApiKeys:
    """Keys, kept as SHA-256 hashes only."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._hashes = [_hash(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._hashes)

    def accept(self, authorization: bytes) -> bool:
        """Return whether an Authorization header carries one of the keys; takes equally long whichever it is."""
        if authorization[: len(_SCHEME)].lower() != _SCHEME:
            return False
        given = _hash(authorization[len(_SCHEME) :].strip())
        matches = [hmac.compare_digest(given, known) for known in self._hashes]
        return any(matches)


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class RequireKey:
    """ASGI middleware in front of everything, routing included: a path that is not open needs a key, known or not."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._keys or scope["type"] == "lifespan" or self._is_allowed(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401, "a valid API key is needed", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
        )
        await error.response()(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        if scope["path"] in OPEN_PATHS:
            return True
        headers = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(headers) == 1 and self._keys.accept(headers[0])
