"""The base install is enough to stand in front of other servers: no torch, no tokenizer, none of the other extras."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BARRED = """
import sys

class Bar:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {barred!r}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Bar())
"""


def extras() -> set[str]:
    """Return the modules of the packages that only extras bring."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {
        requirement.partition(">")[0].replace("-", "_").lower()
        for extra, requirements in project["optional-dependencies"].items()
        if extra != "dev"
        for requirement in requirements
    }
    assert {"torch", "tokenizers", "llguidance", "pyzmq", "opentelemetry_sdk"} <= names
    return names | {"zmq", "opentelemetry"}


def run_without_extras(code: str) -> subprocess.CompletedProcess[str]:
    program = BARRED.format(barred=extras()) + code
    return subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60)


def test_the_door_is_there() -> None:
    done = run_without_extras("import expediter.assembly.door_processes, expediter.gateway.admin")
    assert done.returncode == 0, done.stderr


def test_replicas_say_what_they_need() -> None:
    done = run_without_extras(
        "from expediter.cli import main\nimport importlib.util\nimportlib.util.find_spec = lambda name: None\n"
        "sys.exit(main.main(['serve']))"
    )
    assert done.returncode == 2
    assert "pip install 'expediter[engine]'" in done.stderr
