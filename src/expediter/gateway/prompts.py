"""From what clients send to tokens: texts, token ids and conversations, laid out by the model's template."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np

from expediter.core.request import TokenArray
from expediter.engine.sampling_params import validate_token_ids
from expediter.engine.tokenizer import Tokenizer
from expediter.gateway.chat_body import Message
from expediter.gateway.errors import bad_request
from expediter.gateway.tools.base import ToolFormat
from expediter.gateway.tools.choice import ToolUse

_INLINE_CHARACTERS: Final = 4096
"""Texts up to here are tokenized on the event loop: handing them to a thread costs more than the work."""

Result = TypeVar("Result")
_Plain = dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """Token ids, int32, shape [num_tokens], and the text that they came from where it is known."""

    tokens: TokenArray
    text: str | None


class Prompts:
    """Makes prompts; large ones in a thread.

    Args:
        text: the model's tokenizer and chat template.
        tool_format: how the model writes tool calls.
    """

    def __init__(self, text: Tokenizer, tool_format: ToolFormat) -> None:
        self._text = text
        self._tool_format = tool_format
        self._threads = ThreadPoolExecutor(2, "tokenizer")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def of_text(self, text: str, *, add_special_tokens: bool = True) -> Prompt:
        """Return a text's tokens."""
        ids = await self._off_loop(len(text), lambda: self._text.encode(text, add_special_tokens=add_special_tokens))
        return Prompt(np.array(ids, dtype=np.int32), text)

    def of_ids(self, ids: list[int]) -> Prompt:
        """Return token ids as they are.

        Raises:
            RequestError: one is out of the vocabulary.
        """
        validate_token_ids(ids, self._text.vocab_size, param="prompt")
        return Prompt(np.array(ids, dtype=np.int32), None)

    async def of_chat(
        self,
        messages: Sequence[Message],
        tools: ToolUse | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
    ) -> Prompt:
        """Return the conversation as the model's template writes it.

        Args:
            tools: what the model is told of functions.
            continue_final: go on with the last message instead of answering it.
        Raises:
            ApiError: a part is not text, or the template refuses the conversation.
        """
        if continue_final and messages[-1].role != "assistant":
            raise bad_request("only a message of the assistant can be continued", "messages")
        use = ToolUse() if tools is None else tools

        def lay_out() -> list[int]:
            plain, offered = self._for_template(messages, use)
            return self._text.chat_prompt(
                plain, add_generation_prompt=add_generation_prompt, tools=offered, continue_final=continue_final
            )

        # Schemas of functions may be large, and how large is not known before they are written.
        ids = await self._off_loop(sum(map(_num_characters, messages)), lay_out, is_large=use.is_on)
        return Prompt(np.array(ids, dtype=np.int32), None)

    def _for_template(self, messages: Sequence[Message], use: ToolUse) -> tuple[list[_Plain], list[_Plain] | None]:
        """Return the messages and the functions as the template takes them; no functions if it does not know any."""
        if self._text.template_knows_tools:
            offered = [function.as_tool() for function in use.functions] if use.is_on else None
            return [_with_calls(message) for message in messages], offered
        plain = [_in_words(message, self._tool_format) for message in messages]
        if use.is_on:
            plain = _with_instructions(plain, self._tool_format.instructions(use.functions))
        return plain, None

    async def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included.

        Raises:
            RequestError: an id is out of the vocabulary.
        """
        validate_token_ids(tokens, self._text.vocab_size, param="tokens")
        return await self._off_loop(len(tokens), lambda: self._text.decode(tokens, skip_special_tokens=False))

    async def _off_loop(self, size: int, work: Callable[[], Result], *, is_large: bool = False) -> Result:
        if size <= _INLINE_CHARACTERS and not is_large:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _num_characters(message: Message) -> int:
    content = message.content
    if content is None or isinstance(content, str):
        return len(content or "")
    return sum(len(part.text or "") for part in content)


def _with_calls(message: Message) -> _Plain:
    """Return a message for a template that knows tools: arguments of calls as objects, which it writes itself."""
    plain: _Plain = {"role": _role(message), "content": _content(message)}
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _object(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        plain["name"] = message.name
    return plain


def _in_words(message: Message, form: ToolFormat) -> _Plain:
    """Return a message for any template, its calls or its result as text."""
    content = _content(message)
    if message.role == "tool":
        return {"role": "user", "content": form.result_text(content)}
    calls = [form.call_text(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    return {"role": _role(message), "content": "\n".join([*([content] if content or not calls else []), *calls])}


def _with_instructions(messages: list[_Plain], instructions: str) -> list[_Plain]:
    if messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{instructions}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": instructions}, *messages]


def _role(message: Message) -> str:
    return "system" if message.role == "developer" else message.role  # templates know the older name


def _content(message: Message) -> str:
    if message.function_call is not None:
        raise bad_request("function_call is not supported: tool_calls have taken its place", "messages")
    if message.tool_calls and message.role != "assistant":
        raise bad_request("only messages of the assistant have tool_calls", "messages")
    if message.content is None:
        if message.tool_calls:
            return ""
        raise bad_request("every message needs content", "messages")
    if isinstance(message.content, str):
        return message.content
    for part in message.content:
        if part.type != "text" or part.text is None:
            raise bad_request("only text parts are supported as message content", "messages")
    return "".join(part.text or "" for part in message.content)


def _object(arguments: str) -> object:
    """Return a call's arguments as what they say; what is no JSON stays a text."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
