"""Outputs follow their grammars, whatever else runs; a grammar that goes wrong takes only its own request along."""

from __future__ import annotations

import gc
import json
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from engine_models import VOCAB_SIZE, tiny_llama
from serving import Served, serve
from tokenizers_for_tests import byte_level

from expediter.core.errors import ConfigurationError, InvariantError, RequestError
from expediter.core.plan import Admission
from expediter.core.request import GREEDY, Carried, Grammar, Request, RequestState, SamplingParams
from expediter.engine.executor import TorchExecutor
from expediter.engine.matching import Matchers
from expediter.engine.sampler import Sampler
from expediter.engine.structured import CompiledGrammars, GrammarCompiler, grammar_text, json_rule
from expediter.engine.tokenizer import Tokenizer
from expediter.scheduling.build import CacheConfig, build_scheduler
from expediter.scheduling.config import SchedulerConfig

SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
        "size": {"enum": ["small", "large"]},
        "ok": {"type": "boolean"},
        "counts": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["id", "size", "ok", "counts"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def text() -> Tokenizer:
    return byte_level()


@pytest.fixture(scope="module")
def eos(text: Tokenizer) -> int:
    return text.encode("<|end|>")[0]


@pytest.fixture(scope="module")
def compiler(text: Tokenizer, eos: int, tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    text._backend.save(str(path))
    return GrammarCompiler(path, vocab_size=VOCAB_SIZE, eos_token_ids=(eos,))


@pytest.fixture
def grammars(compiler: GrammarCompiler) -> CompiledGrammars:
    return CompiledGrammars(lambda: compiler)


def make_executor(grammars: CompiledGrammars, num_blocks: int = 400, max_num_seqs: int = 16) -> TorchExecutor:
    return TorchExecutor(
        tiny_llama(), num_blocks=num_blocks, block_size=4, max_num_seqs=max_num_seqs, seed=1, grammars=grammars
    )


def grammar(kind: Any, source: Any) -> Grammar:
    return Grammar(grammar_text(kind, source if isinstance(source, str) else json.dumps(source)))


def request(name: str, eos: int, grammar: Grammar | None, **fields: Any) -> Request:
    prompt = np.arange(1, 20, dtype=np.int32)
    sampling = SamplingParams(temperature=1.0, seed=int.from_bytes(name.encode()))
    fields = {"prompt": prompt, "max_tokens": 120, "sampling": sampling, **fields}
    return Request(request_id=name, grammar=grammar, stop_token_ids=(eos,), **fields)


def config(**limits: int) -> SchedulerConfig:
    return SchedulerConfig(**{"max_num_seqs": 16, "max_num_batched_tokens": 64, "max_model_len": 256, **limits})


def prepared(executor: TorchExecutor, requests: Sequence[Request]) -> Sequence[Request]:
    for one in requests:
        if one.grammar is not None:
            executor.prepare(one.grammar)
    return requests


@pytest.mark.parametrize(
    ("kind", "source", "is_match"),
    [
        ("regex", "(ab|c){3}[0-9]+x", lambda s: re.fullmatch("(ab|c){3}[0-9]+x", s)),
        ("regex", "^[a-f]{1,4}$", lambda s: re.fullmatch("[a-f]{1,4}", s)),
        ("choice", ["yes", 'n"o\\', "été 😀", "no\nmore"], lambda s: s in ("yes", 'n"o\\', "été 😀", "no\nmore")),
        ("lark", 'start: "(" start ")" | "x"', lambda s: s == "(" * (len(s) // 2) + "x" + ")" * (len(s) // 2)),
        ("lark", 'root ::= "a" item{2} "b"?\nitem ::= [0-9]', lambda s: re.fullmatch("a[0-9]{2}b?", s)),
        ("lark", 'start: "<t>" call "</t>"\ncall: ' + json_rule({"const": [1]}), lambda s: json.loads(s[3:-4]) == [1]),
        ("json_schema", SCHEMA, lambda s: jsonschema.validate(json.loads(s), SCHEMA) is None),
    ],
)  # fmt: skip
def test_every_kind_is_followed_to_its_end(
    kind: str, source: Any, is_match: Any, grammars: CompiledGrammars, text: Tokenizer, eos: int
) -> None:
    executor = make_executor(grammars)
    requests = [request(f"r{number}", eos, grammar(kind, source)) for number in range(6)]
    served = serve(executor, prepared(executor, requests), config())
    ended = [tokens for tokens in served.outputs.values() if tokens[-1] == eos]
    assert len(ended) >= 3  # a random model may go on for long where the grammar lets it
    for tokens in ended:
        output = text.decode(tokens[:-1])
        assert is_match(output), output


def test_a_random_model_writes_valid_json_by_schemas_of_all_kinds(
    grammars: CompiledGrammars, text: Tokenizer, eos: int
) -> None:
    """The benchmark's schemas: what a model of no sense at all ends is valid by a validator that shares nothing."""
    entries = json.loads((Path(__file__).parents[2] / "benchmarks" / "structured_schemas.json").read_text())
    executor = make_executor(grammars, num_blocks=2500)
    requests = [
        request(entry["name"], eos, grammar("json_schema", entry["schema"]), max_tokens=480) for entry in entries
    ]
    served = serve(executor, prepared(executor, requests), config(max_model_len=512))
    ended = [entry for entry in entries if served.outputs[entry["name"]][-1] == eos]
    assert len(ended) >= 12  # others have long strings to fill
    for entry in ended:
        output = text.decode(served.outputs[entry["name"]][:-1])
        checker = jsonschema.Draft202012Validator(entry["schema"], format_checker=jsonschema.FormatChecker())
        checker.validate(json.loads(output))


def test_free_and_constrained_requests_do_not_touch_each_other(
    grammars: CompiledGrammars, text: Tokenizer, eos: int
) -> None:
    """Alone, mixed, in chunks and preempted: the same tokens, and for the free ones the same logprobs."""
    rng = np.random.default_rng(0)
    one = grammar("json_schema", SCHEMA)
    requests = []
    for number in range(10):
        prompt = rng.integers(0, VOCAB_SIZE, int(rng.integers(3, 40))).astype(np.int32)
        sampling = SamplingParams(temperature=1.0, seed=number, logprobs=2, top_p=0.9)
        held = one if number % 2 else None
        requests.append(request(f"r{number}", eos, held, prompt=prompt, sampling=sampling, max_tokens=60))
    alone = Served()
    for each in requests:
        executor = make_executor(grammars)
        served = serve(executor, prepared(executor, [each]), config())
        alone.outputs |= served.outputs
        alone.logprobs |= served.logprobs
    small = make_executor(grammars, num_blocks=60)
    together = serve(
        small, prepared(small, requests), config(max_num_batched_tokens=16), arrival_steps=[0, 0, 1, 2, 3] * 2
    )
    assert together.num_preemptions > 0
    assert together.num_split_prompts > 0
    assert together.num_mixed_steps > 0
    assert together.outputs == alone.outputs
    for name in (each.request_id for each in requests if each.grammar is None):
        mine, other = together.logprobs[name], alone.logprobs[name]
        assert [entry.rank for entry in mine] == [entry.rank for entry in other]
        assert np.allclose([e.logprob for e in mine], [e.logprob for e in other], atol=1e-4)
    without = TorchExecutor(tiny_llama(), num_blocks=400, block_size=4, max_num_seqs=16)
    plain = [each for each in requests if each.grammar is None]
    assert serve(without, plain, config()).outputs.items() <= alone.outputs.items()


def test_sequences_of_one_prompt_have_matchers_of_their_own(
    grammars: CompiledGrammars, text: Tokenizer, eos: int
) -> None:
    executor = make_executor(grammars)
    one = grammar("regex", "[a-z]{6}")
    requests = [request(f"r{number}", eos, one) for number in range(5)]
    served = serve(executor, prepared(executor, requests), config(), group_size=5)
    outputs = [text.decode(tokens[:-1]) for tokens in served.outputs.values()]
    assert all(re.fullmatch("[a-z]{6}", output) for output in outputs)
    assert len(set(outputs)) == 5


def test_a_request_that_comes_from_elsewhere_goes_on_in_its_grammar(
    grammars: CompiledGrammars, text: Tokenizer, eos: int
) -> None:
    one = request("r", eos, grammar("json_schema", SCHEMA))
    executor = make_executor(grammars)
    whole = serve(executor, prepared(executor, [one]), config()).outputs["r"]
    executor = make_executor(grammars)
    prepared(executor, [one])
    scheduler = build_scheduler(config=config(), cache=CacheConfig(num_blocks=400, block_size=4))
    scheduler.passage.resume(one, Carried(output=tuple(whole[:7])), 0.0)
    output = whole[:7]
    while scheduler.has_work:
        result = executor.execute(scheduler.plan(0.0))
        assert not result.failures
        output += result.tokens[0].tolist()
        scheduler.apply(result, 0.0)
    assert output == whole


def test_max_tokens_cut_an_output_short(grammars: CompiledGrammars, text: Tokenizer, eos: int) -> None:
    executor = make_executor(grammars)
    one = request("r", eos, grammar("regex", "[a-z]{50}"), max_tokens=5)
    served = serve(executor, prepared(executor, [one]), config())
    assert len(served.outputs["r"]) == 5
    assert re.fullmatch("[a-z]+", text.decode(served.outputs["r"]))


def test_only_what_is_allowed_is_drawn_and_as_often_as_the_model_would(
    grammars: CompiledGrammars, text: Tokenizer
) -> None:
    """Frequencies against the softmax over the allowed tokens; filters work on what the mask leaves."""
    one = grammar("regex", "[abc]")
    grammars.prepare(one)
    letters = [text.encode(letter)[0] for letter in "abc"]
    logits = torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    logits[letters] = torch.tensor([0.5, 0.0, -1.0])

    def draw(sampling: SamplingParams) -> int:
        matchers = Matchers(grammars, VOCAB_SIZE, 1)
        sampler = Sampler(max_num_seqs=1, vocab_size=VOCAB_SIZE, device=torch.device("cpu"), matchers=matchers)
        prompt = np.array([1], np.int32)
        each = Request(request_id="r", prompt=prompt, max_tokens=5, sampling=sampling, grammar=one)
        sampler.admit(Admission(0, RequestState(each, 0, prompt.tobytes()), prompt, 0))
        drawn = sampler.sample(logits[None].clone(), np.zeros(1, np.int32), np.ones(1, np.int64))
        matchers.close()
        assert not drawn.failures
        return int(drawn.tokens[0])

    tokens = [draw(SamplingParams(temperature=1.0, seed=seed)) for seed in range(600)]
    expected = torch.tensor([0.5, 0.0, -1.0]).softmax(-1) * 600
    for letter, count in zip(letters, expected.tolist(), strict=True):
        assert abs(tokens.count(letter) - count) < 4 * count**0.5
    assert set(tokens) == set(letters)
    assert draw(GREEDY) == letters[0]
    assert {draw(SamplingParams(seed=s, top_k=2)) for s in range(40)} == set(letters[:2])
    assert {draw(SamplingParams(seed=s, top_p=0.5)) for s in range(40)} == {letters[0]}
    assert {draw(SamplingParams(seed=s, min_p=0.5)) for s in range(40)} == set(letters[:2])


def test_a_model_that_offers_nothing_allowed_fails_that_request_alone(grammars: CompiledGrammars, eos: int) -> None:
    one = grammar("regex", "[abc]")
    grammars.prepare(one)
    matchers = Matchers(grammars, VOCAB_SIZE, 1)
    sampler = Sampler(max_num_seqs=2, vocab_size=VOCAB_SIZE, device=torch.device("cpu"), matchers=matchers)
    prompt = np.array([1], np.int32)
    for slot, held in enumerate((one, None)):
        each = request(f"r{slot}", eos, held, prompt=prompt, sampling=GREEDY)
        sampler.admit(Admission(slot, RequestState(each, 0, prompt.tobytes()), prompt, 0))
    logits = torch.full((2, VOCAB_SIZE), -torch.inf)
    logits[:, 7] = 0.0  # not a letter
    drawn = sampler.sample(logits, np.arange(2, dtype=np.int32), np.ones(2, np.int64))
    assert [failure.request_id for failure in drawn.failures] == ["r0"]
    assert "no token that the grammar allows" in drawn.failures[0].message
    assert drawn.tokens[1] == 7


# ---- matchers that get stuck


class StuckMatcher:
    """Blocks in its `stuck_at`-th mask until it is let go."""

    def __init__(self, release: threading.Event, stuck_at: int) -> None:
        self.release = release
        self.num_masks = 0
        self.stuck_at = stuck_at

    def consume_token(self, token: int) -> bool:
        return True

    def consume_tokens(self, tokens: list[int]) -> bool:
        return True

    def is_error(self) -> bool:
        return False

    def unsafe_compute_mask_ptr(self, pointer: int, size: int) -> None:
        self.num_masks += 1
        if self.num_masks == self.stuck_at:
            assert self.release.wait(60)


class PanickingMatcher(StuckMatcher):
    """Breaks in its second mask as a Rust library does: with what is no Exception."""

    def unsafe_compute_mask_ptr(self, pointer: int, size: int) -> None:
        self.num_masks += 1
        if self.num_masks == 2:
            raise KeyboardInterrupt("panicked")


class SomeStuck:
    """Compiled grammars, of which one gives matchers that get stuck."""

    def __init__(self, grammars: CompiledGrammars, stuck: dict[Grammar, StuckMatcher]) -> None:
        self._grammars = grammars
        self._stuck = stuck

    def matcher(self, grammar: Grammar) -> Any:
        return self._stuck.get(grammar) or self._grammars.matcher(grammar)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("stuck_at", [1, 2])
def test_a_matcher_that_gets_stuck_fails_alone(
    grammars: CompiledGrammars, text: Tokenizer, num_threads: int, stuck_at: int
) -> None:
    good, bad, release = grammar("regex", "[a-z]+"), grammar("regex", "x"), threading.Event()
    grammars.prepare(good)
    some = SomeStuck(grammars, {bad: StuckMatcher(release, stuck_at)})
    matchers = Matchers(some, VOCAB_SIZE, num_threads, patience_s=1.0)  # type: ignore[arg-type]
    slots = list(range(12))
    for slot in slots:
        matchers.admit(slot, bad if slot == 4 else good, [])
    allowed = text.encode("q")[0]
    for step in range(1, 4):
        live = [slot for slot in slots if slot != 4 or step <= stuck_at]
        masks, errors = matchers.masks(live)
        if step == stuck_at:
            assert errors == {4: "the grammar takes too long to follow"}
        else:
            assert not errors
        rest = [row for row, slot in enumerate(live) if slot != 4]
        assert all(masks[row, allowed >> 3] >> (allowed & 7) & 1 for row in rest)
        matchers.advance([s for s in live if s != 4 or step < stuck_at], [allowed] * (11 + (step < stuck_at)))
    release.set()
    matchers.close()


class SlowMatcher(StuckMatcher):
    """Takes a while for each mask."""

    def unsafe_compute_mask_ptr(self, pointer: int, size: int) -> None:
        time.sleep(0.05)


def test_many_that_take_a_while_each_are_not_taken_for_stuck(grammars: CompiledGrammars) -> None:
    """One thread needs several times the patience for all of them; one that is stuck is found among them."""
    slow, bad, release = grammar("regex", "x"), grammar("regex", "y"), threading.Event()
    some = SomeStuck(grammars, {slow: SlowMatcher(release, 0), bad: StuckMatcher(release, 2)})
    matchers = Matchers(some, VOCAB_SIZE, 1, patience_s=1.0)  # type: ignore[arg-type]
    slots = list(range(40))
    for slot in slots:
        matchers.admit(slot, bad if slot == 20 else slow, [])
    assert not matchers.masks(slots)[1]
    matchers.advance(slots, [1] * 40)
    assert matchers.masks(slots)[1] == {20: "the grammar takes too long to follow"}
    release.set()
    matchers.close()


def test_a_matcher_that_panics_fails_alone(grammars: CompiledGrammars, text: Tokenizer) -> None:
    good, bad = grammar("regex", "[a-z]+"), grammar("regex", "x")
    grammars.prepare(good)
    some = SomeStuck(grammars, {bad: PanickingMatcher(threading.Event(), 0)})
    matchers = Matchers(some, VOCAB_SIZE, 1)  # type: ignore[arg-type]
    for slot, one in enumerate((good, bad, good)):
        matchers.admit(slot, one, [])
    assert not matchers.masks([0, 1, 2])[1]
    matchers.advance([0, 1, 2], text.encode("q") * 3)
    assert list(matchers.masks([0, 1, 2])[1]) == [1]
    matchers.advance([0, 2], text.encode("q") * 2)
    assert not matchers.masks([0, 2])[1]
    matchers.close()


def test_a_grammar_that_breaks_under_way_is_told_in_words(
    compiler: GrammarCompiler, grammars: CompiledGrammars, text: Tokenizer
) -> None:
    """This one compiles, and exceeds llguidance's limits when the output makes it remember too much."""
    broken = grammar("lark", "start: X\nX: /(.*a.{100}){1,20}.*/ & /(.*b.{90}){1,20}.*/")
    grammars.prepare(broken)
    matchers = Matchers(grammars, VOCAB_SIZE, 1, patience_s=30)
    matchers.admit(0, broken, [])
    rng = np.random.default_rng(0)
    letters = [text.encode(letter)[0] for letter in "ab"]
    for _ in range(400):
        _, errors = matchers.masks([0])
        if errors:
            break
        matchers.advance([0], [int(rng.choice(letters))])
    assert errors[0] == (
        "the output cannot follow the grammar any further: lexer error: too many expressions constructed"
    )
    matchers.close()


# ---- compiling


def test_compiled_grammars_stay_as_long_as_their_requests(compiler: GrammarCompiler) -> None:
    num_loads = 0

    def load() -> GrammarCompiler:
        nonlocal num_loads
        num_loads += 1
        return compiler

    grammars = CompiledGrammars(load, max_latest=2)
    held = grammar("regex", "held")
    grammars.prepare(held)
    for number in range(5):
        grammars.prepare(grammar("regex", f"x{number}"))
    assert num_loads == 1
    assert not grammars.matcher(held).is_error()  # though it is not among the latest two any more
    assert set(grammars._of_text) >= {held.text}
    text = held.text
    del held
    gc.collect()
    assert text not in grammars._of_text
    with pytest.raises(InvariantError):
        grammars.matcher(grammar("regex", "never prepared"))


def test_a_text_is_compiled_once(compiler: GrammarCompiler, grammars: CompiledGrammars) -> None:
    first, second = grammar("regex", "[a-z]{3}"), grammar("regex", "[a-z]{3}")
    grammars.prepare(first)
    grammars.prepare(second)
    assert grammars._of_grammar[first] is grammars._of_grammar[second]


def test_models_without_the_means_are_refused(compiler: GrammarCompiler, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="end-of-sequence"):
        GrammarCompiler(tmp_path / "tokenizer.json", vocab_size=10, eos_token_ids=())
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="tokenizer"):
        GrammarCompiler(tmp_path / "tokenizer.json", vocab_size=10, eos_token_ids=(1,))
    grammars = CompiledGrammars(lambda: GrammarCompiler(tmp_path / "tokenizer.json", vocab_size=9, eos_token_ids=(1,)))
    with pytest.raises(RequestError, match="tokenizer"):
        grammars.prepare(grammar("regex", "a"))
    executor = TorchExecutor(tiny_llama(), num_blocks=4, block_size=4, max_num_seqs=1)
    with pytest.raises(RequestError):
        executor.prepare(grammar("regex", "a"))


def test_ids_without_a_token_are_never_allowed(grammars: CompiledGrammars, text: Tokenizer) -> None:
    """The model has more logits than the tokenizer has tokens."""
    anything = grammar("regex", "(?s:.*)")
    grammars.prepare(anything)
    matchers = Matchers(grammars, VOCAB_SIZE, 1)
    matchers.admit(0, anything, [])
    masks, _ = matchers.masks([0])
    allowed = np.flatnonzero(np.unpackbits(masks[0], bitorder="little"))
    assert allowed.max() < text._backend.get_vocab_size()
    assert len(allowed) > 200
    matchers.close()


def test_white_space_in_json_is_bounded(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(grammar_text("json_schema", json.dumps(SCHEMA)))
    tokenizer = compiler._tokenizer

    def is_prefix(written: str) -> bool:
        copy = matcher.deep_copy()
        return bool(copy.consume_tokens(tokenizer.greedy_tokenize(written)))

    assert is_prefix('{"id":"AB-123"')
    assert is_prefix('{"id": "AB-123", "size": "small"')
    assert is_prefix('{\n    "id": "AB-123",\n    "size": "small"')
    assert not is_prefix('{"id":  ')
    assert not is_prefix("{\n\n")
    assert not is_prefix("{\n" + " " * 50)
