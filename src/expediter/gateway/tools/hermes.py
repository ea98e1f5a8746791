"""Hermes' format, which Qwen, SmolLM2 and many others share: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

SmolLM2 was shown a list of such objects between the tags; both are read. Source: the function calling of
NousResearch's Hermes models and of HuggingFaceTB's SmolLM2.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import Enum, auto
from typing import Final

from expediter.gateway.tools.base import MAX_FORCED_CALLS, Function, Parsed, function_rules
from expediter.gateway.tools.reader import CallSequence, Reading

_OPEN: Final = "<tool_call>"
_CLOSE: Final = "</tool_call>"
_SEPARATORS: Final = " \t\r\n,[]"
"""Between the calls of a list, and around a single one."""


class _State(Enum):
    TEXT = auto()
    """Outside of any tag."""
    BETWEEN = auto()
    """Inside, before a call or behind one."""
    CALL = auto()
    """In what may be a call."""


class HermesParser:
    """A `CallParser`. What turns out to be no call is text like any other, its tags included."""

    def __init__(self) -> None:
        self._calls = CallSequence(_CLOSE)
        self._state = _State.TEXT
        self._held = ""
        self._raw = ""
        """What was read since the tag opened, in case that it is no call after all."""
        self._calls_before = 0
        self._follows_call = False

    @property
    def num_calls(self) -> int:
        return self._calls.num_calls

    def push(self, text: str) -> Parsed:
        self._held += text
        parsed = Parsed()
        while self._advance(parsed):
            pass
        return parsed

    def flush(self) -> Parsed:
        parsed = Parsed()
        if self._state is _State.TEXT:
            parsed.text += "" if self._follows_call and not self._held.strip() else self._held
        elif self._state is _State.CALL and self._calls.held:
            parsed.text += self._raw + self._calls.held
        elif self._state is _State.BETWEEN and self.num_calls == self._calls_before:
            parsed.text += self._raw + self._held
        return parsed

    def _advance(self, parsed: Parsed) -> bool:
        """Take one step with what is held; return whether another one may be possible."""
        match self._state:
            case _State.TEXT:
                return self._read_text(parsed)
            case _State.BETWEEN:
                return self._read_between(parsed)
            case _State.CALL:
                return self._read_call(parsed)

    def _read_text(self, parsed: Parsed) -> bool:
        at = self._held.find(_OPEN)
        num_shown = len(self._held) - _num_begun(self._held, _OPEN) if at < 0 else at
        shown = self._held[:num_shown]
        if self._follows_call:  # white space behind a call belongs to the format, unless text follows
            if at < 0 and not shown.strip():
                return False
            shown = shown if shown.strip() else ""
        parsed.text += shown
        self._follows_call = self._follows_call and not shown
        self._held = self._held[num_shown:]
        if at < 0:
            return False
        self._raw, self._held = _OPEN, self._held[len(_OPEN) :]
        self._calls_before = self.num_calls
        self._state = _State.BETWEEN
        return True

    def _read_between(self, parsed: Parsed) -> bool:
        rest = self._held.lstrip(_SEPARATORS)
        self._raw += self._held[: len(self._held) - len(rest)]
        self._held = rest
        if rest.startswith(_CLOSE):
            self._follows_call = self.num_calls > self._calls_before
            if not self._follows_call:
                parsed.text += self._raw + _CLOSE
            self._held = rest[len(_CLOSE) :]
            self._state = _State.TEXT
            return True
        if rest.startswith("{"):
            self._calls.begin()
            self._state = _State.CALL
            return True
        if rest and not _CLOSE.startswith(rest):
            self._give_up(parsed)
            return True
        return False

    def _read_call(self, parsed: Parsed) -> bool:
        if not self._held:
            return False
        reading, self._held = self._calls.read(self._held, parsed)
        if reading is Reading.NO_CALL:
            self._give_up(parsed)
        elif reading is Reading.DONE:
            self._state = _State.BETWEEN
        return reading in (Reading.NO_CALL, Reading.DONE)

    def _give_up(self, parsed: Parsed) -> None:
        """What stands behind the tag is no call: all of it is text."""
        parsed.text += self._raw + self._held[:1]
        self._held, self._raw = self._held[1:], ""
        self._state = _State.TEXT


def _num_begun(text: str, tag: str) -> int:
    """Return the length of the longest end of `text` that begins `tag`."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if tag.startswith(text[-n:])), 0)


class HermesFormat:
    """A `ToolFormat`."""

    def parser(self) -> HermesParser:
        return HermesParser()

    def instructions(self, functions: Sequence[Function]) -> str:
        tools = "\n".join(json.dumps(function.as_tool(), ensure_ascii=False) for function in functions)
        example = self.call_text("NAME", '{"PARAMETER": "VALUE"}')
        return (
            f"These functions can be called, each described by a line of JSON:\n<tools>\n{tools}\n</tools>\n"
            f"To call one, answer with its name and arguments in this form, once per call:\n{example}"
        )

    def call_text(self, name: str, arguments: str) -> str:
        return f'{_OPEN}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments}}}\n{_CLOSE}'

    def result_text(self, content: str) -> str:
        return f"<tool_response>\n{content}\n</tool_response>"

    def rules(self, functions: Sequence[Function], *, is_parallel: bool) -> str:
        call = f'"{_OPEN}" call'
        lines = [
            f'calls: {call} ("\\n" {call}){{0,{MAX_FORCED_CALLS - 1}}}' if is_parallel else f"calls: {call}",
            "free: (before call)* TEXT" if is_parallel else "free: before call | TEXT",
            "TEXT: /(.|\\n)*/",
            f'before[lazy]: TEXT "{_OPEN}"',  # the tag ends it wherever a call may begin
            f'call: "\\n" function "\\n{_CLOSE}"',
        ]
        return "\n".join([*lines, *function_rules(functions, "arguments")]) + "\n"
