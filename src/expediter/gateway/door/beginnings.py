"""Where a stream's first token is: engines may send events, and comments, while they still compute the prompt."""

from __future__ import annotations

import re
from typing import Final

# Sources: llama.cpp's `--sse-ping-interval` (30 s) and axum's KeepAlive in text-generation-inference (15 s), comments;
# transformers' cli/serving/chat_completion.py (5.24), the role alone; vllm/entrypoints/openai/responses/ (0.32).
_BEFORE_TOKENS: Final = re.compile(
    rb'"delta":\s*\{\s*"role":\s*"assistant"\s*(?:,\s*"content":\s*(?:""|null)\s*)?\}'
    rb'|"type":\s*"(?:response\.(?:created|queued|in_progress)|message_start|ping)"'
)


def says_something(piece: bytes) -> bool:
    """Return whether a piece of an event stream, chunked or not, has an event that may carry a token."""
    return any(line.startswith(b"data:") and not _BEFORE_TOKENS.search(line) for line in piece.split(b"\n"))
