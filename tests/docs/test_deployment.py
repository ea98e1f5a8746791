"""The files for systemd, Docker and Kubernetes: what they run starts, answers their probes, and ends in their time."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from expediter.assembly.server_process import free_port

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
EXECUTABLE = Path(sys.executable).with_name("expediter")
SHUTDOWN_S = 30.0
"""`--shutdown-timeout` as it comes; nobody may be more impatient."""


def unit() -> dict[str, str]:
    """Return the assignments of the systemd unit; none of its names comes twice."""
    lines = (EXAMPLES / "expediter.service").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def image() -> dict[str, Any]:
    """Return what the Dockerfile says, by instruction."""
    lines = (EXAMPLES / "Dockerfile").read_text().splitlines()
    return dict(line.split(" ", 1) for line in lines if line and not line.startswith("#"))


def manifests() -> dict[str, Any]:
    return {each["kind"]: each for each in yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())}


def pod() -> dict[str, Any]:
    spec: dict[str, Any] = manifests()["Deployment"]["spec"]["template"]["spec"]
    return spec


def command(kind: str) -> list[str]:
    """Return the command line, from the word behind `expediter` on."""
    if kind == "systemd":
        return shlex.split(unit()["ExecStart"])[1:]
    entry = json.loads(image()["ENTRYPOINT"])[1:]
    return [*entry, *(json.loads(image()["CMD"]) if kind == "docker" else pod()["containers"][0]["args"])]


@contextmanager
def started(words: list[str], config: str, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run such a command with another file and another port until it answers; it is killed when the block ends."""
    path = folder / "expediter.toml"
    path.write_text(config)
    port = free_port()
    words = [str(path) if word.endswith(".toml") else word for word in words]
    process = subprocess.Popen([EXECUTABLE, *words, "--port", str(port)], stdin=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + 60
        while status(f"http://127.0.0.1:{port}/health") == 0:
            assert process.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def status(url: str) -> int:
    """Return the status of an answer, 0 if there is none."""
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


@pytest.mark.parametrize("kind", ["systemd", "docker", "kubernetes"])
def test_the_command_starts_answers_probes_reloads_and_stops(kind: str, tmp_path: Path) -> None:
    container = pod()["containers"][0]
    live, ready = (container[f"{probe}Probe"]["httpGet"]["path"] for probe in ("liveness", "readiness"))
    config = f'[[backends]]\nurl = "http://127.0.0.1:{free_port()}"\n'
    with started(command(kind), config, tmp_path) as (process, url):
        assert status(url + live) == 200
        assert status(url + ready) == 503  # its backend is not there
        process.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert status(url + live) == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_the_configuration_in_kubernetes_is_read(tmp_path: Path) -> None:
    config, admin_port = manifests()["ConfigMap"]["data"]["expediter.toml"], free_port()
    admin = f"http://127.0.0.1:{admin_port}"
    with (
        started([*command("kubernetes"), "--admin-port", str(admin_port)], config, tmp_path),
        urllib.request.urlopen(f"{admin}/backends", timeout=30) as answer,
    ):
        names = [backend["name"] for backend in json.loads(answer.read())["backends"]]
    assert names == ["vllm-0", "vllm-1"]


def test_whoever_stops_it_waits_for_requests_in_flight() -> None:
    assert int(unit()["TimeoutStopSec"]) > SHUTDOWN_S
    told = (EXAMPLES / "Dockerfile").read_text()
    assert int(told.split("--stop-timeout ")[1].split()[0]) > SHUTDOWN_S
    pause_s = pod()["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod()["terminationGracePeriodSeconds"] > SHUTDOWN_S + pause_s


def test_kubernetes_names_what_is_there() -> None:
    found, spec = manifests(), pod()
    (container,), (volume,) = spec["containers"], spec["volumes"]
    assert found["Deployment"]["spec"]["selector"]["matchLabels"] == found["Service"]["spec"]["selector"]
    assert volume["configMap"]["name"] == found["ConfigMap"]["metadata"]["name"]
    (mount,) = container["volumeMounts"]
    assert mount["name"] == volume["name"]
    assert container["args"][1] == f"{mount['mountPath']}/{next(iter(found['ConfigMap']['data']))}"
    (port,) = container["ports"]
    assert port["containerPort"] == int(image()["EXPOSE"]) == 8000
    names = {container[f"{probe}Probe"]["httpGet"]["port"] for probe in ("liveness", "readiness")}
    assert names == {port["name"]} == {found["Service"]["spec"]["ports"][0]["targetPort"]}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd's own check, where there is systemd")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    path = tmp_path / "expediter.service"
    installed = unit()["ExecStart"].split()[0]
    path.write_text((EXAMPLES / "expediter.service").read_text().replace(installed, str(EXECUTABLE)))
    done = subprocess.run(["systemd-analyze", "verify", path], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
