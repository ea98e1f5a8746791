"""Structured output on the default model: whether it is valid, and what it costs.

Twenty schemas as people use them (`structured_schemas.json`), each with so many seeds at temperature 1. Every output is
checked with `jsonschema`, which shares nothing with the grammar engine. Then those with the first two seeds run without
their schemas for exactly as many tokens each, so that batches have the same shapes, in turn with the constrained ones.
Last, each output is replayed through a matcher of its own, on this thread alone, for the time that a mask takes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import jsonschema
import numpy as np

from benchmarks.report import Row, add_json_option, publish
from expediter.core.events import Tokens
from expediter.core.ports import Executor
from expediter.core.request import Grammar, Request, SamplingParams
from expediter.engine.default_model import resolve_model
from expediter.engine.model import EngineConfig, load_executor
from expediter.engine.structured import CompiledGrammars, GrammarCompiler, grammar_text
from expediter.engine.tokenizer import Tokenizer
from expediter.scheduling.build import CacheConfig, build_scheduler
from expediter.scheduling.config import SchedulerConfig

_SCHEMAS: Final = Path(__file__).with_name("structured_schemas.json")
_MAX_MODEL_LEN: Final = 2048
_TIMED_SEEDS: Final = 2
_CHECKER: Final = jsonschema.FormatChecker()


@dataclass(slots=True)
class Run:
    """Tokens by request id, and the time of all steps; `cpu_s` is that of all threads."""

    outputs: dict[str, list[int]] = field(default_factory=dict)
    elapsed_s: float = 0.0
    cpu_s: float = 0.0
    num_steps: int = 0
    num_failures: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.outputs.values()))

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.elapsed_s


def run(executor: Executor, requests: Sequence[Request], batch: int) -> Run:
    """Run requests to their ends, at most `batch` at a time, as a replica's loop does."""
    limits = executor.limits
    config = SchedulerConfig(max_num_seqs=batch, max_num_batched_tokens=512, max_model_len=_MAX_MODEL_LEN)
    cache = CacheConfig(num_blocks=limits.num_blocks, block_size=limits.block_size)
    scheduler = build_scheduler(config=config, cache=cache)
    for request in requests:
        if request.grammar is not None:
            executor.prepare(request.grammar)
        scheduler.add(request, 0.0)
    done = Run({request.request_id: [] for request in requests})
    started_s, cpu_started_s = time.perf_counter(), time.process_time()
    while scheduler.has_work:
        result = executor.execute(scheduler.plan(0.0))
        done.num_steps += 1
        for failure in result.failures:
            done.num_failures += 1
            scheduler.abort(failure.request_id, 0.0)
        for event in scheduler.apply(result, 0.0):
            if isinstance(event, Tokens):
                for state, token in zip(event.states, event.tokens[0].tolist(), strict=True):
                    done.outputs[state.request_id].append(token)
    done.elapsed_s, done.cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_started_s
    return done


def requests_of(entries: Sequence[dict[str, Any]], text: Tokenizer, num_seeds: int, max_tokens: int) -> list[Request]:
    """Return one request per schema and seed, with ids `schema/seed`."""
    requests = []
    for entry in entries:
        grammar = Grammar(grammar_text("json_schema", json.dumps(entry["schema"])))
        words = f"{entry['prompt']} Answer in JSON by this schema: {json.dumps(entry['schema'])}"
        prompt = np.array(text.chat_prompt([{"role": "user", "content": words}]), dtype=np.int32)
        requests += [
            Request(
                request_id=f"{entry['name']}/{seed}",
                prompt=prompt,
                max_tokens=max_tokens,
                stop_token_ids=text.eos_token_ids,
                sampling=SamplingParams(temperature=1.0, seed=seed),
                grammar=grammar,
            )
            for seed in range(num_seeds)
        ]
    return requests


def validity(entries: Sequence[dict[str, Any]], text: Tokenizer, done: Run) -> list[Row]:
    """Return a row per schema: outputs that ended and are valid, of how many."""
    rows: list[Row] = []
    for entry in entries:
        outputs = [tokens for name, tokens in done.outputs.items() if name.partition("/")[0] == entry["name"]]
        validator = jsonschema.Draft202012Validator(entry["schema"], format_checker=_CHECKER)
        ended = [tokens for tokens in outputs if tokens and tokens[-1] in text.eos_token_ids]
        rows.append(
            {
                "schema": entry["name"],
                "outputs": len(outputs),
                "ended": len(ended),
                "valid": sum(_is_valid(text.decode(tokens), validator) for tokens in ended),
                "mean_tokens": round(statistics.mean(map(len, outputs)), 1),
            }
        )
    return rows


def _is_valid(output: str, validator: Any) -> bool:
    try:
        return bool(validator.is_valid(json.loads(output)))
    except ValueError:
        return False


def throughput(executor: Executor, requests: Sequence[Request], first: Run, batch: int, num_rounds: int) -> list[Row]:
    """Return tokens per second with and without grammars, in turn; the same number of tokens of each request."""
    free = [
        replace(request, grammar=None, stop_token_ids=(), max_tokens=len(first.outputs[request.request_id]))
        for request in requests
    ]
    without: list[Run] = []
    with_grammars: list[Run] = []
    for _ in range(num_rounds):
        without.append(run(executor, free, batch))
        with_grammars.append(run(executor, requests, batch))
    rows: list[Row] = []
    for name, runs in (("free", without), ("constrained", with_grammars)):
        rows.append(
            {
                "requests": name,
                "tokens": runs[0].num_tokens,
                "steps": runs[0].num_steps,
                "failures": sum(each.num_failures for each in runs),
                "tokens_per_s": round(statistics.median(each.tokens_per_s for each in runs), 1),
                "all_rounds": " ".join(f"{each.tokens_per_s:.1f}" for each in runs),
                "ms_per_step": round(1e3 * statistics.median(each.elapsed_s / each.num_steps for each in runs), 2),
                "cpu_ms_per_step": round(1e3 * statistics.median(each.cpu_s / each.num_steps for each in runs), 2),
            }
        )
    loss = statistics.median(1 - w.tokens_per_s / f.tokens_per_s for w, f in zip(with_grammars, without, strict=True))
    rows[1]["loss_percent"] = round(100 * loss, 1)
    rows[0]["loss_percent"] = 0.0
    return rows


def mask_times(grammars: CompiledGrammars, requests: Sequence[Request], done: Run, vocab_size: int) -> list[Row]:
    """Return the time from a token to the next mask, over all outputs, one after the other."""
    mask = np.zeros(-(-vocab_size // 32), np.int32)
    times_us: dict[str, list[float]] = {"first of a grammar": [], "others": []}
    seen = set()
    for request in requests:
        assert request.grammar is not None
        grammars.prepare(request.grammar)
        matcher = grammars.matcher(request.grammar)
        kind = "others" if request.grammar.text in seen else "first of a grammar"
        seen.add(request.grammar.text)
        for token in done.outputs[request.request_id]:
            started_ns = time.perf_counter_ns()
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            matcher.consume_token(token)
            times_us[kind].append((time.perf_counter_ns() - started_ns) / 1e3)
    return [
        {
            "outputs": kind,
            "masks": len(times),
            "mean_us": round(statistics.mean(times), 1),
            "median_us": round(statistics.median(times), 1),
            "p99_us": round(float(np.percentile(times, 99)), 1),
            "max_us": round(max(times), 1),
        }
        for kind, times in times_us.items()
        if times
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10, help="outputs per schema")
    parser.add_argument("--schemas", type=int, default=20, help="so many of the schemas")
    parser.add_argument("--batch", type=int, default=16, help="sequences at a time")
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3, help="of the comparison; 0 for none")
    parser.add_argument("--threads", type=int, default=1, help="of torch; one core more makes the masks")
    add_json_option(parser)
    args = parser.parse_args()
    folder = resolve_model()
    text = Tokenizer.from_folder(folder)
    entries = json.loads(_SCHEMAS.read_text())[: args.schemas]
    executor = load_executor(
        EngineConfig(model=folder, max_num_seqs=args.batch, max_model_len=_MAX_MODEL_LEN, num_threads=args.threads)
    )
    requests = requests_of(entries, text, args.seeds, args.max_tokens)
    first = run(executor, requests, args.batch)
    rows = validity(entries, text, first)
    total = {name: sum(row[name] for row in rows) for name in ("outputs", "ended", "valid")}
    rows.append({"schema": "all", **total, "mean_tokens": round(first.num_tokens / len(requests), 1)})
    publish("valid outputs", rows, args.json)
    if args.rounds:
        timed = [request for request in requests if int(request.request_id.partition("/")[2]) < _TIMED_SEEDS]
        rows = throughput(executor, timed, first, args.batch, args.rounds)
        publish("the same number of tokens with and without", rows, _beside(args.json, "throughput"))
    compiled = CompiledGrammars(lambda: GrammarCompiler.of_folder(folder))
    rows = mask_times(compiled, requests, first, executor.limits.vocab_size)
    publish("one token taken and the next mask made", rows, _beside(args.json, "masks"))


def _beside(path: Path | None, what: str) -> Path | None:
    return None if path is None else path.with_name(f"{path.stem}-{what}.json")


if __name__ == "__main__":
    main()
