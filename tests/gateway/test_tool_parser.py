"""Tool calls in text that comes in pieces, and grammars that force them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from live_server import make_model_folder

from expediter.engine.structured import GrammarCompiler, grammar_text
from expediter.engine.tokenizer import Tokenizer
from expediter.gateway.errors import ApiError
from expediter.gateway.grammars import GrammarSpec
from expediter.gateway.tools.base import CallParser, Function, Parsed
from expediter.gateway.tools.choice import ToolUse, only
from expediter.gateway.tools.families import tool_format_of
from expediter.gateway.tools.hermes import HermesFormat, HermesParser
from expediter.gateway.tools.llama import LlamaFormat, LlamaParser

Calls = list[tuple[str, str]]
WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Par}<\\"is", "days": [1, {"x": 2}]}}\n</tool_call>'
NOW = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
WEATHER_CALL = ("weather", '{"city": "Par}<\\"is", "days": [1, {"x": 2}]}')
CASES: list[tuple[str, str, Calls]] = [
    ("plain text", "plain text", []),
    ("a < b and <tool but no more", "a < b and <tool but no more", []),
    (WEATHER, "", [WEATHER_CALL]),
    (f"{WEATHER}\n{NOW}\n", "", [WEATHER_CALL, ("now", "{}")]),
    (f"Let me look.\n{NOW}", "Let me look.\n", [("now", "{}")]),
    (f"{NOW} and then", " and then", [("now", "{}")]),
    (f"{NOW}\nso\n{NOW}", "\nso\n", [("now", "{}")] * 2),
    (
        '<tool_call>[{"name": "a", "arguments": {"x": 1}}, {"arguments": {"y": "é"}, "name": "b"}]</tool_call>',
        "",
        [("a", '{"x": 1}'), ("b", '{"y": "é"}')],
    ),
    ('<tool_call>{"name": "a"}</tool_call>', "", [("a", "{}")]),
    ('<tool_call>{"name": "a", "parameters": {"x": 1}}</tool_call>', "", [("a", '{"x": 1}')]),
    ('<tool_call>{"arguments": "{}", "name": "a"}</tool_call>', "", [("a", "{}")]),
    ('<tool_call>{"name": "\\u0061\\"", "arguments": {}}</tool_call>', "", [('a"', "{}")]),
    # What is no call is text, tags included.
    *[(text, text, []) for text in ("<tool_call>nope</tool_call>", "<tool_call>[]</tool_call>", "<tool_call>")],
    *[(text, text, []) for text in ('<tool_call>{"name": 5}</tool_call>', '<tool_call>{"x": 1}</tool_call>')],
    *[(text, text, []) for text in ('<tool_call>{"name": "a", "argum', "<tool_call>{]</tool_call>")],
    # What max_tokens cut off is a call as far as it goes; a brace too few is forgiven.
    ('<tool_call>{"name": "a", "arguments": {"q": "un', "", [("a", '{"q": "un')]),
    ('<tool_call>{"name": "a", "arguments": {"q": 1}', "", [("a", '{"q": 1}')]),
    ('<tool_call>{"name": "a", "arguments": {"q": 1}</tool_call>' + NOW, "", [("a", '{"q": 1}'), ("now", "{}")]),
]


LLAMA_CALL = '{"name": "a", "parameters": {"x": "{;"}}'
LLAMA_CASES: list[tuple[str, str, Calls]] = [
    ("plain {text}", "plain {text}", []),
    (LLAMA_CALL, "", [("a", '{"x": "{;"}')]),
    (f" \n<|python_tag|>{LLAMA_CALL}", "", [("a", '{"x": "{;"}')]),
    (f"{LLAMA_CALL}; {LLAMA_CALL}\n", "", [("a", '{"x": "{;"}')] * 2),
    (f"{LLAMA_CALL} so", " so", [("a", '{"x": "{;"}')]),
    ('{"parameters": {"y": 1}, "name": "b"}', "", [("b", '{"y": 1}')]),
    ('{"name": "a", "parameters": {"y": ', "", [("a", '{"y": ')]),
    *[(text, text, []) for text in ('{"city": "Rome"}', '{"city": ', "{", " {]", "<|python_tag|>x", "<|pyth", "\n")],
    (f'{{"a": 1}} {LLAMA_CALL}', f'{{"a": 1}} {LLAMA_CALL}', []),
]


def parse(pieces: list[str], parser: CallParser | None = None) -> tuple[str, Calls]:
    parser, parsed = parser or HermesParser(), Parsed()
    for piece in pieces:
        parsed.extend(parser.push(piece))
    parsed.extend(parser.flush())
    calls: dict[int, tuple[str, str]] = {}
    keys: dict[int, str] = {}
    for delta in parsed.calls:
        if delta.index not in calls:
            assert delta.name is not None, "the name comes first"
            assert delta.index == len(calls)
            calls[delta.index], keys[delta.index] = (delta.name, delta.arguments), delta.key
        else:
            assert delta.name is None
            assert delta.key == keys[delta.index]
            calls[delta.index] = (calls[delta.index][0], calls[delta.index][1] + delta.arguments)
    assert parser.num_calls == len(calls)
    assert len(set(keys.values())) == len(keys)
    return parsed.text, list(calls.values())


@pytest.mark.parametrize(("output", "text", "calls"), CASES)
def test_outputs_in_one_piece_and_by_character(output: str, text: str, calls: Calls) -> None:
    assert parse([output]) == (text, calls)
    assert parse(list(output)) == (text, calls)


@pytest.mark.parametrize(("output", "text", "calls"), LLAMA_CASES)
def test_llamas_outputs_in_one_piece_and_by_character(output: str, text: str, calls: Calls) -> None:
    assert parse([output], LlamaParser()) == (text, calls)
    assert parse(list(output), LlamaParser()) == (text, calls)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from(["<tool_call>", "</tool_call>", "{", "}", "[", ",", '"name": "f"', '"arguments": ', "\n", "x"])
        | st.sampled_from([case[0] for case in (*CASES, *LLAMA_CASES)]),
        max_size=8,
    ).map("".join),
    st.sets(st.integers(1, 200)),
    st.sampled_from([HermesParser, LlamaParser]),
)
def test_any_division_gives_the_same(output: str, cuts: set[int], kind: type[HermesParser | LlamaParser]) -> None:
    inside = sorted(cut for cut in cuts if cut < len(output))
    pieces = [output[begin:end] for begin, end in zip([0, *inside], [*inside, len(output)], strict=True)]
    assert parse(pieces, kind()) == parse([output], kind())


def test_arguments_stream_before_the_call_is_complete() -> None:
    parser = HermesParser()
    assert parser.push('<tool_call>{"name": "f", "argu').calls == []
    begun = parser.push('ments": {"a": "one ').calls
    assert [(delta.name, delta.arguments) for delta in begun] == [("f", ""), (None, '{"a": "one ')]
    assert [delta.arguments for delta in parser.push("two").calls] == ["two"]


FUNCTIONS = (
    Function(
        "weather",
        "the weather",
        {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        is_strict=True,
    ),
    Function("now", "", {"type": "object", "properties": {}, "additionalProperties": False}),
)
ONE = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TWO = ONE + '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
WRONG_NAME = ONE.replace("weather", "whether")
WRONG_ARGUMENTS = ONE.replace("city", "town")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"))


def accepted(folder: Path, spec: GrammarSpec, outputs: list[str]) -> list[bool]:
    text = Tokenizer.from_folder(folder)
    matcher = GrammarCompiler.of_folder(folder).compile(grammar_text(spec.kind, spec.text))
    found = []
    for output in outputs:
        one, ids = matcher.deep_copy(), text.encode(output, add_special_tokens=False)
        found.append(one.validate_tokens(ids) == len(ids) and one.consume_tokens(ids) and one.is_accepting())
    return found


def spec_of(use: ToolUse, answer: GrammarSpec | None = None) -> GrammarSpec:
    spec = use.grammar(HermesFormat(), answer)
    assert spec is not None
    return spec


def test_what_the_grammars_accept(folder: Path) -> None:
    outputs = [ONE, TWO, "text", f"text\n{ONE}", WRONG_NAME, WRONG_ARGUMENTS]
    for use, want in (
        (ToolUse(FUNCTIONS, "required"), [True, True, False, False, False, False]),
        (ToolUse(FUNCTIONS, "required", is_parallel=False), [True, False, False, False, False, False]),
        (ToolUse(FUNCTIONS, "auto"), [True, True, True, True, False, False]),
        (ToolUse(FUNCTIONS, "auto", is_parallel=False), [True, False, True, True, False, False]),
        (ToolUse(only(FUNCTIONS, "now", "tool_choice"), "required"), [False] * 6),
    ):
        assert accepted(folder, spec_of(use), outputs) == want, use
    answer = GrammarSpec("json_schema", json.dumps({"type": "object", "required": ["a"]}), "response_format")
    either = spec_of(ToolUse(FUNCTIONS, "auto"), answer)
    assert accepted(folder, either, [ONE, '{"a": 1}', '{"b": 1}', "text"]) == [True, True, False, False]


def test_what_llamas_grammars_accept(folder: Path) -> None:
    one = '{"name": "weather", "parameters": {"city": "Paris"}}'
    two = one + '; {"name": "now", "parameters": {}}'
    outputs = [one, two, "text {", "", one.replace("weather", "whether"), one.replace("city", "town"), f"text {one}"]
    for use, want in (
        (ToolUse(FUNCTIONS, "required"), [True, True, False, False, False, False, False]),
        (ToolUse(FUNCTIONS, "required", is_parallel=False), [True, False, False, False, False, False, False]),
        (ToolUse(FUNCTIONS, "auto"), [True, True, True, True, False, False, True]),
    ):
        spec = use.grammar(LlamaFormat(), None)
        assert spec is not None
        assert accepted(folder, spec, outputs) == want, use
        for output, is_accepted in zip(outputs, want, strict=True):
            if is_accepted:
                _, calls = parse([output], LlamaParser())
                assert len(calls) == (2 if output == two else 1 if output == one else 0)


def test_the_template_shows_the_format() -> None:
    llama = 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
    assert isinstance(tool_format_of(f"{{{{- '{llama}' }}}}"), LlamaFormat)
    assert isinstance(tool_format_of(llama.replace('"', '\\"')), LlamaFormat)
    for other in ("", '<tool_call>{"name": <function-name>, "arguments": <args-json-object>}</tool_call>'):
        assert isinstance(tool_format_of(other), HermesFormat)


def test_when_there_is_no_grammar() -> None:
    answer = GrammarSpec("json_schema", "{}", "response_format")
    lenient = (Function("f", "", {}),)
    assert ToolUse(lenient, "auto").grammar(HermesFormat(), None) is None
    assert ToolUse(FUNCTIONS, "none").grammar(HermesFormat(), answer) is answer
    assert ToolUse().grammar(HermesFormat(), None) is None
    for use, other in (
        (ToolUse(FUNCTIONS, "required"), answer),
        (ToolUse(FUNCTIONS, "auto"), GrammarSpec("regex", "a+", "structured_outputs")),
    ):
        with pytest.raises(ApiError) as caught:
            use.grammar(HermesFormat(), other)
        assert caught.value.param == other.param
    with pytest.raises(ApiError):
        only(FUNCTIONS, "missing", "tool_choice")
