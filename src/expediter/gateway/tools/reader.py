"""Reads calls written as JSON, `{"name": …, "arguments": {…}}`, from text that comes in pieces."""

from __future__ import annotations

import json
import re
from enum import Enum, auto
from typing import Final

from expediter.gateway.tools.base import CallDelta, Parsed, new_key

_HEAD: Final = re.compile(
    r'\s*\{\s*"name"\s*:\s*"(?P<name>(?:[^"\\]|\\.)+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
"""Of a call whose name comes first, up to its arguments: from there on they are passed on as they come."""


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


class Reading(Enum):
    """How far a reader is with its call."""

    HEAD = auto()
    """It may be a call."""
    ARGUMENTS = auto()
    """It is one, and its arguments are under way."""
    TAIL = auto()
    """Its closing brace lacks."""
    DONE = auto()
    """It is complete; `held` is what follows."""
    NO_CALL = auto()
    """It is none; `held` is all of its text."""


class CallReader:
    """One object, which may be a call.

    Args:
        index: of the call in its choice.
        closing: what ends a call that lacks its brace; "" if nothing does.
    Attributes:
        held: text that has not been read yet.
    """

    def __init__(self, index: int, closing: str = "") -> None:
        self.state = Reading.HEAD
        self.held = ""
        self._index = index
        self._closing = closing
        self._key = ""
        self._whole = JsonObjectScanner()
        self._num_scanned = 0
        self._arguments = JsonObjectScanner()

    @property
    def is_call(self) -> bool:
        """Whether it has turned out to be one."""
        return self.state not in (Reading.HEAD, Reading.NO_CALL)

    def push(self, text: str) -> list[CallDelta]:
        """Return what new text adds to the call."""
        self.held += text
        deltas: list[CallDelta] = []
        if self.state is Reading.HEAD:
            self._read_head(deltas)
        if self.state is Reading.ARGUMENTS:
            self._read_arguments(deltas)
        if self.state is Reading.TAIL:
            self._read_tail()
        return deltas

    def _read_head(self, deltas: list[CallDelta]) -> None:
        head = _HEAD.match(self.held)
        name = None if head is None else _unescaped(head["name"])
        if head is not None and name is not None:
            deltas.append(self._begun(name))
            self.held = self.held[head.end() :]
            self.state = Reading.ARGUMENTS
            return
        # Its fields may come in another order: wait for all of it.
        end = self._whole.end_in(self.held[self._num_scanned :])
        if end is None:
            self._num_scanned = len(self.held)
            return
        end += self._num_scanned
        call = _call_in(self.held[:end])
        if call is None:
            self.state = Reading.NO_CALL
            return
        deltas += [self._begun(call[0]), CallDelta(self._index, self._key, None, call[1])]
        self.held = self.held[end:]
        self.state = Reading.DONE

    def _read_arguments(self, deltas: list[CallDelta]) -> None:
        if not self.held:
            return
        end = self._arguments.end_in(self.held)
        part = self.held if end is None else self.held[:end]
        deltas.append(CallDelta(self._index, self._key, None, part))
        self.held = self.held[len(part) :]
        if end is not None:
            self.state = Reading.TAIL

    def _read_tail(self) -> None:
        brace = self.held.find("}")
        closing = self.held.find(self._closing) if self._closing else -1
        if closing >= 0 and (brace < 0 or closing < brace):
            self.held = self.held[closing:]
        elif brace >= 0:
            self.held = self.held[brace + 1 :]
        else:
            return
        self.state = Reading.DONE

    def _begun(self, name: str) -> CallDelta:
        self._key = new_key()
        return CallDelta(self._index, self._key, name, "")


class CallSequence:
    """The calls of one text, one after the other.

    Args:
        closing: as of `CallReader`.
    Attributes:
        num_calls: that have begun.
    """

    def __init__(self, closing: str = "") -> None:
        self.num_calls = 0
        self._closing = closing
        self._reader = CallReader(0, closing)

    @property
    def held(self) -> str:
        """Text of what is not known to be a call yet."""
        return "" if self._reader.is_call else self._reader.held

    def begin(self) -> None:
        """Expect another call: the next text begins with its brace."""
        self._reader = CallReader(self.num_calls, self._closing)

    def read(self, text: str, parsed: Parsed) -> tuple[Reading, str]:
        """Add what new text tells of the call; return how far it is, and once it is over the text that is left."""
        reader = self._reader
        was_call = reader.is_call
        parsed.calls += reader.push(text)
        self.num_calls += reader.is_call and not was_call
        return reader.state, reader.held if reader.state in (Reading.DONE, Reading.NO_CALL) else ""


def _call_in(text: str) -> tuple[str, str] | None:
    """Return name and arguments of a call that is here as a whole; None if it is none."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    name = call.get("name")
    if not isinstance(name, str) or not name:
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    return name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _unescaped(name: str) -> str | None:
    try:
        value = json.loads(f'"{name}"')
    except ValueError:
        return None
    return value if isinstance(value, str) else None
