"""Request bodies: strict types and ranges, and the name of the field that is wrong."""

from __future__ import annotations

import json
import math
import re
from functools import cache
from typing import Annotated, Any, Final, Literal, TypeVar, get_type_hints

import msgspec
from msgspec import Meta
from starlette.requests import Request as HttpRequest

from expediter.core.request import MAX_PIN_S
from expediter.gateway.errors import ApiError, bad_request
from expediter.gateway.terms import MAX_SESSION_CHARS, MAX_TARGET_MS

MAX_BODY_BYTES: Final = 16 << 20
MAX_N: Final = 64
MAX_CHOICES: Final = 256
MAX_STOPS: Final = 16

_INT64_MAX: Final = 2**63 - 1
PositiveInt = Annotated[int, Meta(ge=1, le=2**31 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TargetMs = Annotated[float, Meta(gt=0, le=MAX_TARGET_MS)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's options, and vLLM's: usage in every chunk. Nothing is obfuscated here."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
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

    json: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)  # a plain default has no place in a JSON schema
    regex: Annotated[str, Meta(min_length=1)] | None = None
    choice: Annotated[list[str], Meta(min_length=1, max_length=4096)] | None = None
    grammar: Annotated[str, Meta(min_length=1)] | None = None
    json_object: bool | None = None


class TermsBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that the bodies of all APIs share: which model, and on which terms. Null means the default.

    What is not declared is refused by name: to ignore it would be to promise what is not kept.
    """

    model: str | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    cache_hint: Literal["drop"] | PinHint | None = None
    prompt_cache_key: Annotated[str, Meta(min_length=1, max_length=MAX_SESSION_CHARS)] | None = None
    slo_class: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    ttft_ms: TargetMs | None = None
    tpot_ms: TargetMs | None = None
    deadline_ms: TargetMs | None = None
    refuse_late: bool | None = None

    def terms(self) -> dict[str, Any]:
        """Return these fields, for a body that is made of this one."""
        return {name: getattr(self, name) for name in TermsBody.__struct_fields__}


class GenerationBody(TermsBody, kw_only=True):
    """Fields that completions and chat completions share."""

    max_tokens: PositiveInt | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
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
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    # Fields that say something of the client, and change nothing.
    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, Any] | None = None
    # Fields that are refused unless they are off: see `_OFF`.
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    service_tier: Any = None
    store: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    early_stopping: Any = None
    prompt_logprobs: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    truncate_prompt_tokens: Any = None
    spaces_between_special_tokens: Any = None
    return_token_ids: Any = None
    return_tokens_as_token_ids: Any = None
    moderation: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None


_OFF: Final[dict[str, tuple[Any, ...]]] = {
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), ()),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "use_beam_search": (False,),
    "length_penalty": (1.0, 1),
    "early_stopping": (False,),
    "prompt_logprobs": (),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "truncate_prompt_tokens": (),
    "spaces_between_special_tokens": (True,),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "prediction": (),
    "web_search_options": (),
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "max_tool_calls": (),
    "reasoning": ({}, {"effort": "none"}),
    "truncation": ("disabled",),
    "moderation": (),
    "prompt_cache_options": ({}, {"mode": "implicit"}),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "access_programs": (),
    "background_options": ({},),
    "image": (),
    "thinking": ({"type": "disabled"}, {"type": "adaptive"}),
    "diagnostics": (),
    "inference_geo": (),
    "speed": ("standard",),
    "container": (),
    "mcp_servers": ([],),
    "context_management": (),
}
"""Fields that would change what a request means and that we do not have, and the values that switch them off."""
_INSTEAD: Final = {
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), "structured_outputs"),
    **{"functions": "tools", "function_call": "tool_choice"},
}

Body = TypeVar("Body", bound=msgspec.Struct)
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
        raise _invalid(str(error)) from error
    except RecursionError as error:
        raise bad_request("the body is nested too deeply") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        param = _field_without_number(raw)
        if param is not None:
            raise bad_request(f"{param} must be a finite number", param) from error
        raise bad_request("the body is not valid JSON in UTF-8") from error
    _refuse_unsupported(body)
    return body


def _refuse_unsupported(body: msgspec.Struct) -> None:
    for name, switched_off in refused_fields(type(body)).items():
        value = _without_nulls(getattr(body, name))
        if value is None or any(type(value) is type(off) and value == off for off in switched_off):
            continue
        instead = f": {_INSTEAD[name]} has taken its place" if name in _INSTEAD else ""
        raise bad_request(f"{name} is not supported{instead}", name)


def _without_nulls(value: object) -> object:
    """Return a value that says nothing where it says null, which encoders write for what was never given."""
    return {key: each for key, each in value.items() if each is not None} if isinstance(value, dict) else value


@cache
def refused_fields(kind: type[msgspec.Struct]) -> dict[str, tuple[Any, ...]]:
    """Return the fields of a body that are declared only to be refused clearly, and the values that are taken."""
    declared = get_type_hints(kind)
    return {name: off for name, off in _OFF.items() if declared.get(name) is Any}


def _invalid(message: str) -> ApiError:
    """Return the error for a body of the wrong shape, with the field at fault as msgspec names it."""
    path = _PATH.search(message)
    named = re.fullmatch(r"Object (?:missing required|contains unknown) field `(\w+)`", message)
    if named is not None and "unknown" in message:
        return bad_request(f"there is no parameter {named[1]}", named[1])
    return bad_request(message, path[1] if path else named and named[1])


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
