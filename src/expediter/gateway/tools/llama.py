"""Llama 3's format: an answer that is nothing but `{"name": …, "parameters": {…}}`, several divided by semicolons.

Source: the chat templates of Meta's Llama 3.1, 3.2 and 3.3.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import Enum, auto
from typing import Final

from expediter.gateway.tools.base import MAX_FORCED_CALLS, Function, Parsed, function_rules
from expediter.gateway.tools.reader import CallSequence, Reading

_PYTHON_TAG: Final = "<|python_tag|>"
"""May stand before a call; where it is a special token, it is not in the text at all."""


class _State(Enum):
    START = auto()
    """Before a call or anything else."""
    CALL = auto()
    """In what may be a call."""
    TEXT = auto()
    """It was no call: all that follows is text."""


class LlamaParser:
    """A `CallParser`. An answer that does not begin with a call has none."""

    def __init__(self) -> None:
        self._calls = CallSequence()
        self._state = _State.START
        self._held = ""
        self._raw = ""
        """White space and tag before what may be a call, in case that it is none."""

    @property
    def num_calls(self) -> int:
        return self._calls.num_calls

    def push(self, text: str) -> Parsed:
        self._held += text
        parsed = Parsed()
        if self._state is _State.START:
            self._read_start()
        while self._state is _State.CALL and self._held:
            self._read_call(parsed)
        if self._state is _State.TEXT:
            parsed.text += self._held
            self._held = ""
        return parsed

    def flush(self) -> Parsed:
        if self._state is _State.CALL:
            held = self._calls.held
            return Parsed(self._raw + held if held else "")
        return Parsed() if self._state is not _State.START or self.num_calls else Parsed(self._raw + self._held)

    def _read_start(self) -> None:
        rest = self._held.lstrip(" \t\r\n;" if self.num_calls else " \t\r\n")
        if not rest or (len(rest) < len(_PYTHON_TAG) and _PYTHON_TAG.startswith(rest)):
            return
        rest = rest.removeprefix(_PYTHON_TAG)
        if not rest:
            return
        self._raw = self._held[: len(self._held) - len(rest)]
        if rest.startswith("{"):
            self._calls.begin()
            self._held = rest
            self._state = _State.CALL
        else:
            self._state = _State.TEXT

    def _read_call(self, parsed: Parsed) -> None:
        reading, self._held = self._calls.read(self._held, parsed)
        if reading is Reading.NO_CALL:
            self._held = self._raw + self._held
            self._state = _State.TEXT
        elif reading is Reading.DONE:
            self._state = _State.START
            self._read_start()


class LlamaFormat:
    """A `ToolFormat`."""

    def parser(self) -> LlamaParser:
        return LlamaParser()

    def instructions(self, functions: Sequence[Function]) -> str:
        tools = "\n".join(json.dumps(function.as_tool(), ensure_ascii=False) for function in functions)
        example = self.call_text("NAME", '{"PARAMETER": "VALUE"}')
        return f"These functions can be called:\n{tools}\nTo call one, answer with nothing but this form:\n{example}"

    def call_text(self, name: str, arguments: str) -> str:
        return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "parameters": {arguments}}}'

    def result_text(self, content: str) -> str:
        return content

    def rules(self, functions: Sequence[Function], *, is_parallel: bool) -> str:
        lines = [
            f'calls: function ("; " function){{0,{MAX_FORCED_CALLS - 1}}}' if is_parallel else "calls: function",
            "free: calls | TEXT",
            "TEXT: /([^{](.|\\n)*)?/",  # what begins with a brace is a call
        ]
        return "\n".join([*lines, *function_rules(functions, "parameters")]) + "\n"
