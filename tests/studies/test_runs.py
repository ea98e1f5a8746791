"""Many simulations at once: order, progress, errors and ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from expediter.assembly.simulation import SimulationConfig
from expediter.core.errors import ConfigurationError
from expediter.studies.runs import RunSpec, TraceSpec, run_all

SMALL = TraceSpec(limit=8, rate_scale=50)


def spec(preset: str, **trace) -> RunSpec:
    return RunSpec(label=preset, config=SimulationConfig(preset=preset), trace=replace(SMALL, **trace))


def test_the_number_of_workers_changes_nothing():
    specs = [spec("sarathi", limit=40), spec("vllm"), spec("orca")]
    seen = []
    spawned = list(run_all(specs, workers=2, progress=lambda done, spec: seen.append((done, spec.label))))
    here = list(run_all(specs, workers=1))
    assert [s.label for s, _ in spawned] == ["sarathi", "vllm", "orca"]
    assert [done for done, _ in seen] == [1, 2, 3]
    assert sorted(label for _, label in seen) == ["orca", "sarathi", "vllm"]
    for (_, one), (_, other) in zip(spawned, here, strict=True):
        assert replace(one, wall_s=0.0) == replace(other, wall_s=0.0)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_names_its_run(workers):
    with pytest.raises(ConfigurationError, match=r"^nonsense: no preset 'nonsense'; there are: .*sarathi"):
        list(run_all([spec("sarathi"), spec("nonsense")], workers=workers))


def test_no_workers_are_refused():
    with pytest.raises(ConfigurationError, match="workers must be at least 1, not 0"):
        run_all([spec("sarathi")], workers=0)


PROGRAM = """
import multiprocessing
from expediter.assembly.simulation import SimulationConfig
from expediter.studies.runs import RunSpec, TraceSpec, run_all

if __name__ == "__main__":
    long = RunSpec(label="long", config=SimulationConfig(jumps=False), trace=TraceSpec(rate_scale=50))
    short = RunSpec(label="short", config=SimulationConfig(), trace=TraceSpec(limit=2))
    runs = run_all([short] + [long] * 40, workers=2)
    next(runs)
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    try:
        list(runs)
    except KeyboardInterrupt:
        print("left:", len(multiprocessing.active_children()), flush=True)
"""


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_their_parent(tmp_path, end):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        workers = [int(pid) for pid in program.stdout.readline().split()]
        assert len(workers) == 2
        program.send_signal(end)
        out, err = program.communicate(timeout=30)
    deadline = time.monotonic() + 10
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(is_running, workers))
    if end is signal.SIGINT:
        assert out == "left: 0\n"
        assert err == ""
