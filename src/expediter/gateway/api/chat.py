"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from expediter.gateway.api.chunks import ChunkRendering
from expediter.gateway.api.exchange import respond, tenant_of, terms_for
from expediter.gateway.bodies import decode_body, read_body
from expediter.gateway.chat_body import ChatBody
from expediter.gateway.generation import Delta
from expediter.gateway.rendering import Vocabulary, finite
from expediter.gateway.service import Service
from expediter.gateway.tools.base import CallDelta

_BODY: Final = msgspec.json.Decoder(ChatBody)


class ChatApi:
    """The handler, over one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        return [Route("/v1/chat/completions", self.complete, methods=["POST"])]

    async def complete(self, request: HttpRequest) -> Response:
        body = decode_body(await read_body(request), _BODY)
        model = self._service.model_name(body.model, tenant_of(request))
        generation = await self._service.chat(body, terms_for(request, body))
        form = ChatFormat(self._service.text, len(generation.choices), body.num_alternatives)
        rendering = ChunkRendering(form, model, generation, body)
        return await respond(request, self._service, generation, rendering, is_stream=bool(body.stream))


class ChatFormat:
    """A `ChoiceFormat`.

    Args:
        num_alternatives: top_logprobs asked for, None for no logprobs at all.
    """

    id_prefix = "chatcmpl-"
    full_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, vocabulary: Vocabulary, num_choices: int, num_alternatives: int | None) -> None:
        self._vocabulary = vocabulary
        self._num_choices = num_choices
        self._num_alternatives = num_alternatives

    def opening(self) -> list[dict[str, Any]]:
        return [
            {"index": i, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            for i in range(self._num_choices)
        ]

    def chunk(self, delta: Delta) -> dict[str, Any]:
        added: dict[str, Any] = {"content": delta.text} if delta.text else {}
        if delta.calls:
            added["tool_calls"] = [_call_chunk(call) for call in delta.calls]
        return {
            "index": delta.index,
            "delta": added,
            "logprobs": self._logprobs(delta),
            "finish_reason": delta.finish_reason,
        }

    def full(self, deltas: Sequence[Delta]) -> list[dict[str, Any]]:
        return [self._full(delta) for delta in deltas]

    def _full(self, delta: Delta) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": delta.text, "refusal": None}
        if delta.calls:
            message["content"] = delta.text or None
            message["tool_calls"] = [
                {"id": f"call_{call.key}", "type": "function", "function": _called(call)} for call in delta.calls
            ]
        return {
            "index": delta.index,
            "message": message,
            "logprobs": self._logprobs(delta),
            "finish_reason": delta.finish_reason,
        }

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if self._num_alternatives is None or not delta.logprobs:
            return None
        content = logprob_entries(self._vocabulary, delta, self._num_alternatives)
        return {"content": content, "refusal": None}


def _call_chunk(call: CallDelta) -> dict[str, Any]:
    """Return a call's part of a chunk: id, type and name come once, then text of the arguments alone."""
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, "id": f"call_{call.key}", "type": "function", "function": _called(call)}


def _called(call: CallDelta) -> dict[str, Any]:
    return {"name": call.name, "arguments": call.arguments}


def logprob_entries(vocabulary: Vocabulary, delta: Delta, num_alternatives: int) -> list[dict[str, Any]]:
    """Return the logprobs of a delta's tokens, each with its best alternatives."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text, raw = vocabulary.token_text(token), vocabulary.token_bytes(token)
        return {"token": text, "logprob": finite(logprob), "bytes": list(raw)}

    return [
        entry(token, told.logprob) | {"top_logprobs": [entry(*other) for other in told.top[:num_alternatives]]}
        for token, told in zip(delta.tokens, delta.logprobs, strict=True)
    ]
