"""Time to first token of two vLLM servers behind one address: Expediter, its round robin, smg's cache_aware.

Applications with a long system prompt each share two servers. One server's KV cache cannot hold all of the prompts,
both together can; some applications are far busier than others (Zipf). Arrivals are Poisson, the same for all systems
of a round; every round has prompts of its own, and all caches are emptied before each turn. Systems take turns, each
turn starts its router afresh, and a few prompts that nobody shares go first, uncounted.

Servers run SmolLM2-135M on one core each, beside router and load generator: what counts is the comparison.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import operator
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.peers.environments import DEFAULT_CACHE, SMG, VLLM
from benchmarks.peers.vllm_server import VllmServer, vllm_servers
from benchmarks.report import Row, add_json_option, publish
from expediter.assembly.server_process import free_port, running_server
from expediter.engine.default_model import resolve_model
from expediter.runtime.load_client import LoadClient, Outcome, TimedPrompt

MODEL: Final = "smollm2"
OURS: Final = "expediter"
P50: Final = "TTFT p50, ms"
P99: Final = "TTFT p99, ms"
_WORDS: Final = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school")
_NUM_BLOCKS: Final = 160
"""Of 32 tokens: 5,120 tokens, where all system prompts together have `--applications` x `--prefix`."""
_NUM_WARM_UPS: Final = 6

System = Callable[[Sequence[str]], AbstractContextManager[str]]


@dataclass(frozen=True)
class Load:
    """What arrives in a turn.

    Attributes:
        num_prefix_tokens: of each application's prompt; a word is a token.
        rate: requests per second.
    """

    num_requests: int
    rate: float
    num_applications: int
    num_prefix_tokens: int
    num_own_tokens: int
    num_output_tokens: int

    def prompts(self, seed: int) -> list[TimedPrompt]:
        rng = np.random.default_rng(seed)
        prefixes = [_text(rng, self.num_prefix_tokens) for _ in range(self.num_applications)]
        weights = 1 / np.arange(1, self.num_applications + 1)
        chosen = rng.choice(self.num_applications, self.num_requests, p=weights / weights.sum())
        arrivals = np.cumsum(rng.exponential(1 / self.rate, self.num_requests))
        return [
            TimedPrompt(
                arrival_s=float(arrival),
                prompt=f"{prefixes[application]} {_text(rng, self.num_own_tokens)}",
                max_tokens=self.num_output_tokens,
            )
            for application, arrival in zip(chosen, arrivals, strict=True)
        ]

    def warm_ups(self, seed: int) -> list[TimedPrompt]:
        rng = np.random.default_rng((seed, 1))
        return [
            TimedPrompt(arrival_s=0.3 * place, prompt=_text(rng, 32 * (1 + place)), max_tokens=4)
            for place in range(_NUM_WARM_UPS)
        ]


def _text(rng: np.random.Generator, num_tokens: int) -> str:
    return " ".join(rng.choice(_WORDS, num_tokens))


def expediter(*flags: str) -> System:
    def start(backends: Sequence[str]) -> AbstractContextManager[str]:
        return running_server([*(word for url in backends for word in ("--backend", url)), *flags])

    return start


def smg(python: Path) -> System:
    @contextmanager
    def start(backends: Sequence[str]) -> Iterator[str]:
        port = free_port()
        command = [str(python.with_name("smg")), "launch", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--prometheus-port", str(free_port()), "--policy", "cache_aware", "--worker-urls", *backends]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            _wait_for_answer(f"http://127.0.0.1:{port}")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()

    return start


def _wait_for_answer(url: str) -> None:
    body = b'{"model": "smollm2", "prompt": "x", "max_tokens": 1}'
    headers = {"Content-Type": "application/json"}
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        request = urllib.request.Request(f"{url}/v1/completions", body, headers)
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(request, timeout=10):
            return
        time.sleep(0.2)
    raise SystemExit(f"{url} does not answer")


@dataclass
class Turn:
    """What became of the requests of a turn, and how many each server answered."""

    outcomes: list[Outcome]
    served: list[float]

    def __add__(self, other: Turn) -> Turn:
        return Turn(self.outcomes + other.outcomes, [a + b for a, b in zip(self.served, other.served, strict=True)])

    def row(self, label: str, system: str) -> Row:
        """Return its figures; failed requests have no part in the percentiles.

        Raises:
            SystemExit: all have failed.
        """
        good = [outcome for outcome in self.outcomes if outcome.error is None]
        if not good:
            raise SystemExit(f"{system}: no request was answered; is --rate more than these servers can do?")
        ttfts_ms = [1e3 * outcome.ttft_s for outcome in good if outcome.ttft_s is not None]
        num_cached, num_prompt = (sum(getattr(o, f"num_{kind}_tokens") for o in good) for kind in ("cached", "prompt"))
        return {
            "round": label,
            "system": system,
            P50: round(float(np.percentile(ttfts_ms, 50)), 1),
            P99: round(float(np.percentile(ttfts_ms, 99)), 1),
            "hit rate": round(num_cached / num_prompt, 3),
            "busier server": round(max(self.served) / sum(self.served), 3),
            "failed": len(self.outcomes) - len(good),
        }


def take_turn(system: System, servers: Sequence[VllmServer], load: Load, seed: int) -> Turn:
    def num_answered() -> list[float]:
        return [server.metric("vllm:request_success_total") for server in servers]

    with system([server.url for server in servers]) as url:
        client = LoadClient(url)
        asyncio.run(client.replay(MODEL, load.warm_ups(seed), lambda _: None))
        for server in servers:
            server.reset_prefix_cache()
        before = num_answered()
        outcomes = asyncio.run(client.replay(MODEL, load.prompts(seed), lambda _: None))
        return Turn(outcomes, [now - then for now, then in zip(num_answered(), before, strict=True)])


def ratios(rows: Sequence[Row], first: str, second: str) -> Row:
    """Return the first system's times over the second's, round by round: median and range."""
    row: Row = dict.fromkeys(rows[0], "") | {"round": "ratio", "system": f"{first} / {second}"}
    for key in (P50, P99):
        of_first, of_second = ([r[key] for r in rows if r["system"] == name] for name in (first, second))
        pairs = [a / b for a, b in zip(of_first, of_second, strict=True)]
        row[key] = f"{statistics.median(pairs):.2f} ({min(pairs):.2f} to {max(pairs):.2f})"
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help="folder of the peers' environments")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=96, help="of each turn")
    parser.add_argument("--rate", type=float, default=3.0, help="requests per second")
    parser.add_argument("--applications", type=int, default=16)
    parser.add_argument("--prefix", type=int, default=512, help="tokens of an application's prompt")
    add_json_option(parser)
    args = parser.parse_args()
    load = Load(args.requests, args.rate, args.applications, args.prefix, num_own_tokens=24, num_output_tokens=16)
    systems = {
        OURS: expediter(),
        "round_robin": expediter("--routing", "round_robin"),
        "smg": smg(SMG.python(args.cache)),
    }
    rows: list[Row] = []
    turns: dict[str, list[Turn]] = {name: [] for name in systems}
    with vllm_servers(VLLM.python(args.cache), resolve_model(), [(), ()], num_blocks=_NUM_BLOCKS) as servers:
        for round_ in range(args.rounds):
            names = list(systems)
            for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
                turns[name].append(take_turn(systems[name], servers, load, seed=round_))
                rows.append(turns[name][-1].row(str(round_ + 1), name))
                print(rows[-1], file=sys.stderr, flush=True)
    compared = [ratios(rows, OURS, other) for other in systems if other != OURS]
    rows += [functools.reduce(operator.add, turns[name]).row("all", name) for name in systems] + compared
    title = f"Two vLLM servers, {args.rate:g} requests/s, {args.applications} prompts of {args.prefix} tokens shared"
    publish(title, rows, args.json)


if __name__ == "__main__":
    main()
