"""Many simulations in worker processes, with results in the order in which they were asked for.

specs = [RunSpec(label=name, config=SimulationConfig(preset=name), trace=TraceSpec()) for name in ("vllm", "sarathi")]
for spec, report in run_all(specs):
    print(spec.label, report.goodput_rps)

Workers are spawned, so a script that calls `run_all` does so below `if __name__ == "__main__":`.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import wait as wait_for
from pathlib import Path

from expediter.assembly.simulation import SimulationConfig, build_simulation, prepare_trace
from expediter.core.errors import ConfigurationError, ExpediterError, ReplicaError
from expediter.sim.report import Report
from expediter.sim.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSpec:
    """Which requests a run serves; the worker reads them.

    Args:
        name: a trace that comes with Expediter, or a file.
        rate_scale: arrival rate as a multiple of the trace's.
        limit: most requests; None for all.
        seed: of the spread of arrivals within coarse ticks.
        spread_ticks, strict: as in `sim.trace_readers.read_trace`.
    """

    name: str | Path = "demo"
    rate_scale: float = 1.0
    limit: int | None = None
    seed: int = 0
    spread_ticks: bool = True
    strict: bool = False

    def load(self) -> Trace:
        """Read the trace.

        Raises:
            ConfigurationError: as `prepare_trace`.
        """
        return prepare_trace(
            self.name,
            rate_scale=self.rate_scale,
            limit=self.limit,
            seed=self.seed,
            spread_ticks=self.spread_ticks,
            strict=self.strict,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """One simulation.

    Args:
        label: what progress and errors call it.
        config: what is simulated.
        trace: what it serves.
    """

    label: str
    config: SimulationConfig
    trace: TraceSpec


Progress = Callable[[int, RunSpec], None]
"""Told how many runs are done, and which one was done last; in order of completion, from the caller's thread."""


def run_all(
    specs: Iterable[RunSpec], *, workers: int | None = None, progress: Progress | None = None
) -> Iterator[tuple[RunSpec, Report]]:
    """Simulate each spec and yield it with its report, in the order of the specs, each as soon as those before it are.

    The results do not depend on the number of workers. When the caller stops early, by Ctrl-C or by dropping the
    iterator, the workers end at once; they also end when the calling process dies.

    Args:
        specs: what to run. Everything in them must pickle, unless there is one worker.
        workers: processes; None for one per CPU. With one, or for one spec, everything runs in this process.
        progress: told of every run that is done.
    Raises:
        ConfigurationError: `workers` is below 1.
        ExpediterError: a run failed; of the same class as the run's error, and with its label. The others are given up.
        ReplicaError: a worker died.
    """
    if workers is not None and workers < 1:
        raise ConfigurationError(f"workers must be at least 1, not {workers}")
    listed = tuple(specs)
    num_workers = min(_num_cpus() if workers is None else workers, len(listed))
    if num_workers > 1:
        return _run_spawned(listed, num_workers, progress)
    return _run_here(listed, progress)


def _num_cpus() -> int:
    """Return the CPUs that this process may use, where the system says."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run_here(specs: Sequence[RunSpec], progress: Progress | None) -> Iterator[tuple[RunSpec, Report]]:
    for num_done, spec in enumerate(specs, 1):
        report = _run(spec)
        if progress is not None:
            progress(num_done, spec)
        yield spec, report


def _run_spawned(
    specs: Sequence[RunSpec], num_workers: int, progress: Progress | None
) -> Iterator[tuple[RunSpec, Report]]:
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        num_workers, mp_context=multiprocessing.get_context("spawn"), initializer=_prepare_worker
    )
    is_complete = False
    try:
        futures = {pool.submit(_run, spec): spec for spec in specs}
        yield from _in_order(futures, progress)
        is_complete = True
    except BrokenProcessPool as error:
        raise ReplicaError("a worker process died, perhaps for want of memory; fewer workers need less") from error
    finally:
        pool.shutdown(wait=is_complete, cancel_futures=True)
        for worker in set(multiprocessing.active_children()) - others:
            worker.terminate()
            worker.join()


def _in_order(futures: dict[Future[Report], RunSpec], progress: Progress | None) -> Iterator[tuple[RunSpec, Report]]:
    pending = set(futures)
    num_done = 0
    for future, spec in futures.items():
        while future in pending:
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for other in (other for other in futures if other in done):
                other.result()  # a failure is not kept back until its turn comes
                num_done += 1
                if progress is not None:
                    progress(num_done, futures[other])
        yield spec, future.result()


def _run(spec: RunSpec) -> Report:
    try:
        return build_simulation(spec.config).run(spec.trace.load())
    except ExpediterError as error:
        raise type(error)(f"{spec.label}: {error}") from error


def _prepare_worker() -> None:
    """Leave Ctrl-C to the parent, and do not outlive it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        wait_for([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
