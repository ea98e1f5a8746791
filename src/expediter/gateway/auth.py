"""API keys: with any configured, every path needs one, except those that only say whether the server is there."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from expediter.gateway.errors import ApiError

OPEN_PATHS: Final = frozenset({"/health", "/ready"})
_SCHEME: Final = b"bearer "


class ApiKeys:
    """Keys, kept as SHA-256 hashes only.

    Args:
        keys: of nobody in particular.
        named: keys by the tenant that each belongs to.
    """

    def __init__(self, keys: Iterable[str], named: Mapping[str, str] | None = None) -> None:
        self._hashes = [(_hash(key.encode()), tenant) for tenant, key in (named or {}).items()]
        self._hashes += [(_hash(key.encode()), "") for key in keys]

    def __bool__(self) -> bool:
        return bool(self._hashes)

    def tenant_of(self, authorization: bytes) -> str | None:
        """Return whose key an Authorization header carries, None if none; takes equally long whichever it is."""
        if authorization[: len(_SCHEME)].lower() != _SCHEME:
            return None
        given = _hash(authorization[len(_SCHEME) :].strip())
        matches = [tenant for known, tenant in self._hashes if hmac.compare_digest(given, known)]
        return matches[0] if matches else None


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class RequireKey:
    """ASGI middleware in front of everything, routing included: a path that is not open needs a key, known or not."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._keys or scope["type"] == "lifespan" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        tenant = self._tenant(scope)
        if tenant is not None:
            scope["tenant"] = tenant
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401, "a valid API key is needed", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
        )
        await error.response()(scope, receive, send)

    def _tenant(self, scope: Scope) -> str | None:
        headers = [value for name, value in scope["headers"] if name == b"authorization"]
        return self._keys.tenant_of(headers[0]) if len(headers) == 1 else None
