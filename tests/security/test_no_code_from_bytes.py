"""Nothing that comes from a socket, a file or the API is unpickled, evaluated, or run (SECURITY: the first line)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "jsonpickle", "code", "codeop"}
CALLS = {
    *("eval", "exec", "compile", "__import__", "torch.load", "joblib.load", "yaml.load", "yaml.unsafe_load"),
    *("os.system", "os.popen", "runpy.run_path", "runpy.run_module"),
}
OBJECT_COLLECTIVES = {
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
}
KEYWORDS = {
    "allow_pickle": True,  # numpy.load
    "trust_remote_code": True,  # transformers
    "use_safetensors": False,
    "weights_only": False,
    "shell": True,  # subprocess
}
POOLS = {"multiprocessing", "concurrent.futures.ProcessPoolExecutor"}
"""They pickle between processes of ours, over pipes that nobody else has: for studies, never where a server is."""


def findings(source: str) -> list[str]:
    """Return what in a module could turn bytes into code, in words with the line."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [f"{node.lineno}: import {alias.name}" for alias in node.names if is_forbidden(alias.name)]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            found += [f"{node.lineno}: from {name}" for name in names if is_forbidden(name)]
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in CALLS or name.rsplit(".", 1)[-1] in OBJECT_COLLECTIVES:
                found.append(f"{node.lineno}: {name}()")
            for keyword in node.keywords:
                value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
                if keyword.arg in KEYWORDS and value is KEYWORDS[keyword.arg]:
                    found.append(f"{node.lineno}: {keyword.arg}={value}")
    return found


def is_forbidden(module: str) -> bool:
    return module.split(".", maxsplit=1)[0] in MODULES or module in POOLS


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "src" / "expediter")))
def test_no_module_turns_bytes_into_code(path: Path) -> None:
    found = findings(path.read_text())
    if "studies" in path.parts:
        found = [each for each in found if not any(pool in each for pool in POOLS)]
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        *("import pickle", "from pickle import loads", "import dill as d", "from multiprocessing import Queue"),
        *("eval(text)", "exec(code)", "torch.load(path)", "np.load(f, allow_pickle=True)", "yaml.load(text)"),
        *("dist.broadcast_object_list(x)", "subprocess.run(line, shell=True)", "f(trust_remote_code=True)"),
        *("from concurrent.futures import ProcessPoolExecutor", "import multiprocessing.shared_memory, marshal"),
    ],
)
def test_the_check_finds_it(source: str) -> None:
    assert findings(source)


@pytest.mark.parametrize("source", ["model.eval()", "re.compile(x)", "msgspec.json.decode(raw)", "np.load(f)"])
def test_the_check_leaves_the_rest_alone(source: str) -> None:
    assert not findings(source)
