"""The gateway in front of real engines as their tests see it."""

from __future__ import annotations

import http.client
import json
import os
import random
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from benchmarks.peers.environments import Environment

from expediter.assembly.server_process import free_port, running_server

WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school")


def interpreter(environment: Environment, target: str) -> Path:
    """Return an engine's interpreter; skip the test where its environment is not asked for.

    Args:
        target: of `make`, which makes the environment and runs the test.
    """
    cache = os.environ.get("EXPEDITER_PEERS")
    if cache is None:
        pytest.skip(f"`make {target}` runs it")
    python = environment.ready(Path(cache))
    assert python is not None, f"{environment.name} is not in {cache}"
    return python


def post(url: str, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read())


def get(url: str, path: str) -> Any:
    with urllib.request.urlopen(url + path, timeout=30) as answer:
        return json.loads(answer.read())


def text(seed: int, num_words: int) -> str:
    """Return words that are a token each."""
    return " ".join(random.Random(seed).choices(WORDS, k=num_words))


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 20.0, every_s: float = 0.05) -> float:
    """Return how long it took."""
    started_s = time.monotonic()
    while not condition():
        assert time.monotonic() - started_s < timeout_s, f"{what}: not in {timeout_s} s"
        time.sleep(every_s)
    return time.monotonic() - started_s


@contextmanager
def asked(url: str, path: str, body: dict[str, Any]) -> Iterator[http.client.HTTPConnection]:
    """Send a request, and leave when the block ends, whatever has come by then."""
    host, port = url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=120)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    try:
        yield connection
    finally:
        connection.close()


def stream_lines(url: str, path: str, body: dict[str, Any]) -> list[str]:
    """Return the lines of a stream that say something."""
    with asked(url, path, {"stream": True, **body}) as connection:
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        return [line.decode().rstrip("\r\n") for line in answer if line.strip()]


@dataclass(frozen=True)
class EngineDoor:
    """The two addresses of a gateway."""

    url: str
    admin_url: str

    def backends(self) -> list[dict[str, Any]]:
        """Return what the admin listener says of the backends, in the order of the configuration."""
        found: list[dict[str, Any]] = get(self.admin_url, "/backends")["backends"]
        return found

    def told(self, request_id: str) -> dict[str, Any]:
        """Return how the gateway explains a request."""
        (explained,) = get(self.url, f"/requests/{request_id}")["gateway"]
        found: dict[str, Any] = explained
        return found


@contextmanager
def engine_door(urls: Sequence[str], *flags: str) -> Iterator[EngineDoor]:
    """Run a gateway before engines until the block ends."""
    admin_port = free_port()
    backends = [word for url in urls for word in ("--backend", url)]
    with running_server([*backends, "--admin-port", str(admin_port), *flags]) as url:
        yield EngineDoor(url, f"http://127.0.0.1:{admin_port}")
