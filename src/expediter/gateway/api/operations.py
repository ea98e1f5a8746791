"""What our own replicas' API takes and answers, for the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from expediter.gateway.api.completions import CompletionBody
from expediter.gateway.api.messages_body import MessagesBody, PromptBody
from expediter.gateway.api.responses_body import ResponsesBody
from expediter.gateway.api.tokens import DetokenizeBody, TokenizeBody
from expediter.gateway.chat_body import ChatBody
from expediter.gateway.openapi import JSON, OPERATIONS, MessagesError, Operation

_STREAMED: Final = (JSON, "text/event-stream")
OWN_OPERATIONS: Final[Mapping[str, Operation]] = {
    **OPERATIONS,
    "/v1/chat/completions": Operation(
        summary="Answer a conversation.",
        body=ChatBody,
        holds=("id", "object", "created", "model", "choices", "usage"),
        content=_STREAMED,
    ),
    "/v1/completions": Operation(
        summary="Continue texts.",
        body=CompletionBody,
        holds=("id", "object", "created", "model", "choices", "usage"),
        content=_STREAMED,
    ),
    "/v1/responses": Operation(
        summary="Answer a conversation; OpenAI's newer API, without state.",
        body=ResponsesBody,
        holds=("id", "object", "created_at", "status", "model", "output", "usage"),
        content=_STREAMED,
    ),
    "/v1/messages": Operation(
        summary="Answer a conversation; Anthropic's API.",
        body=MessagesBody,
        holds=("id", "type", "role", "model", "content", "stop_reason", "usage"),
        content=_STREAMED,
        error=MessagesError,
    ),
    "/v1/messages/count_tokens": Operation(
        summary="Count the tokens of a conversation.", body=PromptBody, holds=("input_tokens",), error=MessagesError
    ),
    "/tokenize": Operation(
        summary="Return the tokens of a text or a conversation.",
        body=TokenizeBody,
        holds=("count", "max_model_len", "tokens"),
    ),
    "/detokenize": Operation(summary="Return the text of tokens.", body=DetokenizeBody, holds=("prompt",)),
}
