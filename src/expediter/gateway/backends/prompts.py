"""Token ids of prompts that are sent on, for models whose backends tell by token ids what they hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
import numpy as np

from expediter.core.errors import RequestError
from expediter.core.request import TokenArray

if TYPE_CHECKING:  # an extra: only models with a tokenizer need it
    from expediter.engine.tokenizer import Tokenizer

_MAX_BYTES: Final = 32 << 10
"""Of a prompt: tokenizing more would hold up the event loop for too long, and a byte's place will do."""


class PromptSource(Protocol):
    """What a request's body says of its prompt, as JSON that nobody has looked into."""

    messages: msgspec.Raw
    prompt: msgspec.Raw
    tools: msgspec.Raw

    def prompt_tokens(self) -> TokenArray:
        """Return the prompt's bytes as an array that stands for its tokens."""
        ...


def token_ids(texts: Tokenizer, source: PromptSource) -> TokenArray | None:
    """Return the token ids that the backend will make of a prompt; None if it is too long, or not plain text.

    The same template makes the same ids; a backend that was started with another template makes others, and then
    prefixes look uncached that are not.
    """
    if len(source.messages) + len(source.prompt) + len(source.tools) > _MAX_BYTES:
        return None
    try:
        if len(source.messages):
            messages = [_plain(each) for each in msgspec.json.decode(source.messages)]
            tools = msgspec.json.decode(source.tools) if len(source.tools) else None
            ids = texts.chat_prompt(messages, tools=tools or None)
        elif len(source.prompt):
            prompt = msgspec.json.decode(source.prompt)
            ids = texts.encode(prompt) if isinstance(prompt, str) else prompt
        else:
            return None
        tokens = np.array(ids, np.int32)
    except (msgspec.DecodeError, RequestError, TypeError, ValueError, KeyError, OverflowError):
        return None  # the backend says what is wrong with it
    return tokens if tokens.ndim == 1 and len(tokens) else None


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose content is text; parts of text are joined, others are no text."""
    content = message["content"]
    if isinstance(content, list):
        if any(part["type"] != "text" for part in content):
            raise ValueError("a part is not text")
        content = "\n".join(part["text"] for part in content)
    return {**message, "content": content}
