"""Grammars are compiled in processes of their own: one that never compiles, or kills its process, fails alone.

CASE 24, as far as the gateway has a part in it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from live_server import grammar_workers

from expediter.core.errors import CapacityError, ConfigurationError
from expediter.core.request import MAX_GRAMMAR_BYTES
from expediter.gateway.bodies import decode_body
from expediter.gateway.chat_body import ChatBody
from expediter.gateway.errors import ApiError
from expediter.gateway.grammars import GrammarLimits, Grammars, GrammarSpec, check_end, spec_of

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
GOOD = GrammarSpec("json_schema", json.dumps(SCHEMA), "response_format")
ENDLESS = GrammarSpec(
    "json_schema", json.dumps({"type": "object", "properties": {f"p{i}": {} for i in range(16_000)}}), "response_format"
)
"""Compiles in time quadratic in its properties: many times any deadline below."""
TOO_LARGE = GrammarSpec(
    "json_schema",
    json.dumps({"allOf": [{"anyOf": [{"properties": {f"p{i}": {"const": j}}} for j in range(4)]} for i in range(40)]}),
    "response_format",
)


def with_grammars(folder: Path, work: Callable[[Grammars], Awaitable[Any]], **limits: Any) -> Any:
    async def run() -> Any:
        async with Grammars(folder, GrammarLimits(**limits)) as grammars:
            return await work(grammars)

    return asyncio.run(run())


async def refusal(grammars: Grammars, spec: GrammarSpec) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await grammars.compile(spec)
    assert (caught.value.status, caught.value.param) == (400, spec.param)
    return caught.value


def test_what_compiles_comes_back_as_text_for_replicas(model_folder: Path) -> None:
    async def work(grammars: Grammars) -> list[str]:
        specs = [GOOD, GrammarSpec("regex", "[a-z]+", "s"), GrammarSpec("choice", '["yes", "no"]', "s")]
        specs += [GrammarSpec("lark", 'start: "a" | "b" start', "s"), GrammarSpec("lark", 'root ::= "a" root?', "s")]
        return [(await grammars.compile(spec)).text for spec in specs]

    texts = with_grammars(model_folder, work)
    assert len(set(texts)) == 5


def test_one_that_never_compiles_fails_alone(model_folder: Path) -> None:
    async def work(grammars: Grammars) -> None:
        await asyncio.gather(grammars.compile(GOOD), grammars.compile(GrammarSpec("regex", "both workers run", "s")))
        endless = asyncio.create_task(refusal(grammars, ENDLESS))
        others = [GrammarSpec("regex", f"x{{{n}}}", "s") for n in range(1, 20)]
        await asyncio.gather(*map(grammars.compile, others))
        assert not endless.done()  # they did not wait for it
        assert "did not compile within" in (await endless).message
        assert "did not compile within" in (await refusal(grammars, ENDLESS)).message
        await grammars.compile(GrammarSpec("regex", "after", "s"))
        assert len(grammar_workers(os.getpid())) <= 2

    with_grammars(model_folder, work, deadline_s=4.0)
    assert not grammar_workers(os.getpid())


def bomb(number: int) -> GrammarSpec:
    return GrammarSpec("json_schema", ENDLESS.text.replace('"p0"', f'"q{number}"'), "response_format")


def test_one_tenants_bombs_hold_up_no_other_tenant(model_folder: Path) -> None:
    """However many different ones it sends, a worker is left, and then it is turned away for a while."""

    async def work(grammars: Grammars) -> None:
        warm = [GrammarSpec("regex", f"w{{{n}}}", "s") for n in range(1, 4)]
        await asyncio.gather(*(grammars.compile(spec, f"t{n}") for n, spec in enumerate(warm)))  # all workers run
        bombs = [asyncio.create_task(grammars.compile(bomb(n), "mallory")) for n in range(20)]
        await asyncio.sleep(0.05)
        await asyncio.gather(*(grammars.compile(GrammarSpec("regex", f"x{{{n}}}", "s"), "alice") for n in range(1, 20)))
        assert not any(each.done() for each in bombs), "nobody waited for any of them"
        results = await asyncio.gather(*bombs, return_exceptions=True)
        late = [each for each in results if isinstance(each, ApiError)]
        turned_away = [each for each in results if isinstance(each, CapacityError)]
        assert len(late) + len(turned_away) == 20
        assert len(late) in (3, 4), "three in a row, and perhaps the one beside the last"
        assert all(each.retry_after_s >= 1 for each in turned_away)
        with pytest.raises(CapacityError, match="took too long"):
            await grammars.compile(GrammarSpec("regex", "another", "s"), "mallory")
        await grammars.compile(warm[0], "mallory")  # what is known is not concerned
        await grammars.compile(GrammarSpec("regex", "another", "s"), "alice")

    with_grammars(model_folder, work, deadline_s=2.0)


def test_who_sends_many_forgets_its_own(model_folder: Path) -> None:
    counted: list[str] = []

    async def run() -> None:
        async with Grammars(model_folder, GrammarLimits(max_known=4), count=counted.append) as grammars:
            await grammars.compile(GOOD, "alice")
            for number in range(1, 9):
                await grammars.compile(GrammarSpec("regex", f"a{{{number}}}", "s"), "bob")
            await grammars.compile(GOOD, "alice")
            assert len(counted) == 9, "it was remembered"
            await grammars.compile(GrammarSpec("regex", "a{1}", "s"), "bob")
            assert len(counted) == 10

    asyncio.run(run())


def test_the_same_grammar_is_compiled_once_for_all_who_wait(model_folder: Path) -> None:
    async def work(grammars: Grammars) -> None:
        waits = [asyncio.create_task(grammars.compile(GOOD)) for _ in range(50)]  # more than may wait
        await asyncio.sleep(0)
        waits[0].cancel()
        texts = {(await wait).text for wait in waits[1:]}
        assert len(texts) == 1
        assert len(grammar_workers(os.getpid())) == 1

    with_grammars(model_folder, work)


def test_too_many_that_wait_are_refused(model_folder: Path) -> None:
    async def work(grammars: Grammars) -> None:
        specs = [GrammarSpec("regex", f"a{{{n}}}", "s") for n in range(1, 10)]
        results = await asyncio.gather(*map(grammars.compile, specs), return_exceptions=True)
        assert sum(isinstance(result, CapacityError) for result in results) == 9 - 1 - 3

    with_grammars(model_folder, work, num_workers=1, max_waiting=3)


def test_a_worker_that_dies_is_replaced(model_folder: Path) -> None:
    async def work(grammars: Grammars) -> None:
        await grammars.compile(GOOD)
        (pid,) = grammar_workers(os.getpid())
        os.kill(pid, signal.SIGKILL)
        assert "too complex" in (await refusal(grammars, GrammarSpec("regex", "b", "s"))).message
        await grammars.compile(GrammarSpec("regex", "c", "s"))

    with_grammars(model_folder, work)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (GrammarSpec("json_schema", '{"type": "object", "uniqueItems": true, "not": {}}', "f"), "not"),
        (GrammarSpec("json_schema", '{"type": "string", "format": "idn-email"}', "f"), "idn-email"),
        (GrammarSpec("json_schema", '{"type": "array", "contains": {}}', "f"), "contains"),
        (GrammarSpec("json_schema", '{"$ref": "http://127.0.0.1/x"}', "f"), "fetch"),
        (GrammarSpec("json_schema", '{"enum": []}', "f"), "Unsatisfiable"),
        (GrammarSpec("json_schema", '{"type": "string", "pattern": "(?=a)b"}', "f"), "look-ahead"),
        (GrammarSpec("json_schema", '{"x-guidance": {"lenient": true}, "not": {}}', "f"), "not"),
        (GrammarSpec("json_schema", "[1]", "f"), "a JSON object"),
        (GrammarSpec("json_schema", '{"oneOf": [{"minLength": 1}, {"maxLength": 9}]}', "f"), "anyOf may do"),
        (GrammarSpec("json_schema", '{"a"', "f"), "EOF"),
        (GrammarSpec("json_schema", '{"items":' * 4000 + "{}" + "}" * 4000, "f"), "recursion"),
        (GrammarSpec("regex", "(", "f"), "unclosed group"),
        (GrammarSpec("regex", "(" * 5000 + "a" + ")" * 5000, "f"), "nest"),
        (GrammarSpec("regex", "((a{1000}){1000}){1000}", "f"), "too"),
        (GrammarSpec("lark", "start: missing", "f"), "missing"),
        (GrammarSpec("lark", "?", "f"), "name"),
        (GrammarSpec("lark", "x" * (MAX_GRAMMAR_BYTES + 1), "f"), "bytes"),
        (TOO_LARGE, "too large"),
    ],
)
def test_what_cannot_be_used_is_named(model_folder: Path, spec: GrammarSpec, words: str) -> None:
    error = with_grammars(model_folder, lambda grammars: refusal(grammars, spec), deadline_s=30.0)
    assert words in error.message
    assert len(error.message) < 400
    assert str(model_folder) not in error.message


CHAT = msgspec.json.Decoder(ChatBody)


def chat_body(**fields: Any) -> ChatBody:
    return decode_body(msgspec.json.encode({"messages": [{"role": "user", "content": "x"}], **fields}), CHAT)


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "text"}}, None, None),
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type": "object"}'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"b": 1, "a": 2}}}},
            *("json_schema", '{"b":1,"a":2}'),
        ),
        ({"structured_outputs": {"json": {"b": 1}}}, "json_schema", '{"b":1}'),
        ({"structured_outputs": {"json": '{"b":1}', "regex": None}}, "json_schema", '{"b":1}'),
        ({"structured_outputs": {"json_object": True}}, "json_schema", '{"type": "object"}'),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a", "ü"]}}, "choice", '["a","ü"]'),
        ({"structured_outputs": {"grammar": "start: A"}}, "lark", "start: A"),
        ({"structured_outputs": None, "response_format": None}, None, None),
    ],
)
def test_bodies_say_what_the_output_has_to_match(fields: Any, kind: str | None, text: str | None) -> None:
    spec = spec_of(chat_body(**fields))
    assert (spec.kind, spec.text, spec.param) == (kind, text, next(iter(fields))) if spec else kind is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 1}, "min_tokens"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        *[({name: "x"}, name) for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar")],
    ],
)
def test_bodies_that_make_no_sense_are_refused_by_field(fields: Any, param: str) -> None:
    def checked() -> None:
        body = chat_body(**fields)
        spec = spec_of(body)
        assert spec is not None
        check_end(body, spec)

    with pytest.raises(ApiError) as caught:
        checked()
    assert (caught.value.status, caught.value.param) == (400, param)


def test_limits_are_checked() -> None:
    for limits in ({"deadline_s": 0}, {"num_workers": 0}, {"max_waiting": 0}, {"max_known": 0}):
        with pytest.raises(ConfigurationError):
            GrammarLimits(**limits)
