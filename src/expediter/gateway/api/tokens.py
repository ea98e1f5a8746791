"""`POST /tokenize` and `POST /detokenize`, in vLLM's shape."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from expediter.gateway.api.exchange import tenant_of
from expediter.gateway.bodies import TokenId, decode_body, read_body
from expediter.gateway.chat_body import Message
from expediter.gateway.errors import bad_request
from expediter.gateway.json_response import json_response
from expediter.gateway.service import Service


class TokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Token ids."""

    model: str | None = None
    tokens: list[TokenId]


_TOKENIZE: Final = msgspec.json.Decoder(TokenizeBody)
_DETOKENIZE: Final = msgspec.json.Decoder(DetokenizeBody)


class TokensApi:
    """The handlers, over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        return [
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]

    async def tokenize(self, request: HttpRequest) -> Response:
        body = decode_body(await read_body(request), _TOKENIZE)
        self._service.model_name(body.model, tenant_of(request))
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("give either prompt or messages", "prompt")
        prompts = self._service.prompts
        if body.messages is not None:
            prompt = await prompts.of_chat(body.messages, add_generation_prompt=body.add_generation_prompt)
        else:
            prompt = await prompts.of_text(body.prompt or "", add_special_tokens=body.add_special_tokens)
        tokens: list[int] = prompt.tokens.tolist()
        texts = [self._service.text.token_text(token) for token in tokens] if body.return_token_strs else None
        limit = self._service.config.max_model_len
        return json_response({"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": texts})

    async def detokenize(self, request: HttpRequest) -> Response:
        body = decode_body(await read_body(request), _DETOKENIZE)
        self._service.model_name(body.model, tenant_of(request))
        return json_response({"prompt": await self._service.prompts.decode(body.tokens)})
