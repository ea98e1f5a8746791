"""What runs in the comparison: the mock backends, the load, and the routers, each in processes of their own."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.peers.environments import SGLANG_ROUTER, SMG

HERE: Final = Path(__file__).parent
KEY: Final = "sk-benchmark"
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_START_TIMEOUT_S: Final = 60.0

Command = Callable[[int, Sequence[int]], list[str]]
"""The argv of a router that listens on a port before backends on others."""


def compile_c(name: str, folder: Path) -> Path:
    """Compile one of the C programs here.

    Raises:
        SystemExit: there is no C compiler, or it complains.
    """
    target = folder / name
    try:
        subprocess.run(["cc", "-O2", "-o", target, HERE / f"{name}.c"], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"cannot compile {name}.c with cc: {error}") from error
    return target


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


class Backends:
    """Mock backends on some ports; `close` ends them."""

    def __init__(self, program: Path, count: int, num_chunks: int, gap_us: int) -> None:
        self.ports = free_ports(count)
        words = [str(program), str(num_chunks), str(gap_us), *map(str, self.ports)]
        self._process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "listening\n":
            raise SystemExit("the mock backends do not listen")

    def cpu_s(self) -> float:
        return tree_cpu_s(self._process.pid)

    def close(self) -> None:
        self._process.terminate()
        self._process.communicate()


@dataclass(frozen=True)
class Load:
    """One run of the load generator."""

    concurrency: int
    num_requests: int
    is_stream: bool
    body_bytes: int = 2048
    num_groups: int = 64
    max_s: int = 120

    def run(self, program: Path, port: int) -> dict[str, Any]:
        """Return its figures.

        Raises:
            SystemExit: a request failed or did not end in time; figures of such a run say nothing.
        """
        kind = "stream" if self.is_stream else "whole"
        words = [port, self.concurrency, self.num_requests, kind, self.body_bytes, self.num_groups, KEY, self.max_s]
        done = subprocess.run([program, *map(str, words)], check=True, capture_output=True, text=True)
        figures: dict[str, Any] = json.loads(done.stdout)
        if figures["errors"] or figures["unfinished"]:
            raise SystemExit(f"{figures['errors']} errors, {figures['unfinished']} unfinished at {self}")
        return figures


class Router:
    """A router's process, ready to be asked; `close` ends it."""

    def __init__(self, name: str, command: Command, backend_ports: Sequence[int], folder: Path) -> None:
        self.name = name
        self.port = free_ports(1)[0]
        self._log = (folder / f"{name}.log").open("w+")
        words = command(self.port, backend_ports)
        root = HERE.parents[1]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "src")])}
        self._process = subprocess.Popen(words, stdout=self._log, stderr=self._log, env=environment)
        self._wait_until_ready()

    def cpu_s(self) -> float:
        """Return the CPU time of all its processes so far, user and system."""
        return tree_cpu_s(self._process.pid)

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _wait_until_ready(self) -> None:
        """Ask until it forwards; some answer health checks long before."""
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        body = json.dumps({"model": "mock", "messages": [{"role": "user", "content": "ready?"}]}).encode()
        headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/v1/chat/completions", body, headers)
        while time.monotonic() < deadline_s and self._process.poll() is None:
            try:
                with urllib.request.urlopen(request, timeout=5) as response:
                    if response.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        self._log.seek(0)
        said = self._log.read()[-2000:]
        self.close()
        raise SystemExit(f"{self.name} does not forward:\n{said}")


def tree_cpu_s(pid: int) -> float:
    """Return the CPU time of a process and its descendants that live, from /proc."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:  # it has ended
            continue
        parents[int(entry.name)] = int(fields[1])
        ticks[int(entry.name)] = int(fields[11]) + int(fields[12])
    family = {pid}
    while new := {child for child, parent in parents.items() if parent in family} - family:
        family |= new
    return sum(ticks.get(member, 0) for member in family) / _TICKS_PER_S


def floor() -> Command:
    return lambda port, backends: [
        *(sys.executable, "-m", "benchmarks.router.floor", str(port)),
        *map(str, backends),
    ]


def expediter(folder: Path, *flags: str) -> Command:
    """Ours with a key that has limits (none of which is reached); its configuration is written into the folder."""

    def command(port: int, backends: Sequence[int]) -> list[str]:
        config = folder / "expediter.toml"
        config.write_text(
            f'[tenants.benchmark]\nkey_hashes = ["{hashlib.sha256(KEY.encode()).hexdigest()}"]\n'
            "max_requests_per_minute = 100000000\nmax_tokens_per_minute = 100000000000\n"
            "max_concurrent_requests = 100000\n"
        )
        urls = [word for backend in backends for word in ("--backend", f"http://127.0.0.1:{backend}")]
        serve = [sys.executable, "-m", "expediter.cli.main", "serve", *urls, "--config", str(config)]
        return [*serve, "--port", str(port), *flags]

    return command


def smg(policy: str, cache: Path) -> Command:
    """smg with its default settings: metrics, and a line of log per request."""
    python = SMG.python(cache)

    def command(port: int, backends: Sequence[int]) -> list[str]:
        urls = [f"http://127.0.0.1:{backend}" for backend in backends]
        script = str(python.parent / "smg")
        metrics = str(free_ports(1)[0])
        return [
            *(script, "launch", "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *urls, "--policy", policy),
            *("--prometheus-port", metrics, "--api-key", KEY),
        ]

    return command


def sglang_router(policy: str, cache: Path) -> Command:
    """sglang-router with its default settings."""
    python = SGLANG_ROUTER.python(cache)

    def command(port: int, backends: Sequence[int]) -> list[str]:
        urls = [f"http://127.0.0.1:{backend}" for backend in backends]
        metrics = str(free_ports(1)[0])
        return [
            *(str(python), "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)),
            *("--worker-urls", *urls, "--policy", policy, "--prometheus-port", metrics),
        ]

    return command


def scratch() -> tempfile.TemporaryDirectory[str]:
    """Return a folder for what is compiled and logged."""
    return tempfile.TemporaryDirectory(prefix="expediter-router-")
