"""Body of `POST /v1/messages`, and the conversation that it stands for."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from expediter.gateway.bodies import MAX_STOPS, JsonSchema, JsonSchemaFormat, PositiveInt, StopString, TermsBody
from expediter.gateway.chat_body import (
    MAX_TOOLS,
    CalledFunction,
    ChatBody,
    FunctionDefinition,
    FunctionName,
    Message,
    NamedFunction,
    NamedTool,
    Tool,
    ToolCall,
)
from expediter.gateway.errors import bad_request

_CHOICES: Final[dict[str, Literal["none", "auto", "required"]]] = {"auto": "auto", "any": "required", "none": "none"}


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    """Text. `cache_control` is taken and changes nothing: all prefixes are cached."""

    text: str
    cache_control: Any = None


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A call that the model made."""

    id: str
    name: FunctionName
    input: dict[str, Any]
    cache_control: Any = None


class ToolResultBlock(msgspec.Struct, tag_field="type", tag="tool_result"):
    """What a call returned."""

    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    cache_control: Any = None


class MessageParam(msgspec.Struct):
    """One turn of a conversation."""

    role: Literal["user", "assistant"]
    content: str | list[TextBlock | ToolUseBlock | ToolResultBlock]


class MessagesTool(msgspec.Struct):
    """A function that the model may call; `input_schema` is a JSON schema. There are no other kinds here."""

    name: FunctionName
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: Any = None


class MessagesToolChoice(msgspec.Struct):
    """Whether a function may or has to be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None


class MessagesMetadata(msgspec.Struct):
    """Says who the client's user is; it changes nothing."""

    user_id: str | None = None


class SchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema"):
    """JSON that a schema describes."""

    schema: msgspec.Raw


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    """What the text of the answer has to be; no model here knows efforts."""

    format: SchemaFormat | None = None
    effort: None = None


class PromptBody(TermsBody, kw_only=True):
    """`POST /v1/messages/count_tokens`: what makes the prompt."""

    messages: Annotated[list[MessageParam], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[MessagesTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessagesToolChoice | None = None
    output_config: OutputConfig | None = None
    # Fields that change nothing: who the client is, and what is to be cached.
    cache_control: Any = None
    user_profile_id: str | None = None
    workspace_id: str | None = None
    # Fields that are refused unless they are off: see `bodies._OFF`.
    speed: Any = None
    thinking: Any = None
    mcp_servers: Any = None
    context_management: Any = None

    def chat(self) -> ChatBody:
        """Return the chat completion that this stands for.

        Raises:
            ApiError: 400, a block stands where it has no meaning.
        """
        messages = [] if self.system is None else [Message(role="system", content=_text(self.system))]
        for message in self.messages:
            messages += _messages(message)
        choice = self.tool_choice
        return ChatBody(
            **self.terms(),
            messages=messages,
            tools=[_tool(tool) for tool in self.tools or ()],
            tool_choice=None if choice is None else _choice(choice),
            parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
            # A last turn of the assistant is the beginning of the answer.
            continue_final_message=True if messages[-1].role == "assistant" else None,
        )


class MessagesBody(PromptBody, kw_only=True):
    """`POST /v1/messages`."""

    max_tokens: PositiveInt
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    stream: bool | None = None
    metadata: MessagesMetadata | None = None
    # Fields that are refused unless they are off: see `bodies._OFF`.
    container: Any = None
    diagnostics: Any = None
    inference_geo: Any = None
    service_tier: Any = None

    def chat(self) -> ChatBody:
        """Return the chat completion that this stands for; raises as `PromptBody.chat`."""
        return msgspec.structs.replace(
            super().chat(),
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            response_format=_response_format(self.output_config),
        )


def _messages(message: MessageParam) -> list[Message]:
    """Return a turn as messages: results of calls are messages of their own."""
    if isinstance(message.content, str):
        return [Message(role=message.role, content=message.content)]
    results: list[Message] = []
    texts: list[str] = []
    calls: list[ToolCall] = []
    for block in message.content:
        match block:
            case TextBlock(text=text):
                texts.append(text)
            case ToolUseBlock() if message.role == "assistant":
                arguments = msgspec.json.encode(block.input).decode()
                calls.append(ToolCall(block.id, CalledFunction(block.name, arguments)))
            case ToolResultBlock() if message.role == "user":
                content = _text(block.content or "")
                told = f"Error: {content}" if block.is_error else content
                results.append(Message(role="tool", content=told, tool_call_id=block.tool_use_id))
            case _:
                raise bad_request(
                    "tool_use stands in turns of the assistant, tool_result in turns of the user", "messages"
                )
    if texts or calls or not results:
        results.append(Message(role=message.role, content="".join(texts), tool_calls=calls or None))
    return results


def _response_format(config: OutputConfig | None) -> JsonSchemaFormat | None:
    given = None if config is None else config.format
    return None if given is None else JsonSchemaFormat(JsonSchema("output", given.schema))


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


def _tool(tool: MessagesTool) -> Tool:
    return Tool("function", FunctionDefinition(tool.name, tool.description, tool.input_schema, tool.strict))


def _choice(choice: MessagesToolChoice) -> Literal["none", "auto", "required"] | NamedTool:
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if choice.name is None:
        raise bad_request("a tool_choice of type tool needs a name", "tool_choice")
    return NamedTool("function", NamedFunction(choice.name))
