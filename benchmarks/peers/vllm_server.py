"""vLLM's own OpenAI server as a process, with the default model, on one core and in little memory."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, Self

from expediter.assembly.server_process import free_port

_START_TIMEOUT_S: Final = 600.0
"""It takes one to two minutes on an idle machine, most of it imports."""
_STOP_TIMEOUT_S: Final = 30.0
_ENVIRONMENT: Final = {
    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; `num_blocks` is what counts
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


class VllmServer:
    """One vLLM server; starting returns at once, `wait_until_ready` waits.

    Args:
        python: interpreter of an environment with vLLM.
        model: its folder; clients call it `name`.
        core: that its threads run on, None for all.
        num_blocks: of its KV cache, 32 tokens each (the least that its CPU kernels take).
        flags: more of vLLM's own.
    """

    def __init__(
        self,
        python: Path,
        model: Path,
        *,
        name: str = "smollm2",
        port: int | None = None,
        core: int | None = None,
        num_blocks: int = 512,
        flags: Sequence[str] = (),
    ) -> None:
        self.port = free_port() if port is None else port
        self.url = f"http://127.0.0.1:{self.port}"
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process; `stop` closes it
        threads = {} if core is None else {"VLLM_CPU_OMP_THREADS_BIND": str(core)}
        self.command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        self.command += ["--served-model-name", name, "--host", "127.0.0.1", "--port", str(self.port)]
        self.command += ["--enforce-eager", "--max-model-len", "4096", "--max-num-seqs", "32", "--block-size", "32"]
        self.command += ["--num-gpu-blocks-override", str(num_blocks), "--enable-prompt-tokens-details", *flags]
        self._environment = {**os.environ, **_ENVIRONMENT, **threads}
        self.start()

    def start(self) -> None:
        """Start it, again after `kill`."""
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=self._said,
            stderr=subprocess.STDOUT,
            env=self._environment,
            start_new_session=True,  # its engine is a child of its own; `kill` means both
        )

    def wait_until_ready(self) -> None:
        """Return once it answers.

        Raises:
            SystemExit: it died, or is not ready in ten minutes; its last words are the message.
        """
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if self.process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        raise SystemExit(f"vLLM did not start: {self.last_words()}")

    def metric(self, name: str) -> float:
        """Return the sum of one of its metrics over all labels, e.g. `vllm:num_requests_running`."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE))

    def reset_prefix_cache(self) -> None:
        """Forget every cached block; it refuses while requests run."""
        request = urllib.request.Request(f"{self.url}/reset_prefix_cache", method="POST")
        with urllib.request.urlopen(request, timeout=30):
            pass

    def last_words(self) -> str:
        self._said.flush()
        self._said.seek(0)
        return self._said.read()[-8000:]

    def kill(self) -> None:
        """End it and its engine at once, as a crash would."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_STOP_TIMEOUT_S)
        self.kill()
        self._said.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


@contextmanager
def vllm_servers(
    python: Path, model: Path, flags: Sequence[Sequence[str]], *, num_blocks: int
) -> Iterator[list[VllmServer]]:
    """Run one server per list of flags, each on a core of its own where there are enough."""
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                VllmServer(python, model, core=cores[place % len(cores)], num_blocks=num_blocks, flags=own)
            )
            for place, own in enumerate(flags)
        ]
        for server in servers:
            server.wait_until_ready()
        yield servers
