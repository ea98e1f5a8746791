"""Request bodies: strict types and ranges, and the name of the field that is wrong."""

from __future__ import annotations

import json
import math
import re
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta
from starlette.requests import Request as HttpRequest

from expediter.core.request import MAX_PIN_S
from expediter.gateway.errors import ApiError, bad_request
from expediter.gateway.terms import MAX_SESSION_CHARS, MAX_TARGET_MS

MAX_BODY_BYTES: Final = 16 << 20
MAX_N: Final = 64
MAX_PROMPTS: Final = 256
MAX_CHOICES: Final = 256
MAX_STOPS: Final = 16

_INT64_MAX: Final = 2**63 - 1
PositiveInt = Annotated[int, Meta(ge=1, le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TargetMs = Annotated[float, Meta(gt=0, le=MAX_TARGET_MS)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]


class StreamOptions(msgspec.Struct):
    """OpenAI's option, and vLLM's second one: usage in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class PinHint(msgspec.Struct, forbid_unknown_fields=True):
    """Keep what the request leaves in the prefix cache for so many seconds."""

    pin_s: Annotated[float, Meta(gt=0, le=MAX_PIN_S)]


class JsonSchema(msgspec.Struct):
    """The schema of a `response_format`. Whether `strict` or not, the output matches it."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    schema: msgspec.Raw
    description: str | None = None
    strict: bool | None = None


class TextFormat(msgspec.Struct, tag_field="type", tag="text"):
    """Any output."""


class JsonObjectFormat(msgspec.Struct, tag_field="type", tag="json_object"):
    """A JSON object, whatever it holds."""


class JsonSchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema"):
    """JSON that a schema describes."""

    json_schema: JsonSchema


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's way to say what the output has to match: exactly one of these."""

    json: msgspec.Raw = msgspec.Raw()
    regex: Annotated[str, Meta(min_length=1)] | None = None
    choice: Annotated[list[str], Meta(min_length=1, max_length=4096)] | None = None
    grammar: Annotated[str, Meta(min_length=1)] | None = None
    json_object: bool | None = None


class GenerationBody(msgspec.Struct, kw_only=True):
    """Fields that completions and chat completions share; null means the default."""

    model: str | None = None
    max_tokens: PositiveInt | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=_INT64_MAX)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    cache_hint: Literal["drop"] | PinHint | None = None
    prompt_cache_key: Annotated[str, Meta(min_length=1, max_length=MAX_SESSION_CHARS)] | None = None
    slo_class: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    ttft_ms: TargetMs | None = None
    tpot_ms: TargetMs | None = None
    deadline_ms: TargetMs | None = None
    refuse_late: bool | None = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    # Fields that change the meaning of a request and that we do not have: anything but "off" is refused.
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    use_beam_search: Any = None
    prompt_logprobs: Any = None
    include_stop_str_in_output: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    truncate_prompt_tokens: Any = None


class CompletionBody(GenerationBody, kw_only=True):
    """`POST /v1/completions`. A list of texts or of token lists is that many prompts; a list of ids is one."""

    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Any = None
    suffix: Any = None


class ContentPart(msgspec.Struct):
    """A part of a message; only text parts are taken."""

    type: str
    text: str | None = None


class Message(msgspec.Struct):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    tool_calls: Any = None


class ChatBody(GenerationBody, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    continue_final_message: Any = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """`POST /tokenize`, vLLM's shape: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """`POST /detokenize`, vLLM's shape."""

    model: str | None = None
    tokens: list[TokenId]


_OFF: Final[dict[str, tuple[Any, ...]]] = {
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "bad_words": ([],),
    "best_of": (1,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
}
_UNSUPPORTED: Final = (
    *(
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "use_beam_search",
        "prompt_logprobs",
        "include_stop_str_in_output",
    ),
    *("allowed_token_ids", "bad_words", "truncate_prompt_tokens", "best_of", "suffix", "tools", "tool_choice"),
    *("functions", "function_call", "modalities", "audio", "chat_template", "chat_template_kwargs"),
    "continue_final_message",
)

Body = TypeVar("Body")
_PATH: Final = re.compile(r"`\$\.([A-Za-z_]+)")


async def read_body(request: HttpRequest) -> bytes:
    """Return the body.

    Raises:
        ApiError: 413, it is larger than MAX_BODY_BYTES; noticed before it is all here.
    """
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > MAX_BODY_BYTES:
            raise ApiError(413, f"the body exceeds {MAX_BODY_BYTES} bytes", headers={"Connection": "close"})
    return bytes(raw)


def decode_body(raw: bytes, decoder: msgspec.json.Decoder[Body]) -> Body:
    """Return the typed body.

    Raises:
        ApiError: 400, naming the field if one is at fault.
    """
    try:
        body = decoder.decode(raw)
    except msgspec.ValidationError as error:
        field = _PATH.search(str(error))
        raise bad_request(str(error), field[1] if field else _missing_field(str(error))) from error
    except RecursionError as error:
        raise bad_request("the body is nested too deeply") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        param = _field_without_number(raw)
        if param is not None:
            raise bad_request(f"{param} must be a finite number", param) from error
        raise bad_request("the body is not valid JSON in UTF-8") from error
    for name in _UNSUPPORTED:
        value = getattr(body, name, None)
        if value is not None and not any(type(value) is type(off) and value == off for off in _OFF.get(name, ())):
            instead = ": structured_outputs has taken its place" if name.startswith("guided_") else ""
            raise bad_request(f"{name} is not supported{instead}", name)
    return body


def _missing_field(message: str) -> str | None:
    match = re.search(r"missing required field `(\w+)`", message)
    return match[1] if match else None


def _field_without_number(raw: bytes) -> str | None:
    """Return the top-level field that holds NaN or Infinity, which JSON does not have but some encoders write."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(body, dict):
        return None
    return next((name for name, value in body.items() if _holds_non_finite(value)), None)


def _holds_non_finite(value: object) -> bool:
    """Whether a number anywhere in a parsed JSON value is not finite; walks without recursion."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, float) and not math.isfinite(item):
            return True
        if isinstance(item, dict):
            pending += item.values()
        elif isinstance(item, list):
            pending += item
    return False
