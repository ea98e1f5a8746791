"""Ours against vLLM's scheduler and SGLang's prefix caches, peer and ours in turn; microseconds of CPU time.

The first run makes the peers' environments (some GB, some minutes). `--without-peers` measures ours alone.

"match" of SGLang yields a length and a node; "match with ids" also the slots of the matched tokens, as ours always
does: ours has one figure, which stands beside both.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from benchmarks.peers.environments import DEFAULT_CACHE, SGLANG, VLLM
from benchmarks.peers.protocol import CHAIN, LENGTHS, RUNNING
from benchmarks.report import Row, add_json_option, publish, spread

_ROOT = Path(__file__).parents[2]


class Participant:
    """A process that answers cases; see `protocol`."""

    def __init__(self, name: str, python: Path, module: str, *arguments: str) -> None:
        self.name = name
        paths = os.pathsep.join([str(_ROOT), str(_ROOT / "src")] if name == "ours" else [str(_ROOT)])
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process; `close` closes it
        self._process = subprocess.Popen(
            [python, "-m", f"benchmarks.peers.{module}", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env={**os.environ, "PYTHONPATH": paths},
        )

    def ask(self, case: str, num_samples: int) -> list[float]:
        """Return samples of a case.

        Raises:
            SystemExit: the process died; its last words are the message.
        """
        stdin, stdout = self._pipes()
        with contextlib.suppress(BrokenPipeError):  # it died; what it said is read below
            stdin.write(json.dumps({"case": case, "samples": num_samples}) + "\n")
            stdin.flush()
        for line in stdout:
            if line.startswith('{"samples"'):  # anything else is what a package prints on import
                samples: list[float] = json.loads(line)["samples"]
                return samples
        self._said.seek(0)
        raise SystemExit(f"{self.name}, {case}: {self._said.read()[-2000:]}")

    def close(self) -> None:
        self._pipes()[0].close()
        self._process.wait()
        self._said.close()

    def _pipes(self) -> tuple[IO[str], IO[str]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        return self._process.stdin, self._process.stdout


def scheduler_cases() -> list[tuple[str, str]]:
    """Return (case of the peer, case of ours) for vLLM's scheduler."""
    cases = [f"decode, {n} running" for n in RUNNING]
    cases += [f"admission, {n} tokens, {how}" for n in LENGTHS for how in ("cold", "full hit")]
    return [(case, case + mark) for case in cases for mark in ("", ", slo")]


def cache_cases() -> list[tuple[str, str]]:
    """Return (case of the peer, case of ours) for SGLang's caches."""
    pairs: list[tuple[str, str]] = []
    for nodes in ("1 node", f"{CHAIN} nodes"):
        for length in LENGTHS:
            ours = f"match with ids, {nodes}, {length} tokens"
            pairs += [(f"match, {nodes}, {length} tokens", ours), (ours, ours)]
    same = [f"insert, {length} tokens" for length in LENGTHS] + ["evict, 256-token leaf"]
    return pairs + [(case, case) for case in same]


def compare(
    pairs: Sequence[tuple[str, str]], peer: Participant | None, ours: Participant, num_rounds: int, num_samples: int
) -> list[Row]:
    """Ask peer and ours in turn for each pair of cases; one row each."""
    rows: list[Row] = []
    for case, our_case in pairs:
        theirs: list[float] = []
        mine: list[float] = []
        for index in range(num_rounds + 1):
            their_round = peer.ask(case, num_samples) if peer else []
            my_round = ours.ask(our_case, num_samples)
            if index:  # the first one warms up
                theirs += their_round
                mine += my_round
        row = _row("" if peer is None else peer.name, our_case if our_case.endswith(", slo") else case, theirs, mine)
        print(*row.values(), sep="  ", file=sys.stderr)
        rows.append(row)
    return rows


def _row(peer: str, case: str, theirs: list[float], mine: list[float]) -> Row:
    my = spread(mine)
    their: Row = spread(theirs) if theirs else {"median_us": "", "min_us": ""}
    return {
        "case": case,
        "peer": peer,
        "peer_us": their["median_us"],
        "peer_min_us": their["min_us"],
        "ours_us": my["median_us"],
        "ours_min_us": my["min_us"],
        "times_faster": round(their["median_us"] / my["median_us"], 1) if theirs else "",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help="folder of the peers' environments")
    parser.add_argument("--rounds", type=int, default=5, help="times that each participant has its turn, per case")
    parser.add_argument("--samples", type=int, default=40, help="of each turn")
    parser.add_argument("--cases", default="", help="only those whose name contains this")
    parser.add_argument("--without-peers", action="store_true", help="measure ours alone")
    add_json_option(parser)
    args = parser.parse_args()
    ours = Participant("ours", Path(sys.executable), "ours")
    contests: list[tuple[Participant | None, list[tuple[str, str]]]]
    if args.without_peers:
        unique = dict.fromkeys(our_case for _, our_case in scheduler_cases() + cache_cases())
        contests = [(None, [(case, case) for case in unique])]
    else:
        sglang = SGLANG.python(args.cache)
        contests = [
            (Participant("vllm", VLLM.python(args.cache), "vllm_driver"), scheduler_cases()),
            (Participant("sglang rust", sglang, "sglang_driver", "rust"), cache_cases()),
            (Participant("sglang python", sglang, "sglang_driver", "python"), cache_cases()),
        ]
    rows: list[Row] = []
    for peer, pairs in contests:
        chosen = [(case, our_case) for case, our_case in pairs if args.cases in our_case or args.cases in case]
        rows += compare(chosen, peer, ours, args.rounds, args.samples)
        if peer is not None:
            peer.close()
    if args.cases in "bytes per cached token":
        per_token = round(ours.ask("bytes per cached token", 1)[0], 2)
        rows.append(_row("", "bytes per cached token", [], [per_token]))
    ours.close()
    publish("ours and its peers, microseconds of the thread's CPU time", rows, args.json)


if __name__ == "__main__":
    main()
