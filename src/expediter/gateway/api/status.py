"""What the server says of its own replicas: models, health, set-up, steps."""

from __future__ import annotations

import time

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from expediter import __version__
from expediter.gateway.api.exchange import tenant_of
from expediter.gateway.door.drain import Drain
from expediter.gateway.errors import bad_request
from expediter.gateway.json_response import json_response
from expediter.gateway.service import Service
from expediter.telemetry.step_log import StepLog


class StatusApi:
    """The handlers, over one service."""

    def __init__(self, service: Service, step_log: StepLog, drain: Drain) -> None:
        self._service = service
        self._step_log = step_log
        self._drain = drain
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/ready", self.ready, methods=["GET"]),
            Route("/version", self.version, methods=["GET"]),
            Route("/server_info", self.server_info, methods=["GET"]),
            Route("/steps", self.steps, methods=["GET"]),
        ]

    async def models(self, request: HttpRequest) -> Response:
        entries = [self._model(name) for name in self._service.model_names(tenant_of(request))]
        return json_response({"object": "list", "data": entries})

    async def model(self, request: HttpRequest) -> Response:
        return json_response(self._model(self._service.model_name(request.path_params["name"], tenant_of(request))))

    async def health(self, _: HttpRequest) -> Response:
        """Alive: the event loop answers. Says nothing of the replicas."""
        return json_response({"status": "ok"})

    async def ready(self, _: HttpRequest) -> Response:
        """Ready: new work is taken, because at least one replica serves and the server does not drain."""
        ready = self._service.supervisor.is_ready and not self._drain.is_draining
        states = {str(number): state.value for number, state in self._service.supervisor.states.items()}
        return json_response({"ready": ready, "replicas": states}, 200 if ready else 503)

    async def version(self, _: HttpRequest) -> Response:
        return json_response({"version": __version__})

    async def server_info(self, _: HttpRequest) -> Response:
        return json_response(self._service.config.info)

    async def steps(self, request: HttpRequest) -> Response:
        """The newest steps with features and durations, from `?since=SEQUENCE` on; fits step-time models."""
        since = request.query_params.get("since", "0")
        if not since.isascii() or not since.isdigit() or len(since) > 18:
            raise bad_request("since must be a step's sequence number", "since")
        rows = [
            {"sequence": s.sequence, "replica": s.replica_id, **s.features._asdict(), "elapsed_s": s.elapsed_s}
            for s in self._step_log.since(int(since))
        ]
        return json_response({"steps": rows})

    def _model(self, name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "expediter",
            "root": self._service.config.model_names[0],
            "parent": None,
            "max_model_len": self._service.config.max_model_len,
        }
