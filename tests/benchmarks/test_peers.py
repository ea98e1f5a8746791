"""The comparison with peers runs on our side; the peers themselves are some GB and no part of the tests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.peers.__main__ import cache_cases, scheduler_cases
from benchmarks.peers.ours import all_cases


def test_every_case_has_our_side() -> None:
    assert {ours for _, ours in scheduler_cases() + cache_cases()} <= set(all_cases())


def test_our_side_runs_and_writes_json(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    command = [sys.executable, "-m", "benchmarks.peers", "--without-peers", "--rounds", "1", "--samples", "2"]
    for cases, count in (("16 running", 2), ("1024 tokens, cold", 2)):
        subprocess.run([*command, "--cases", cases, "--json", path], check=True, cwd=Path(__file__).parents[2])
        rows = json.loads(path.read_text())["rows"]
        assert len(rows) == count
        assert all(row["ours_us"] > 0 and row["peer"] == "" for row in rows)
