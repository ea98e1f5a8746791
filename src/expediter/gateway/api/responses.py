"""`POST /v1/responses`: OpenAI's newer API, as far as nothing has to be kept between requests."""

from __future__ import annotations

from typing import Final

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from expediter.gateway.api.exchange import renamed_params, respond, tenant_of, terms_for
from expediter.gateway.api.responses_body import ResponsesBody
from expediter.gateway.api.responses_rendering import ResponsesRendering
from expediter.gateway.bodies import decode_body, read_body
from expediter.gateway.service import Service

_BODY: Final = msgspec.json.Decoder(ResponsesBody)
_PARAMS: Final = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text"}


class ResponsesApi:
    """The handler, over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        return [Route("/v1/responses", self.respond, methods=["POST"])]

    async def respond(self, request: HttpRequest) -> Response:
        body = decode_body(await read_body(request), _BODY)
        model = self._service.model_name(body.model, tenant_of(request))
        with renamed_params(_PARAMS):
            generation = await self._service.chat(body.chat(), terms_for(request, body))
        rendering = ResponsesRendering(body, model, generation, self._service.text)
        return await respond(request, self._service, generation, rendering, is_stream=bool(body.stream))
