"""Hermes' format, which Qwen, SmolLM2 and many others share: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

SmolLM2 was shown a list of such objects between the tags; both are read. Source: the function calling of
NousResearch's Hermes models and of HuggingFaceTB's SmolLM2.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any, Final

from expediter.engine.structured import json_rule
from expediter.gateway.tools.base import CallDelta, Function, Parsed, new_key

_OPEN: Final = "<tool_call>"
_CLOSE: Final = "</tool_call>"
_HEAD: Final = re.compile(
    r'\s*\{\s*"name"\s*:\s*"(?P<name>(?:[^"\\]|\\.)+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
"""Of a call whose name comes first, up to its arguments: from there on they are passed on as they come."""
_MAX_FORCED_CALLS: Final = 16
"""A small model that has to call does not stop by itself."""
_SEPARATORS: Final = " \t\r\n,[]"
"""Between the calls of a list, and around a single one."""


class _State(Enum):
    TEXT = auto()
    """Outside of any tag."""
    BETWEEN = auto()
    """Inside, before a call or behind one."""
    HEAD = auto()
    """In a call, before its arguments."""
    ARGUMENTS = auto()
    """In the arguments of a call."""
    TAIL = auto()
    """Behind the arguments, before the call's closing brace."""


class JsonObjectScanner:
    """Finds the end of a JSON object in text that comes in pieces; looks at braces and strings only."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    def end_in(self, text: str) -> int | None:
        """Return the length of the part of `text` that completes the object; None if it goes on."""
        for position, character in enumerate(text):
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    return position + 1
        return None


class HermesParser:
    """A `CallParser`. What turns out to be no call is text like any other, its tags included."""

    def __init__(self) -> None:
        self.num_calls = 0
        self._state = _State.TEXT
        self._held = ""
        self._raw = ""
        """What was read since the tag opened, in case that it is no call after all."""
        self._scanner = JsonObjectScanner()
        self._key = ""
        self._calls_before = 0
        self._follows_call = False

    def push(self, text: str) -> Parsed:
        """Return what new text completes."""
        self._held += text
        parsed = Parsed()
        while self._advance(parsed):
            pass
        return parsed

    def flush(self) -> Parsed:
        """Return what was held back, at the end: a call that is complete but for its tag counts."""
        parsed = Parsed()
        if self._state is _State.HEAD:
            self._whole_call(self._held, parsed)
            if self.num_calls == self._calls_before:
                parsed.text += self._raw + self._held
        elif self._state is _State.TEXT:
            parsed.text += "" if self._follows_call and not self._held.strip() else self._held
        elif self._state is _State.BETWEEN and self.num_calls == self._calls_before:
            parsed.text += self._raw + self._held
        self._held = self._raw = ""
        return parsed

    def _advance(self, parsed: Parsed) -> bool:
        """Take one step with what is held; return whether another one may be possible."""
        match self._state:
            case _State.TEXT:
                return self._read_text(parsed)
            case _State.BETWEEN:
                return self._read_between(parsed)
            case _State.HEAD:
                return self._read_head(parsed)
            case _State.ARGUMENTS:
                return self._read_arguments(parsed)
            case _State.TAIL:
                return self._read_tail()

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
            self._state = _State.HEAD
            return True
        if rest and not _CLOSE.startswith(rest):
            self._give_up(parsed)
            return True
        return False

    def _read_head(self, parsed: Parsed) -> bool:
        head = _HEAD.match(self._held)
        if head is not None:
            name = _unescaped(head["name"])
            if name is not None:
                self._begin(name, parsed)
                self._held = self._held[head.end() :]
                self._scanner = JsonObjectScanner()
                self._state = _State.ARGUMENTS
                return True
        # Its fields may come in another order: wait for all of it.
        end = JsonObjectScanner().end_in(self._held)
        if end is None:
            return False
        num_before = self.num_calls
        self._whole_call(self._held[:end], parsed)
        if self.num_calls == num_before:
            self._give_up(parsed)
            return True
        self._held = self._held[end:]
        self._state = _State.BETWEEN
        return True

    def _read_arguments(self, parsed: Parsed) -> bool:
        if not self._held:
            return False
        end = self._scanner.end_in(self._held)
        part = self._held if end is None else self._held[:end]
        parsed.calls.append(CallDelta(self.num_calls - 1, self._key, None, part))
        self._held = self._held[len(part) :]
        if end is None:
            return False
        self._state = _State.TAIL
        return True

    def _read_tail(self) -> bool:
        at = self._held.find("}")
        close = self._held.find(_CLOSE)
        if close >= 0 and (at < 0 or close < at):  # a call that lacks its brace
            self._held = self._held[close:]
        elif at >= 0:
            self._held = self._held[at + 1 :]
        else:
            return False
        self._state = _State.BETWEEN
        return True

    def _begin(self, name: str, parsed: Parsed) -> None:
        self._key = new_key()
        parsed.calls.append(CallDelta(self.num_calls, self._key, name, ""))
        self.num_calls += 1

    def _whole_call(self, text: str, parsed: Parsed) -> None:
        """Read a call that is here as a whole, if it is one."""
        try:
            call = json.loads(text)
        except (ValueError, RecursionError):
            return
        name = call.get("name")
        if not isinstance(name, str) or not name:
            return
        arguments = call.get("arguments", call.get("parameters", {}))
        self._begin(name, parsed)
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        parsed.calls.append(CallDelta(self.num_calls - 1, self._key, None, written))

    def _give_up(self, parsed: Parsed) -> None:
        """What stands behind the tag is no call: all of it is text."""
        parsed.text += self._raw + self._held[:1]
        self._held, self._raw = self._held[1:], ""
        self._state = _State.TEXT


def _num_begun(text: str, tag: str) -> int:
    """Return the length of the longest end of `text` that begins `tag`."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if tag.startswith(text[-n:])), 0)


def _unescaped(name: str) -> str | None:
    try:
        value = json.loads(f'"{name}"')
    except ValueError:
        return None
    return value if isinstance(value, str) else None


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
        names = " | ".join(f"call_{number}" for number in range(len(functions)))
        call = f'"{_OPEN}" call'
        lines = [
            f'calls: {call} ("\\n" {call}){{0,{_MAX_FORCED_CALLS - 1}}}' if is_parallel else f"calls: {call}",
            "free: (before call)* TEXT" if is_parallel else "free: before call | TEXT",
            "TEXT: /(.|\\n)*/",
            f'before[lazy]: TEXT "{_OPEN}"',  # the tag ends it wherever a call may begin
            f'call: "\\n" ({names}) "\\n{_CLOSE}"',
        ]
        for number, function in enumerate(functions):
            head = f'{{"name": {json.dumps(function.name)}, "arguments": '
            lines.append(f'call_{number}: {json.dumps(head)} arguments_{number} "}}"')
            lines.append(f"arguments_{number}: {json_rule(_of_object(function.parameters))}")
        return "\n".join(lines) + "\n"


def _of_object(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema, for objects if it leaves that open."""
    return {"type": "object", **schema}
