"""Which format a model's tool calls have."""

from __future__ import annotations

from expediter.engine.tokenizer import Tokenizer
from expediter.gateway.tools.base import ToolFormat
from expediter.gateway.tools.hermes import HermesFormat


def tool_format_of(text: Tokenizer) -> ToolFormat:  # noqa: ARG001 - one family so far; the next is told by its template
    """Return the format of the model that a tokenizer belongs to."""
    return HermesFormat()
