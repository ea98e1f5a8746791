"""Which functions a request may call and must call, and the grammar that holds it to that."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from expediter.engine.structured import json_rule
from expediter.gateway.errors import bad_request
from expediter.gateway.grammars import GrammarSpec
from expediter.gateway.tools.base import Function, ToolFormat


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request says of tools.

    Args:
        functions: those that the model is told of.
        mode: "auto" leaves it the choice, "required" does not.
        is_parallel: whether it may call several times in one answer.
    """

    functions: tuple[Function, ...] = ()
    mode: Literal["none", "auto", "required"] = "none"
    is_parallel: bool = True

    @property
    def is_on(self) -> bool:
        """Whether there may be calls at all."""
        return bool(self.functions) and self.mode != "none"

    def grammar(self, form: ToolFormat, answer: GrammarSpec | None) -> GrammarSpec | None:
        """Return what the output has to match, None for anything.

        Args:
            answer: what an answer without calls has to match.
        Raises:
            ApiError: 400, both cannot be had together.
        """
        if not self.is_on:
            return answer
        rules = form.rules(self.functions, is_parallel=self.is_parallel)
        if self.mode == "required":
            if answer is not None:
                raise bad_request(f"{answer.param} does not go with a tool_choice that forces a call", answer.param)
            return GrammarSpec("lark", f"start: calls\n{rules}", "tools")
        if answer is None:
            needs_grammar = not self.is_parallel or any(function.is_strict for function in self.functions)
            return GrammarSpec("lark", f"start: free\n{rules}", "tools") if needs_grammar else None
        schema = _schema_of(answer)
        if schema is None:
            raise bad_request(f"{answer.param} goes with tools only as a JSON schema", answer.param)
        return GrammarSpec("lark", f"start: calls | answer\nanswer: {json_rule(schema)}\n{rules}", answer.param)


def _schema_of(answer: GrammarSpec) -> Mapping[str, Any] | None:
    if answer.kind != "json_schema":
        return None
    try:
        schema = json.loads(answer.text)
    except (ValueError, RecursionError):
        return None
    return schema if isinstance(schema, dict) else None


def only(functions: Sequence[Function], name: str, param: str) -> tuple[Function, ...]:
    """Return the one function of that name.

    Raises:
        ApiError: 400, there is none.
    """
    found = tuple(function for function in functions if function.name == name)
    if not found:
        raise bad_request("tool_choice names a function that is not among the tools", param)
    return found[:1]
