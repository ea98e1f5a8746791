"""Text to token ids and back, and the chat template. Imports neither torch nor transformers: the gateway uses it."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import tokenizers
from jinja2 import TemplateError, meta
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import decoders

from expediter.core.errors import ConfigurationError, RequestError

_SPECIAL_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """A Hugging Face fast tokenizer read from a model folder.

    Attributes:
        vocab_size: of the model (its logits), which may exceed the tokenizer's own; ids lie in [0, vocab_size).
        eos_token_ids: every id that ends a sequence, from generation_config.json and config.json.
        special_token_ids: ids that `skip_special_tokens` leaves out.
        chat_template: as it is written, in Jinja; "" if there is none.
        template_knows_tools: whether the chat template writes down the functions that may be called, and past calls.
        is_byte_level: each token stands for fixed bytes (GPT-2's scheme), whatever its neighbours.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        vocab_size: int | None = None,
        eos_token_ids: tuple[int, ...] = (),
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self._backend = backend
        self.vocab_size = vocab_size or backend.get_vocab_size()
        self.eos_token_ids = eos_token_ids
        self.special_token_ids = frozenset(
            token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.is_byte_level = isinstance(backend.decoder, decoders.ByteLevel)
        self._special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template or ""
        environment = _environment()
        self._template = None if chat_template is None else environment.from_string(chat_template)
        parsed = environment.parse(self.chat_template)
        self.template_knows_tools = "tools" in meta.find_undeclared_variables(parsed)
        self._bytes_of_token: dict[int, bytes] = {}

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Load tokenizer.json and what belongs to it.

        Raises:
            ConfigurationError: a file is missing or cannot be read.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigurationError(f"{folder} has no tokenizer.json; only fast tokenizers are supported")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the binding raises bare Exception
            raise ConfigurationError(f"{path} cannot be read: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        config = _read_json(folder / "config.json")
        generation = _read_json(folder / "generation_config.json")
        settings = _read_json(folder / "tokenizer_config.json")
        special_tokens = {name: _token_text(settings[name]) for name in _SPECIAL_TOKENS if settings.get(name)}
        text_config = config.get("text_config") or config
        eos_token_ids = dict.fromkeys(
            [*_ids(generation.get("eos_token_id")), *_ids(text_config.get("eos_token_id", config.get("eos_token_id")))]
        )
        if not eos_token_ids and "eos_token" in special_tokens:
            eos_token_ids = dict.fromkeys(_ids(backend.token_to_id(special_tokens["eos_token"])))
        try:
            return cls(
                backend,
                vocab_size=text_config.get("vocab_size"),
                eos_token_ids=tuple(eos_token_ids),
                chat_template=_read_chat_template(folder, settings),
                special_tokens=special_tokens,
            )
        except TemplateError as error:
            raise ConfigurationError(f"the chat template of {folder} is not valid: {error}") from error

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text.

        Args:
            add_special_tokens: let the tokenizer add what it puts around a text, such as a beginning-of-sequence token.
        Raises:
            RequestError: the text is not valid Unicode (a lone surrogate).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError("text holds a lone surrogate", param="prompt") from error
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids as a whole; ids without a token yield nothing."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final: bool = False,
    ) -> list[int]:
        """Return the token ids of a conversation laid out by the model's own template.

        Args:
            messages: `role` and `content` (text) each, in order; what else the template knows of messages.
            add_generation_prompt: end where the assistant's answer begins.
            tools: functions that may be called, in OpenAI's shape, for a template that knows them.
            continue_final: end where the text of the last message ends, in place of both.
        Raises:
            RequestError: the model has no template, or its template refuses these messages.
        """
        if self._template is None:
            raise RequestError("the model has no chat template", param="messages")
        try:
            text = self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt and not continue_final,
                tools=tools or None,
                **self._special_tokens,
            )
            if continue_final:
                final = str(messages[-1]["content"]).strip()
                text = text[: text.rindex(final) + len(final)]
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise RequestError("the model's chat template refuses these messages", param="messages") from error
        return self.encode(text, add_special_tokens=False)

    def token_text(self, token_id: int) -> str:
        """Return one token as text on its own, special tokens included; broken characters become U+FFFD."""
        return self.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a byte-level token stands for; empty for ids without a token."""
        found = self._bytes_of_token.get(token_id)
        if found is None:
            token = self._backend.id_to_token(token_id) or ""
            try:
                found = bytes(_BYTE_OF_CHARACTER[character] for character in token)
            except KeyError:  # an added token is its own text, as the decoder has it
                found = token.encode()
            self._bytes_of_token[token_id] = found
        return found


def _byte_of_character() -> dict[str, int]:
    """Return the inverse of GPT-2's table: printable bytes stand for themselves, the rest for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER: Final = _byte_of_character()


def _environment() -> ImmutableSandboxedEnvironment:
    """Return the environment that Hugging Face's templates are written for."""
    # Autoescape would put HTML entities into prompts. The template is the operator's, and it runs sandboxed.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[loopcontrols],
        autoescape=False,
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format_: datetime.datetime.now().astimezone().strftime(format_)
    return environment


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, empty if there is no file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigurationError(f"{path} does not hold a JSON object")
    return value


def _read_chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named ones
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _token_text(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _ids(value: int | Sequence[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)
