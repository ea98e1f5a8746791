"""Body of a chat completion. The other APIs for conversations are turned into it."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from expediter.gateway.bodies import GenerationBody, PositiveInt
from expediter.gateway.errors import bad_request
from expediter.gateway.tools.base import Function
from expediter.gateway.tools.choice import ToolUse, only

MAX_TOOLS: Final = 128
FunctionName = Annotated[str, Meta(min_length=1, max_length=64, pattern="^[a-zA-Z0-9_.-]+$")]


class ContentPart(msgspec.Struct):
    """A part of a message; only text parts are taken."""

    type: str
    text: str | None = None


class CalledFunction(msgspec.Struct):
    """What a call calls; `arguments` is the text of a JSON object. "" stands for none, as clients write it."""

    name: FunctionName
    arguments: str

    def __post_init__(self) -> None:
        self.arguments = self.arguments or "{}"


class ToolCall(msgspec.Struct):
    """A call that the model made earlier in the conversation."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class Message(msgspec.Struct):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: Any = None


class FunctionDefinition(msgspec.Struct):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def as_function(self) -> Function:
        return Function(self.name, self.description or "", self.parameters or _NO_PARAMETERS, bool(self.strict))


_NO_PARAMETERS: Final[dict[str, Any]] = {"type": "object", "properties": {}}


class Tool(msgspec.Struct):
    """OpenAI's wrapping of a function; there are no other kinds here."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(msgspec.Struct):
    """Which function."""

    name: FunctionName


class NamedTool(msgspec.Struct):
    """A choice of one function, which has to be called."""

    type: Literal["function"]
    function: NamedFunction


class ChatBody(GenerationBody, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    # Fields that are refused unless they are off: see `bodies._OFF`.
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    documents: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    prediction: Any = None
    web_search_options: Any = None

    @property
    def num_alternatives(self) -> int | None:
        """Logprobs asked for per token, None for none at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def tool_use(self) -> ToolUse:
        """Return what it says of tools.

        Raises:
            ApiError: 400, it forces a call of a function that there is not, or offers one name twice.
        """
        functions = tuple(tool.function.as_function() for tool in self.tools or ())
        return tool_use_of(functions, self.tool_choice, self.parallel_tool_calls)


def tool_use_of(
    functions: tuple[Function, ...],
    choice: Literal["none", "auto", "required"] | NamedTool | None,
    parallel: bool | None,
) -> ToolUse:
    """Return what a request says of tools; as `ChatBody.tool_use`."""
    if len({function.name for function in functions}) < len(functions):
        raise bad_request("two tools have the same name", "tools")
    is_parallel = parallel is not False
    match choice:
        case NamedTool(function=NamedFunction(name=name)):
            return ToolUse(only(functions, name, "tool_choice"), "required", is_parallel=False)
        case "required":
            if not functions:
                raise bad_request("tool_choice requires a call, but there are no tools", "tool_choice")
            return ToolUse(functions, "required", is_parallel)
        case "none":
            return ToolUse(functions, "none", is_parallel)
    return ToolUse(functions, "auto" if functions else "none", is_parallel)
