"""What every door answers itself, whoever serves behind it: models, health, version."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from expediter import __version__
from expediter.gateway.backends.registry import Backends
from expediter.gateway.door.drain import Drain
from expediter.gateway.errors import ERROR_HANDLERS, no_such_model
from expediter.gateway.json_response import json_response
from expediter.gateway.tenants import Tenant


class Pages:
    """The handlers.

    Args:
        replicas: of our own, the state of each by its number; they are one backend among the others.
    """

    def __init__(self, backends: Backends, drain: Drain, replicas: Callable[[], Mapping[str, str]]) -> None:
        self._backends = backends
        self._replicas = replicas
        self._drain = drain
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/ready", self.ready, methods=["GET"]),
            Route("/version", self.version, methods=["GET"]),
        ]

    async def models(self, request: HttpRequest) -> Response:
        """The models that somebody serves and the client may use."""
        return json_response({"object": "list", "data": [self._model(name) for name in self._names(request)]})

    async def model(self, request: HttpRequest) -> Response:
        """One of them."""
        name, names = request.path_params["name"], self._names(request)
        if name not in names:
            raise no_such_model(names)
        return json_response(self._model(name))

    async def health(self, _: HttpRequest) -> Response:
        """Alive: the event loop answers. Says nothing of the backends."""
        return json_response({"status": "ok"})

    async def ready(self, _: HttpRequest) -> Response:
        """Ready: new work is taken, because some backend or replica is up and the server does not drain."""
        states = {status.name: status.state for status in self._backends.status()}
        ready = "up" in states.values() and not self._drain.is_draining
        return json_response({"ready": ready, "backends": states, "replicas": self._replicas()}, 200 if ready else 503)

    async def version(self, _: HttpRequest) -> Response:
        return json_response({"version": __version__})

    def _names(self, request: HttpRequest) -> list[str]:
        tenant: Tenant = request.scope["tenant"]
        return [name for name in self._backends.models if tenant.may_use(name)]

    def _model(self, name: str) -> dict[str, object]:
        lengths = [status.max_model_len for status in self._backends.status() if name in status.models]
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "expediter",
            "root": name,
            "parent": None,
            "max_model_len": min((length for length in lengths if length is not None), default=None),
        }


def build_app(routes: Sequence[BaseRoute], own_app: ASGIApp | None) -> Starlette:
    """Return the application for what is not for a model.

    Args:
        own_app: gets what is on none of the routes; None if there is nobody.
    """
    app = Starlette(routes=routes, exception_handlers=ERROR_HANDLERS)
    if own_app is not None:
        app.router.default = own_app  # and not a route, which would also get what a page has under another method
    return app
