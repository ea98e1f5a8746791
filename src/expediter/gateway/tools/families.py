"""Which format a model's tool calls have: its chat template shows one."""

from __future__ import annotations

import re
from typing import Final

from expediter.gateway.tools.base import ToolFormat
from expediter.gateway.tools.hermes import HermesFormat
from expediter.gateway.tools.llama import LlamaFormat

_LLAMA: Final = re.compile(r"""\{\\?"name\\?": function name, \\?"parameters\\?":""")


def tool_format_of(chat_template: str) -> ToolFormat:
    """Return the format that a template asks the model for; Hermes', if it asks for none."""
    return LlamaFormat() if _LLAMA.search(chat_template) else HermesFormat()
