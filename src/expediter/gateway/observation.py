"""The routes for who looks at the server: metrics, why a request waited, and the live page."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from prometheus_client import CollectorRegistry
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from expediter.gateway.dashboard.feed import Feeder
from expediter.gateway.dashboard.page import dashboard_page
from expediter.gateway.errors import ApiError, bad_request
from expediter.gateway.explanations import Explanations
from expediter.gateway.json_response import json_response
from expediter.gateway.tenants import DEFAULT_TENANT, Tenant
from expediter.telemetry.exposition import CONTENT_TYPE, render

_MAX_DIGITS: Final = 15
_NOT_KEPT: Final = {"Cache-Control": "no-store"}


class Observation:
    """The handlers.

    Args:
        registry: of all metrics.
        shows_all: whether who asks here may see the figures of all tenants: nobody else is there, since no keys are
            configured, or it is the operator's own listener.
    """

    def __init__(
        self, registry: CollectorRegistry, explanations: Explanations, feeder: Feeder, shows_all: Callable[[], bool]
    ) -> None:
        self._registry = registry
        self._explanations = explanations
        self._feeder = feeder
        self._shows_all = shows_all

    def routes(self) -> list[Route]:
        return [
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/requests/{name:path}", self.explanation, methods=["GET"]),
            Route("/dashboard", self.dashboard, methods=["GET"]),
            Route("/dashboard/feed", self.feed, methods=["GET"]),
        ]

    async def metrics(self, request: HttpRequest) -> Response:
        """All metrics; to the key of a named tenant, without what is counted for others."""
        tenant: Tenant | None = request.scope.get("tenant")
        sees_all = self._shows_all() or tenant is None or tenant.name == DEFAULT_TENANT
        text = render(self._registry, None if sees_all or tenant is None else tenant.name)
        return Response(text, headers={"Content-Type": CONTENT_TYPE})

    async def explanation(self, request: HttpRequest) -> Response:
        """What held a request and what it did: by our id, the response's, or the client's own X-Request-Id."""
        tenant: Tenant = request.scope["tenant"]
        told = await self._explanations.explain(tenant.name, request.path_params["name"])
        if told is None:
            raise ApiError(404, "no such request, or it ended too long ago", code="request_not_found")
        return json_response(told, headers=_NOT_KEPT)

    async def dashboard(self, _: HttpRequest) -> Response:
        self._check()
        page, headers = dashboard_page()
        return Response(page, headers=headers)

    async def feed(self, request: HttpRequest) -> Response:
        """What the page draws: intervals from `?since=INDEX` on."""
        self._check()
        since = request.query_params.get("since", "0")
        if not since.isascii() or not since.isdigit() or len(since) > _MAX_DIGITS:
            raise bad_request("since must be an interval's index", "since")
        return json_response(await self._feeder.feed(int(since)), headers=_NOT_KEPT)

    def _check(self) -> None:
        if not self._shows_all():
            raise ApiError(
                403, "the live page shows all tenants: it is on the admin listener", code="on_admin_listener"
            )
