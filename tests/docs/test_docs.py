"""What the documentation shows works: its commands are run, its Python is run, its links lead somewhere.

Fences: `python` blocks run on their own in a fresh interpreter; `console` lines that start with `$ ` run in a shell
from the project's root; those of a `console server` block run beside a server whose port takes the place of 8000, those
of a `console door` block beside a gateway in front of that server, with its admin listener in place of 9000.
Commands that set a machine up or run for as long as it takes are checked without running them.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from expediter.assembly.server_process import free_port, running_server

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(?P<kind>[a-z]+(?: server| door)?)\n(?P<body>.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)")
RUNS_FOR_EVER = ("expediter serve",)


def fences(kind: str) -> list[tuple[str, str]]:
    return [
        (f"{page.relative_to(ROOT)}:{page.read_text()[: match.start()].count(chr(10)) + 1}", match["body"])
        for page in PAGES
        for match in FENCE.finditer(page.read_text())
        if match["kind"] == kind
    ]


def commands(kind: str) -> list[tuple[str, str]]:
    return [(where, line[2:]) for where, body in fences(kind) for line in body.splitlines() if line.startswith("$ ")]


def shell(command: str, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", "-c", command],
        check=False,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def test_there_is_something_to_check():
    assert len(fences("python")) >= 3
    assert len(commands("console")) >= 6
    assert len(commands("console server")) >= 4
    assert len(commands("console door")) >= 4


@pytest.mark.parametrize(("where", "body"), [pytest.param(*f, id=f[0]) for f in fences("python")])
def test_python_runs(where, body):
    done = subprocess.run(
        [sys.executable, "-c", body], check=False, cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, f"{where}\n{done.stderr[-2000:]}"


@pytest.mark.parametrize(
    ("where", "command"), [pytest.param(*c, id=f"{c[0]}: {c[1][:60]}") for c in commands("console")]
)
def test_command_works(where, command):
    words = shlex.split(command)
    if words[0] == "make":
        done = shell(f"make --dry-run --always-make {shlex.join(words[1:])}")
    elif command.startswith(RUNS_FOR_EVER):
        # That a server starts and answers is what the server's own commands below show; here its flags are checked.
        done = shell(f"{command} --help")
    else:
        done = shell(command)
    assert done.returncode == 0, f"{where}: {command}\n{done.stderr[-2000:]}"


@pytest.fixture(scope="module")
def server():
    with running_server(["--num-gpu-blocks-override", "512"]) as url:
        yield url


@pytest.mark.skipif(shutil.which("curl") is None, reason="the commands use curl")
def test_commands_against_a_server_work(server):
    answers_without_error("console server", {"http://127.0.0.1:8000": server})


@pytest.mark.skipif(shutil.which("curl") is None, reason="the commands use curl")
def test_commands_against_a_gateway_work(server):
    admin_port = free_port()
    with running_server(["--backend", server, "--admin-port", str(admin_port)]) as url:
        places = {"http://127.0.0.1:8000": url, "http://127.0.0.1:9000": f"http://127.0.0.1:{admin_port}"}
        answers_without_error("console door", places)


def answers_without_error(kind, places):
    for where, command in commands(kind):
        there = command
        for shown, real in places.items():
            there = there.replace(shown, real)
        done = shell(there)
        assert done.returncode == 0, f"{where}: {command}\n{done.stderr[-2000:]}"
        assert '"error"' not in done.stdout, f"{where}: {command}\n{done.stdout[:2000]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_explanation_shown_is_what_the_command_prints():
    page = (ROOT / "docs" / "explain.md").read_text()
    command = next(line[2:] for line in page.splitlines() if line.startswith("$ expediter simulate"))
    shown = re.search(r"```text\n(.*?)```", page, re.DOTALL)
    assert shown is not None
    done = shell(command)
    assert done.stdout.endswith(shown[1]), done.stdout[-2000:] + done.stderr[-2000:]
