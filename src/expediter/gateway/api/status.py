"""What the server says of itself: models, health, metrics, steps, and why a request waited."""

from __future__ import annotations

import time
from collections.abc import Sequence

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from expediter import __version__
from expediter.core.explanation import Span
from expediter.gateway.api.exchange import json_response, tenant_of
from expediter.gateway.door.drain import Drain
from expediter.gateway.errors import ApiError, bad_request
from expediter.gateway.service import Service
from expediter.telemetry.metrics import CONTENT_TYPE, ServerMetrics
from expediter.telemetry.step_log import StepLog


class StatusApi:
    """The handlers, over one service."""

    def __init__(self, service: Service, metrics: ServerMetrics, step_log: StepLog, drain: Drain) -> None:
        self._service = service
        self._metrics = metrics
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
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/server_info", self.server_info, methods=["GET"]),
            Route("/steps", self.steps, methods=["GET"]),
            Route("/requests/{name:path}", self.explanation, methods=["GET"]),
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

    async def metrics(self, _: HttpRequest) -> Response:
        return Response(self._metrics.render(), headers={"Content-Type": CONTENT_TYPE})

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

    async def explanation(self, request: HttpRequest) -> Response:
        """What held a request and what it did: by our id, the response's, or the client's own X-Request-Id."""
        name = request.path_params["name"]
        ids = self._service.recent.find(tenant_of(request).name, name)
        told = [(one, await self._service.supervisor.explain(one)) for one in ids]
        entries = [{"request_id": one, "spans": _spans(spans)} for one, spans in told if spans]
        if not entries:
            raise ApiError(404, "no such request, or it ended too long ago", code="request_not_found")
        return json_response({"id": name, "requests": entries})

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


def _spans(spans: Sequence[Span]) -> list[dict[str, object]]:
    """Return spans with times since the first one's start: the replicas' clock means nothing to a client."""
    origin_s = spans[0].from_s
    return [
        {
            "from_s": span.from_s - origin_s,
            "to_s": None if span.to_s is None else span.to_s - origin_s,
            "reason": span.reason.value,
            "details": span.details,
            "text": span.in_words(),
        }
        for span in spans
    ]
