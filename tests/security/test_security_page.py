"""docs/security.md names a test for everything that it says; each of them exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))


def test_every_row_of_the_tables_names_one() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and line != "| what holds | test |"]
    assert len(rows) > 15
    for row in rows:
        assert re.search(r"`tests/\S+\.py::test_\w+`", row), row


@pytest.mark.parametrize(("file", "name"), NAMED, ids=[f"{file}::{name}" for file, name in NAMED])
def test_the_tests_exist(file: str, name: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    assert any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name for node in tree.body)
