"""vLLM's own OpenAI server as a process, with the default model, on one core and in little memory."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from benchmarks.peers.engine_server import EngineServer, all_ready
from expediter.assembly.server_process import free_port

_ENVIRONMENT: Final = {
    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; `num_blocks` is what counts
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def _dtype() -> str:
    """Return the format that the processor has: bfloat16, vLLM's own choice, takes six times as long emulated."""
    flags = Path("/proc/cpuinfo").read_text().split()
    return "bfloat16" if "avx512_bf16" in flags or "bf16" in flags else "float32"


class VllmServer(EngineServer):
    """One vLLM server.

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
        port = free_port() if port is None else port
        threads = {} if core is None else {"VLLM_CPU_OMP_THREADS_BIND": str(core)}
        command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--served-model-name", name, "--host", "127.0.0.1", "--port", str(port)]
        command += ["--enforce-eager", "--max-model-len", "4096", "--max-num-seqs", "32", "--block-size", "32"]
        command += ["--dtype", _dtype()]
        command += ["--num-gpu-blocks-override", str(num_blocks), "--enable-prompt-tokens-details", *flags]
        super().__init__(command, port, environment={**_ENVIRONMENT, **threads})

    def reset_prefix_cache(self) -> None:
        """Forget every cached block; it refuses while requests run."""
        request = urllib.request.Request(f"{self.url}/reset_prefix_cache", method="POST")
        with urllib.request.urlopen(request, timeout=30):
            pass


@contextmanager
def vllm_servers(
    python: Path, model: Path, flags: Sequence[Sequence[str]], *, num_blocks: int
) -> Iterator[Sequence[VllmServer]]:
    """Run one server per list of flags, each on a core of its own where there are enough."""
    cores = sorted(os.sched_getaffinity(0))
    servers = [
        VllmServer(python, model, core=cores[place % len(cores)], num_blocks=num_blocks, flags=own)
        for place, own in enumerate(flags)
    ]
    with all_ready(servers) as ready:
        yield ready
