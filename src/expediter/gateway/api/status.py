"""What only our own replicas can say: their set-up, and their steps."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from expediter.gateway.errors import bad_request
from expediter.gateway.json_response import json_response
from expediter.gateway.service import Service
from expediter.telemetry.step_log import StepLog


class StatusApi:
    """The handlers, over one service."""

    def __init__(self, service: Service, step_log: StepLog) -> None:
        self._service = service
        self._step_log = step_log

    def routes(self) -> list[Route]:
        return [
            Route("/server_info", self.server_info, methods=["GET"]),
            Route("/steps", self.steps, methods=["GET"]),
        ]

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
