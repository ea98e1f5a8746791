"""API keys: with any configured, every path needs one, except those that only say whether the server is there."""

from __future__ import annotations

from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from expediter.gateway.errors import ApiError
from expediter.gateway.tenants import Tenant, Tenants

OPEN_PATHS: Final = frozenset({"/health", "/ready"})


def no_key() -> ApiError:
    """Return the error for a request that is nobody's."""
    return ApiError(401, "a valid API key is needed", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


class RequireKey:
    """ASGI middleware in front of everything, routing included: says in `scope["tenant"]` who a request is from.

    A path that is not open needs somebody, whether it is known or not.
    """

    def __init__(self, app: ASGIApp, tenants: Tenants) -> None:
        self._app = app
        self._tenants = tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        tenant = self._tenant(scope)
        if tenant is not None:
            scope["tenant"] = tenant
            await self._app(scope, receive, send)
            return
        await no_key().response()(scope, receive, send)

    def _tenant(self, scope: Scope) -> Tenant | None:
        bearer = [value for name, value in scope["headers"] if name == b"authorization"]
        plain = [value for name, value in scope["headers"] if name == b"x-api-key"]
        if len(bearer) > 1 or len(plain) > 1:
            return None
        return self._tenants.of(bearer[0] if bearer else None, plain[0] if plain else None)
