"""Body of `POST /v1/responses`, and the conversation that it stands for."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from expediter.gateway.bodies import JsonObjectFormat, JsonSchema, JsonSchemaFormat, PositiveInt, TermsBody, TextFormat
from expediter.gateway.chat_body import (
    MAX_TOOLS,
    CalledFunction,
    ChatBody,
    ContentPart,
    FunctionDefinition,
    FunctionName,
    Message,
    NamedFunction,
    NamedTool,
    Tool,
    ToolCall,
)
from expediter.gateway.errors import ApiError, bad_request

_TEXT_PARTS: Final = frozenset({"input_text", "output_text", "text"})
Role = Literal["system", "developer", "user", "assistant"]
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
"""What a response may have beside the usual; all but the first are of items that never occur here."""


class InputPart(msgspec.Struct):
    """A part of a message's content, or of a call's result; only text is taken."""

    type: str
    text: str | None = None


class InputItem(msgspec.Struct):
    """One item of the input: a message, a call that the model made, or the result of one."""

    type: str = "message"
    role: Role | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: FunctionName | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None


class FunctionTool(msgspec.Struct):
    """A function that the model may call; there are no other kinds here."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunctionTool(msgspec.Struct):
    """A choice of one function, which has to be called."""

    type: Literal["function"]
    name: FunctionName


class PlainTextConfig(msgspec.Struct, tag_field="type", tag="text"):
    """Any text."""


class JsonObjectConfig(msgspec.Struct, tag_field="type", tag="json_object"):
    """A JSON object, whatever it holds."""


class JsonSchemaConfig(msgspec.Struct, tag_field="type", tag="json_schema"):
    """JSON that a schema describes."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    schema: msgspec.Raw
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, forbid_unknown_fields=True):
    """What the text of the output has to be."""

    format: PlainTextConfig | JsonObjectConfig | JsonSchemaConfig | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Nothing is obfuscated here."""

    include_obfuscation: bool | None = None


class ResponsesBody(TermsBody, kw_only=True):
    """`POST /v1/responses`."""

    input: str | Annotated[list[InputItem], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: PositiveInt | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    text: TextConfig | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunctionTool | None = None
    parallel_tool_calls: bool | None = None
    include: list[Includable] | None = None
    # Fields that say something of the client, and change nothing.
    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, str] | None = None
    # Fields that are refused unless they are off: see `bodies._OFF`.
    store: Any = None
    previous_response_id: Any = None
    conversation: Any = None
    background: Any = None
    prompt: Any = None
    max_tool_calls: Any = None
    reasoning: Any = None
    truncation: Any = None
    service_tier: Any = None
    access_programs: Any = None
    background_options: Any = None
    context_management: Any = None
    image: Any = None
    moderation: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None

    @property
    def num_alternatives(self) -> int | None:
        """Logprobs asked for per token, None for none at all."""
        if self.top_logprobs or "message.output_text.logprobs" in (self.include or ()):
            return self.top_logprobs or 0
        return None

    def chat(self) -> ChatBody:
        """Return the chat completion that this stands for.

        Raises:
            ApiError: 400, an item is of no kind that is known here, or lacks what it needs.
        """
        choice = self.tool_choice
        return ChatBody(
            **self.terms(),
            messages=self._messages(),
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            logprobs=None if self.num_alternatives is None else True,
            top_logprobs=self.num_alternatives,
            response_format=_response_format(self.text),
            tools=[_tool(tool) for tool in self.tools or ()],
            tool_choice=_named(choice) if isinstance(choice, NamedFunctionTool) else choice,
            parallel_tool_calls=self.parallel_tool_calls,
        )

    def _messages(self) -> list[Message]:
        messages = [] if self.instructions is None else [Message(role="system", content=self.instructions)]
        if isinstance(self.input, str):
            return [*messages, Message(role="user", content=self.input)]
        for item in self.input:
            message = _message(item)
            last = messages[-1] if messages else None
            if message.tool_calls and last is not None and last.role == "assistant":  # one turn, told in two items
                last.tool_calls = [*(last.tool_calls or ()), *message.tool_calls]
            else:
                messages.append(message)
        return messages


def _message(item: InputItem) -> Message:
    match item.type:
        case "message" if item.role is not None and item.content is not None:
            return Message(role=item.role, content=_content(item.content))
        case "function_call" if item.call_id is not None and item.name is not None and item.arguments is not None:
            call = ToolCall(item.call_id, CalledFunction(item.name, item.arguments))
            return Message(role="assistant", tool_calls=[call])
        case "function_call_output" if item.call_id is not None and item.output is not None:
            return Message(role="tool", content=_content(item.output), tool_call_id=item.call_id)
        case "message" | "function_call" | "function_call_output":
            raise bad_request(f"an item of type {item.type} lacks a field that it needs", "input")
    raise _unknown("items")


def _content(content: str | list[InputPart]) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    if not all(part.type in _TEXT_PARTS for part in content):
        raise _unknown("parts")
    return [ContentPart("text", part.text) for part in content]


def _unknown(what: str) -> ApiError:
    return bad_request(f"only {what} of text, calls of functions and their results are supported as input", "input")


def _response_format(text: TextConfig | None) -> TextFormat | JsonObjectFormat | JsonSchemaFormat | None:
    match text.format if text is not None else None:
        case JsonObjectConfig():
            return JsonObjectFormat()
        case JsonSchemaConfig(name=name, schema=schema):
            return JsonSchemaFormat(JsonSchema(name, schema))
    return None


def _tool(tool: FunctionTool) -> Tool:
    return Tool("function", FunctionDefinition(tool.name, tool.description, tool.parameters, tool.strict))


def _named(choice: NamedFunctionTool) -> NamedTool:
    return NamedTool("function", NamedFunction(choice.name))
