"""Worker processes for studies: tasks in, results in the order of the tasks."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import wait as wait_for
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Generic, TypeVar

from expediter.core.errors import ConfigurationError, ExpediterError, ReplicaError

_Result = TypeVar("_Result")

Progress = Callable[[int, str], None]
"""Told how many tasks are done, and the label of the last one; in order of completion, from the caller's thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(Generic[_Result]):
    """Something to do in a worker.

    Args:
        label: what progress and errors call it.
        call: does it; it and its result must pickle (a module's function, or a `functools.partial` of one), unless
            there is one worker.
    """

    label: str
    call: Callable[[], _Result]


class Workers:
    """Processes that stay for several rounds of tasks: `with Workers() as workers: workers.run(tasks)`.

    With one worker everything runs in the calling process. Otherwise they are spawned when the first tasks come, so a
    script that uses them does so below `if __name__ == "__main__":`. They leave Ctrl-C to the calling process. They end
    at the end of the `with` block, whatever they are doing, and when the calling process dies.

    Args:
        num_workers: None for one per CPU that this process may use.
    Raises:
        ConfigurationError: the number is below 1.
    """

    def __init__(self, num_workers: int | None = None) -> None:
        if num_workers is not None and num_workers < 1:
            raise ConfigurationError(f"workers must be at least 1, not {num_workers}")
        self.num_workers = _num_cpus() if num_workers is None else num_workers
        self._pool: ProcessPoolExecutor | None = None
        self._processes: set[BaseProcess] = set()

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pool is None:
            return
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()
        self._pool = None
        self._processes.clear()

    def run(self, tasks: Iterable[Task[_Result]], progress: Progress | None = None) -> Iterator[_Result]:
        """Yield the tasks' results in the order of the tasks, each as soon as those before it are there.

        Dropping the iterator takes back the tasks that have not begun.

        Args:
            tasks: what to do.
            progress: told of every task that is done.
        Raises:
            ExpediterError: a task failed; of the same class as its error, and with its label. The others are given up.
            ReplicaError: a worker died.
        """
        if self.num_workers == 1:
            return _run_here(tuple(tasks), progress)
        return self._run_spawned(tuple(tasks), progress)

    def _run_spawned(self, tasks: Sequence[Task[_Result]], progress: Progress | None) -> Iterator[_Result]:
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self.num_workers, mp_context=context, initializer=_prepare_worker)
        others = set(multiprocessing.active_children())
        with _ctrl_c_held_back():  # or it could hit between a worker's start and its being known here
            futures = {self._pool.submit(_do, task): task.label for task in tasks}
            self._processes |= set(multiprocessing.active_children()) - others
        try:
            yield from _in_order(futures, progress)
        except BrokenProcessPool as error:
            raise ReplicaError("a worker process died, perhaps for want of memory; fewer workers need less") from error
        finally:
            for future in futures:
                future.cancel()


@contextlib.contextmanager
def _ctrl_c_held_back() -> Iterator[None]:
    """Let Ctrl-C take effect only at the end; processes started meanwhile never see it, where a system can do that."""
    is_main = threading.current_thread() is threading.main_thread()  # no other has a say about signals
    hits: list[object] = []
    handler = signal.signal(signal.SIGINT, lambda *hit: hits.append(hit)) if is_main else None
    # What is blocked is inherited. Blocking alone would not do: the signal may come to another thread.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if hasattr(signal, "pthread_sigmask") else None
    try:
        yield
    finally:
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if is_main:
            signal.signal(signal.SIGINT, handler or signal.default_int_handler)
    if hits:
        raise KeyboardInterrupt


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run_here(tasks: Sequence[Task[_Result]], progress: Progress | None) -> Iterator[_Result]:
    for num_done, task in enumerate(tasks, 1):
        result = _do(task)
        if progress is not None:
            progress(num_done, task.label)
        yield result


def _in_order(futures: dict[Future[_Result], str], progress: Progress | None) -> Iterator[_Result]:
    pending = set(futures)
    num_done = 0
    for future in futures:
        while future in pending:
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for other in (other for other in futures if other in done):
                other.result()  # a failure is not kept back until its turn comes
                num_done += 1
                if progress is not None:
                    progress(num_done, futures[other])
        yield future.result()


def _do(task: Task[_Result]) -> _Result:
    try:
        return task.call()
    except ExpediterError as error:
        raise type(error)(f"{task.label}: {error}") from error


def _prepare_worker() -> None:
    """Leave Ctrl-C to the parent, and do not outlive it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        wait_for([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
