"""Starts servers as processes and talks to them; whatever a test starts is gone when it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

HERE = Path(__file__).parent
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
EOS = 256


def make_model_folder(folder: Path, template: str = TEMPLATE) -> Path:
    """Write a byte-level tokenizer without merges: one token per byte, so that emoji take four."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    character = {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}
    assert sorted(character.values()) == alphabet
    tokenizer = Tokenizer(models.BPE({character[byte]: byte for byte in range(256)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 300, "eos_token_id": EOS}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "<|end|>"}))
    return folder


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """Server-sent events, decoded; `[DONE]` as that string."""
        data = [line[6:] for line in self.body.decode().split("\n") if line.startswith("data: ")]
        return [item if item == "[DONE]" else json.loads(item) for item in data]


class LiveServer:
    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url
        self.metrics_headers: dict[str, str] = {}
        self.port = int(url.rsplit(":", 1)[1])

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, timeout_s: float = 30
    ) -> Reply:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers or {}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                return Reply(response.status, dict(response.headers), response.read())
        except urllib.error.HTTPError as error:
            with error:
                return Reply(error.code, dict(error.headers), error.read())

    def get(self, path: str, **options: Any) -> Reply:
        return self.request("GET", path, **options)

    def post(self, path: str, body: Any, **options: Any) -> Reply:
        return self.request("POST", path, body, **options)

    def complete(self, prompt: Any, headers: dict[str, str] | None = None, **fields: Any) -> Reply:
        return self.post("/v1/completions", {"prompt": prompt, "max_tokens": 64, **fields}, headers=headers)

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric over all its label sets that match."""
        total = 0.0
        for line in self.get("/metrics", headers=self.metrics_headers).body.decode().splitlines():
            match = re.fullmatch(r"([\w:]+)(?:\{(.*)\})? (\S+)", line)
            if match and match[1] == name:
                found = dict(re.findall(r'(\w+)="([^"]*)"', match[2] or ""))
                if labels.items() <= found.items():
                    total += float(match[3])
        return total

    def replica_pids(self) -> list[int]:
        return children_of(self.process.pid)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)


def children_of(pid: int) -> list[int]:
    """Live child processes, oldest first."""
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:2]
            except OSError:
                continue
            if int(parent) == pid and state != "Z":
                pids.append(int(entry.name))
    return sorted(pids)


def is_alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def grammar_workers(pid: int) -> list[int]:
    """Live processes that compile grammars for this one."""
    pids = [child for child in children_of(pid) if is_alive(child)]
    return [child for child in pids if b"grammar_worker" in Path(f"/proc/{child}/cmdline").read_bytes()]


def wait_until(condition: Callable[[], bool], timeout_s: float = 10, what: str = "condition") -> float:
    """Return how long it took; fail the test if it takes too long."""
    started_s = time.monotonic()
    while not condition():
        assert time.monotonic() - started_s < timeout_s, f"{what} did not come true in {timeout_s} s"
        time.sleep(0.02)
    return time.monotonic() - started_s


@contextmanager
def start_process(*command: str) -> Iterator[LiveServer]:
    """Run a server's command until the block ends; it has to print a line with its address."""
    environment = {**os.environ, "PYTHONWARNINGS": "error"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    replicas: list[int] = []
    try:
        assert process.stdout is not None
        match = None
        while match is None:
            line = process.stdout.readline()
            assert line, f"the server ended with {process.wait(10)} before it was ready"
            match = re.search(r"http://\S+:\d+", line)
        server = LiveServer(process, match[0])
        replicas = server.replica_pids()
        yield server
    finally:
        replicas += children_of(process.pid)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        assert process.stdout is not None
        process.stdout.close()
        wait_until(lambda: not any(map(is_alive, replicas)), what="all replicas gone")


def start_fake_server(folder: Path, *flags: str) -> Any:
    return start_process(sys.executable, str(HERE / "fake_server.py"), str(folder), *flags)
