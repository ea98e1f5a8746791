"""Grammars through llguidance: from what a client writes to a matcher. No torch: the gateway's workers use it, too."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from expediter.core.errors import ConfigurationError, InvariantError, RequestError
from expediter.core.request import Grammar
from expediter.engine.tokenizer import Tokenizer

GrammarKind = Literal["json_schema", "regex", "lark", "choice"]
"""How a client writes a grammar. "lark" is llguidance's dialect of Lark, or llama.cpp's GBNF; "choice" a JSON list of
texts, one of which the output has to be."""

_WHITESPACE: Final = r"[ ]?|\n[ ]{0,40}|\n\t{0,10}"
"""Between JSON's tokens: nothing or a space, or a line's end and its indentation. It is bounded because small models,
free to do so, write white space until max_tokens."""

_JSON_OPTIONS: Final = {"whitespace_pattern": _WHITESPACE, "coerce_one_of": False, "lenient": False}

_MAX_LEXER_STATES: Final = 20_000
"""Of one grammar, 1 to 2 kB each; llguidance's own limit would let a grammar have half a gigabyte. Its other limits are
left as they are: fuel for compiling and for every mask, items of the parser, size of the grammar."""

_NUM_REHEARSED_TOKENS: Final = 4
_MESSAGE_CHARACTERS: Final = 240
_UNPRINTABLE: Final = re.compile(r"[^\x20-\x7e]+")
_IN_OUR_WORDS: Final = {  # llguidance's advice is about options that clients do not have
    "oneOf constraints are not supported": "oneOf works only where a required constant or the type tells its branches "
    "apart; anyOf may do",
    "Expecting object schema": "a schema has to be a JSON object",
}
_REGEX_ERROR: Final = re.compile(r"^error: (.+)$", re.MULTILINE)
_FOREIGN: Final = re.compile(r"panic|[Bb]acktrace|assertion")


def json_rule(schema: Mapping[str, Any]) -> str:
    """Return the body of a Lark rule for what a schema describes, for grammars that the gateway puts together."""
    return "%json " + json.dumps({**schema, "x-guidance": _JSON_OPTIONS}, ensure_ascii=False)


def grammar_text(kind: GrammarKind, text: str) -> str:
    """Return a client's grammar as the text that a `GrammarCompiler` takes.

    Raises:
        RequestError: the text is not of its kind.
    """
    try:
        match kind:
            case "json_schema":
                return LLMatcher.grammar_from_json_schema(text, overrides=dict(_JSON_OPTIONS))  # type: ignore[arg-type]
            case "choice":
                options = " | ".join(json.dumps(option, ensure_ascii=False) for option in json.loads(text))
                return LLMatcher.grammar_from_lark(f"start: {options}")
            case "regex":
                return LLMatcher.grammar_from_regex(text)
            case "lark":
                return grammar_from("grammar", text)
    except (ValueError, RecursionError) as error:
        raise RequestError(readable(str(error))) from error


class GrammarCompiler:
    """Makes matchers for one model. Compiling may take long; it lets go of the GIL.

    Args:
        tokenizer_file: tokenizer.json.
        vocab_size: of the model's logits.
        eos_token_ids: what may follow once the grammar is satisfied.
    Raises:
        ConfigurationError: llguidance cannot use the tokenizer, or no token ends a sequence.
    """

    def __init__(self, tokenizer_file: Path, *, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        if not eos_token_ids:
            raise ConfigurationError("structured output needs a model with an end-of-sequence token")
        try:
            self._tokenizer = LLTokenizer(str(tokenizer_file), n_vocab=vocab_size, eos_token=list(eos_token_ids))
        except ValueError as error:
            raise ConfigurationError("structured output does not work with this model's tokenizer") from error
        self._limits = LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
        self.vocab_size = vocab_size

    @classmethod
    def of_folder(cls, folder: Path) -> GrammarCompiler:
        """Return the compiler for the model in a folder.

        Raises:
            ConfigurationError: as above, or the folder has no tokenizer that can be read.
        """
        text = Tokenizer.from_folder(folder)
        return cls(folder / "tokenizer.json", vocab_size=text.vocab_size, eos_token_ids=text.eos_token_ids)

    def compile(self, text: str) -> LLMatcher:
        """Return a matcher at the grammar's beginning, after a rehearsal: some grammars break at their first tokens.

        Args:
            text: from `grammar_text`.
        Raises:
            RequestError: it does not compile, needs what llguidance lacks, or is too large.
        """
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        rehearsed = matcher.deep_copy()
        for _ in range(_NUM_REHEARSED_TOKENS):
            if rehearsed.is_stopped():
                break
            allowed = np.unpackbits(np.frombuffer(rehearsed.compute_bitmask(), np.uint8), bitorder="little")
            rehearsed.consume_token(int(allowed.argmax()))
        if rehearsed.is_error():
            raise RequestError(readable(rehearsed.get_error()))
        return matcher


class CompiledGrammars:
    """The compiled grammars of live requests, and the latest of others. Threads may share it.

    Args:
        load: makes the compiler, when it is first needed: that takes some tenths of a second.
        max_latest: grammars to keep beyond the requests that they came with.
    """

    def __init__(self, load: Callable[[], GrammarCompiler], max_latest: int = 64) -> None:
        self._load = load
        self._max_latest = max_latest
        self._compiler: GrammarCompiler | None = None
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._of_grammar: WeakKeyDictionary[Grammar, _Compiled] = WeakKeyDictionary()
        self._of_text: WeakValueDictionary[str, _Compiled] = WeakValueDictionary()
        self._latest: OrderedDict[str, _Compiled] = OrderedDict()

    def prepare(self, grammar: Grammar) -> None:
        """Compile a grammar, unless its text is known; `matcher` is quick as long as this object lives. May take long.

        Raises:
            RequestError: it cannot be used.
        """
        with self._lock:
            compiled = self._of_text.get(grammar.text)
        if compiled is None:
            compiled = _Compiled(self._the_compiler().compile(grammar.text))
        with self._lock:
            self._of_text[grammar.text] = self._of_grammar[grammar] = self._latest[grammar.text] = compiled
            self._latest.move_to_end(grammar.text)
            if len(self._latest) > self._max_latest:
                self._latest.popitem(last=False)

    def _the_compiler(self) -> GrammarCompiler:
        with self._loading:
            try:
                self._compiler = self._compiler or self._load()
            except ConfigurationError as error:
                raise RequestError(str(error)) from error
            return self._compiler

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """Return a new matcher at the beginning of a grammar that has been prepared.

        Raises:
            InvariantError: it has not.
        """
        with self._lock:
            compiled = self._of_grammar.get(grammar)
        if compiled is None:
            raise InvariantError("a grammar is used before it was prepared")
        return compiled.template.deep_copy()


class _Compiled:
    """A matcher to copy; copies share what they learn of the grammar's tokens."""

    __slots__ = ("__weakref__", "template")

    def __init__(self, template: LLMatcher) -> None:
        self.template = template


def readable(message: str) -> str:
    """Return llguidance's message as far as it is about the client's grammar, in plain characters on one line."""
    regex_error = _REGEX_ERROR.search(message)
    if regex_error is not None:  # among drawings of where it is
        message = f"invalid regex: {regex_error[1]}"
    line = " ".join(_UNPRINTABLE.sub(" ", message.partition("<non-verbose/>")[0]).split())
    if not line or _FOREIGN.search(line):
        return "the grammar is too complex"
    line = next((words for beginning, words in _IN_OUR_WORDS.items() if line.startswith(beginning)), line)
    return line[:_MESSAGE_CHARACTERS]
