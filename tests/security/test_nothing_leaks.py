"""What is secret stays out of logs, metrics and errors, whatever goes wrong (SECURITY: the last line)."""

from __future__ import annotations

import asyncio
import json
import re
from hashlib import sha256

import pytest
from tests.door.front_door import FrontDoor, front_door, run
from tests.door.http_client import CHAT, Answer, Connection, ask, chat
from tests.door.mock_backends import Behaviour, MockBackend, mock_backends

KEY, BACKEND_KEY, PROMPT = "sk-seeecret-key", "sk-seeecret-backend", "the seeecret prompt of a client"
SECRET = b"seeecret"
DETAILS = re.compile(
    rb"Traceback|\.py\b|site-packages|0x[0-9a-f]{6}|<class|object at|/(usr|home|root|tmp|opt)/|errno", re.I
)


def locked(mocks: list[MockBackend]) -> str:
    """Return a configuration with a key that clients need, and one that the backends need."""
    hashed = sha256(KEY.encode()).hexdigest()
    text = f'[tenants.alice]\nkey_hashes = ["{hashed}"]\nmax_tokens_per_minute = 4000\n'
    return text + "".join(f'[[backends]]\nurl = "{mock.url}"\napi_key_env = "BACKEND_KEY"\n' for mock in mocks)


async def trouble(door: FrontDoor, mocks: list[MockBackend]) -> list[Answer]:
    """Let everything go wrong that can, with a secret in each request; return what clients were told."""
    key = {"authorization": f"Bearer {KEY}"}
    behaviours = [
        *[Behaviour(), Behaviour(status=500), Behaviour(status=400), Behaviour(reset="before_head")],
        *[Behaviour(reset="mid_stream"), Behaviour(raw=b"HTTP/1.1 banana\r\n\r\n" + PROMPT.encode())],
        *[Behaviour(raw=b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz" + PROMPT.encode() + b"\r\n")],
    ]
    answers = []
    for behaviour in behaviours:
        for mock in mocks:
            mock.behaviour = behaviour
        answers += [await ask(door.port, chat(PROMPT, stream=stream), headers=key) for stream in (False, True)]
    for mock in mocks:
        mock.behaviour = Behaviour()
    bad = [
        *[chat(PROMPT)[:-2], b"\xff" + PROMPT.encode(), json.dumps({"model": PROMPT, "messages": []}).encode()],
        *[json.dumps({"model": "mock", "messages": PROMPT, "stream": PROMPT}).encode(), chat(PROMPT, max_tokens=10**9)],
    ]
    answers += [await ask(door.port, body, headers=key) for body in bad]
    answers.append(await ask(door.port, chat(PROMPT), headers={"authorization": f"Bearer {KEY}-wrong"}))
    answers.append(await ask(door.port, chat(PROMPT), path="/v1/" + PROMPT.replace(" ", "%20"), headers=key))
    raw = await Connection.open(door.port)
    raw.writer.write(f"POST {CHAT} HTTP/1.1\r\n{PROMPT}\r\nauthorization: {KEY}\r\n\r\n".encode())
    answers.append(await raw.receive(Answer(0)))
    raw.leave()
    return answers


@pytest.fixture
def night(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Answer], dict[str, bytes], bytes]:
    """Return what clients were told, what the door shows of itself, and what it logged, after all that."""
    monkeypatch.setenv("BACKEND_KEY", BACKEND_KEY)
    with mock_backends(2) as mocks, front_door([], config=locked(mocks)) as door:
        answers = run(trouble(door, mocks))
        run(asyncio.sleep(0.3))  # lines of log may be written behind the answers
        headers = {"authorization": f"Bearer {KEY}"}
        shown = {
            path: door.get(path, headers).body for path in ("/metrics", "/dashboard/feed", "/v1/models", "/version")
        }
        shown["admin"] = json.dumps(door.admin("GET", "/backends")).encode()
        assert any(arrival.headers.get("authorization") == f"Bearer {BACKEND_KEY}" for arrival in mocks[0].work)
    said = capfd.readouterr()
    return answers, shown, (said.out + said.err).encode()


def test_keys_and_prompts_stay_out_of_logs_metrics_and_pages(
    night: tuple[list[Answer], dict[str, bytes], bytes],
) -> None:
    _, shown, log = night
    assert log, "something is logged, or this test sees nothing"
    for line in log.splitlines():
        assert SECRET not in line
    for path, body in shown.items():
        assert SECRET not in body, path


def test_errors_carry_fixed_messages(night: tuple[list[Answer], dict[str, bytes], bytes]) -> None:
    """No paths, no reprs, nothing of what the client or the backend sent."""
    answers, _, _ = night
    errors = [answer for answer in answers if answer.status >= 400]
    assert len({answer.status for answer in errors}) >= 4
    for answer in errors:
        if answer.json["error"]["message"] == "as told":  # the backend's own words are passed on
            continue
        assert not DETAILS.search(answer.body), answer.body
        assert SECRET not in answer.body, answer.body
        assert set(answer.json["error"]) == {"message", "type", "param", "code"}
