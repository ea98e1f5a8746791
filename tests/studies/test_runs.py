"""Many simulations at once: order, progress, errors and ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from expediter.assembly.simulation import SimulationConfig
from expediter.core.errors import ConfigurationError, ReplicaError
from expediter.studies.runs import RunSpec, TraceSpec, run_all
from expediter.studies.workers import Task, Workers

SMALL = TraceSpec(limit=8, rate_scale=50)


def spec(preset: str, **trace) -> RunSpec:
    return RunSpec(label=preset, config=SimulationConfig(preset=preset), trace=replace(SMALL, **trace))


def test_the_number_of_workers_changes_nothing():
    specs = [spec("sarathi", limit=40), spec("vllm"), spec("orca")]
    seen = []
    with Workers(2) as workers:
        spawned = list(run_all(specs, workers, progress=lambda done, label: seen.append((done, label))))
        assert list(workers.run([])) == []
        (again,) = run_all(specs[1:2], workers)
    here = list(run_all(specs, Workers(1)))
    assert replace(again[1], wall_s=0.0) == replace(here[1][1], wall_s=0.0)
    assert [s.label for s, _ in spawned] == ["sarathi", "vllm", "orca"]
    assert [done for done, _ in seen] == [1, 2, 3]
    assert sorted(label for _, label in seen) == ["orca", "sarathi", "vllm"]
    for (_, one), (_, other) in zip(spawned, here, strict=True):
        assert replace(one, wall_s=0.0) == replace(other, wall_s=0.0)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_an_error_names_its_run(num_workers):
    with (
        Workers(num_workers) as workers,
        pytest.raises(ConfigurationError, match=r"^nonsense: no preset 'nonsense'; there are: .*sarathi"),
    ):
        list(run_all([spec("sarathi"), spec("nonsense")], workers))


def test_a_dead_worker_is_an_error():
    with Workers(2) as workers, pytest.raises(ReplicaError, match="a worker process died"):
        list(workers.run([Task(label="dies", call=partial(os._exit, 1))]))


def test_no_workers_are_refused():
    with pytest.raises(ConfigurationError, match="workers must be at least 1, not 0"):
        Workers(0)


def test_jitter_keeps_the_traffic_and_moves_its_arrivals():
    plain = replace(SMALL, limit=None).load().arrival_s
    one, same, other = (replace(SMALL, limit=None, jitter=True, seed=seed).load().arrival_s for seed in (0, 0, 1))
    assert one.tolist() == same.tolist() != other.tolist()
    assert one[0] == plain[0]
    assert (np.diff(one) >= 0).all()
    # Nobody leaves the company of those that arrive around the same time.
    assert (one[:-8] <= plain[8:]).all()
    assert (one[8:] >= plain[:-8]).all()
    assert (one != plain).mean() > 0.9


PROGRAM = """
import multiprocessing
import signal
import time
from expediter.assembly.simulation import SimulationConfig
from expediter.studies.runs import RunSpec, TraceSpec, run_all
from expediter.studies.workers import Workers

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job is started with it ignored
    long = RunSpec(label="long", config=SimulationConfig(jumps=False), trace=TraceSpec(rate_scale=50))
    short = RunSpec(label="short", config=SimulationConfig(), trace=TraceSpec(limit=2))
    try:
        with Workers(2) as workers:
            runs = run_all([short] + [long] * 40, workers)
            next(runs)
            print(*(child.pid for child in multiprocessing.active_children()), flush=True)
            list(runs)
    except KeyboardInterrupt:
        # The pool's thread waits for the same processes: who comes second learns of an end a moment later.
        deadline = time.monotonic() + 5
        while multiprocessing.active_children() and time.monotonic() < deadline:
            time.sleep(0.01)
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
