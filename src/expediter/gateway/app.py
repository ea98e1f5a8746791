"""The ASGI application over our own replicas: all routes."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from expediter.gateway.api.chat import ChatApi
from expediter.gateway.api.completions import CompletionsApi
from expediter.gateway.api.messages import MessagesApi
from expediter.gateway.api.responses import ResponsesApi
from expediter.gateway.api.status import StatusApi
from expediter.gateway.api.tokens import TokensApi
from expediter.gateway.delivery import CLIENT_CLOSED_REQUEST, ClientGoneError
from expediter.gateway.errors import ERROR_HANDLERS
from expediter.gateway.service import Service
from expediter.telemetry.step_log import StepLog


def own_routes(service: Service, step_log: StepLog) -> list[Route]:
    """Return the routes of all APIs over own replicas."""
    apis = (
        CompletionsApi(service),
        ChatApi(service),
        ResponsesApi(service),
        MessagesApi(service),
        TokensApi(service),
        StatusApi(service, step_log),
    )
    return [route for api in apis for route in api.routes()]


def build_app(service: Service, step_log: StepLog) -> Starlette:
    """Return the ASGI application behind the door, which says in `scope["tenant"]` who a request is from."""
    return Starlette(
        routes=own_routes(service, step_log),
        exception_handlers={**ERROR_HANDLERS, ClientGoneError: _client_gone},
    )


async def _client_gone(request: HttpRequest, error: Exception) -> Response:  # noqa: ARG001 - starlette's signature
    return Response(status_code=CLIENT_CLOSED_REQUEST)
