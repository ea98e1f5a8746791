"""`POST /v1/messages` and its count of tokens: Anthropic's API in its basic form."""

from __future__ import annotations

from typing import Final

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from expediter.gateway.api.exchange import renamed_params, respond, tenant_of, terms_for
from expediter.gateway.api.messages_body import MessagesBody, PromptBody
from expediter.gateway.api.messages_rendering import MessagesRendering
from expediter.gateway.bodies import decode_body, read_body
from expediter.gateway.errors import MESSAGES_PATH
from expediter.gateway.json_response import json_response
from expediter.gateway.service import Service

_MESSAGES: Final = msgspec.json.Decoder(MessagesBody)
_PROMPT: Final = msgspec.json.Decoder(PromptBody)
_PARAMS: Final = {"stop": "stop_sequences", "response_format": "output_config"}


class MessagesApi:
    """The handlers, over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        return [
            Route(MESSAGES_PATH, self.create, methods=["POST"]),
            Route(f"{MESSAGES_PATH}/count_tokens", self.count_tokens, methods=["POST"]),
        ]

    async def create(self, request: HttpRequest) -> Response:
        body = decode_body(await read_body(request), _MESSAGES)
        model = self._service.model_name(body.model, tenant_of(request))
        with renamed_params(_PARAMS):
            generation = await self._service.chat(body.chat(), terms_for(request, body))
        rendering = MessagesRendering(model, generation)
        return await respond(request, self._service, generation, rendering, is_stream=bool(body.stream))

    async def count_tokens(self, request: HttpRequest) -> Response:
        body = decode_body(await read_body(request), _PROMPT)
        self._service.model_name(body.model, tenant_of(request))
        chat = body.chat()
        prompt = await self._service.chat_prompt(chat, chat.tool_use())
        return json_response({"input_tokens": len(prompt.tokens)})
