"""What a family of models has to say about tool calls."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from expediter.engine.structured import json_rule

MAX_FORCED_CALLS: Final = 16
"""In one answer: a small model that has to call does not stop by itself."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function that a client offers.

    Attributes:
        parameters: JSON schema of the object of its arguments.
        is_strict: its arguments have to match the schema in any case, even where the model is free to call or not.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    is_strict: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        """The schema of its arguments, which are an object in any case."""
        return {"type": "object", **self.parameters}

    def as_tool(self) -> dict[str, Any]:
        """Return it in OpenAI's shape, which chat templates take."""
        described = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": described}


def function_rules(functions: Sequence[Function], arguments: str) -> list[str]:
    """Return Lark rules in which `function` is a call of one of these, as an object of its name and its arguments.

    Args:
        arguments: what the format calls the latter.
    """
    lines = ["function: " + " | ".join(f"function_{number}" for number in range(len(functions)))]
    for number, function in enumerate(functions):
        head = f'{{"name": {json.dumps(function.name)}, "{arguments}": '
        lines.append(f'function_{number}: {json.dumps(head)} arguments_{number} "}}"')
        lines.append(f"arguments_{number}: {json_rule(function.schema)}")
    return lines


@dataclass(slots=True)
class CallDelta:
    """What is new of one call; the first has the name, the further ones only more text of the arguments.

    Attributes:
        index: of the call in its choice, from 0.
        key: random text for the id that the API gives it.
        arguments: text of a JSON object, or a part of that.
    """

    index: int
    key: str
    name: str | None
    arguments: str


@dataclass(slots=True)
class Parsed:
    """New output, taken apart: what is for the reader, and calls."""

    text: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def extend(self, other: Parsed) -> None:
        """Append what came after."""
        self.text += other.text
        self.calls += other.calls


def new_key() -> str:
    """Return the random part of a call's id."""
    return uuid.uuid4().hex[:24]


class CallParser(Protocol):
    """Reads the output of one choice as it comes. However it is divided, the concatenated result is the same."""

    @property
    def num_calls(self) -> int:
        """Calls so far, the one that has begun included."""
        ...

    def push(self, text: str) -> Parsed:
        """Return what new text completes."""
        ...

    def flush(self) -> Parsed:
        """Return what was held back, at the end; call it once."""
        ...


class ToolFormat(Protocol):
    """How a family of models writes calls."""

    def parser(self) -> CallParser:
        """Return a parser for one choice."""
        ...

    def instructions(self, functions: Sequence[Function]) -> str:
        """Return what a system message says of the functions, for templates that do not say it themselves."""
        ...

    def call_text(self, name: str, arguments: str) -> str:
        """Return a past call as the model wrote it, for such templates."""
        ...

    def result_text(self, content: str) -> str:
        """Return the result of a call as such models expect it in a message of the user."""
        ...

    def rules(self, functions: Sequence[Function], *, is_parallel: bool) -> str:
        """Return Lark rules: `calls` is nothing but calls of these functions, with arguments as their schemas say, and
        `free` is text with or without such calls. Without `is_parallel` there is one call at most."""
        ...
