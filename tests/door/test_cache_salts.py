"""A backend that takes cache salts is told one per tenant; it says nothing of whose it is, and nothing else changes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.door.front_door import FrontDoor, front_door, run
from tests.door.http_client import CHAT, Answer, ask, chat
from tests.door.mock_backends import MockBackend, all_do

from expediter.gateway.salts import SALT_VARIABLE
from expediter.gateway.tenants import hash_of

TENANTS = {"alice": "sk-exp-alice", "bob": "sk-exp-bob"}
SECRET = "a secret of the operator's, for all gateways before these engines"


@contextmanager
def salted_door(mocks: list[MockBackend]) -> Iterator[FrontDoor]:
    """The first backend takes salts, the second does not."""
    who = "".join(f'[tenants.{name}]\nkey_hashes = ["{hash_of(key)}"]\n' for name, key in TENANTS.items())
    tables = "".join(
        f'[[backends]]\nurl = "{mock.url}"\nsend_cache_salt = {str(number == 0).lower()}\n'
        for number, mock in enumerate(mocks[:2])
    )
    with front_door([], config=f"{tables}{who}[anonymous]\n") as door:
        yield door


async def ask_as(door: FrontDoor, tenant: str, body: bytes, path: str = CHAT) -> Answer:
    return await ask(door.port, body, path, {"x-api-key": TENANTS[tenant]} if tenant else {})


def bodies_at(mock: MockBackend) -> list[bytes]:
    bodies = [arrival.body for arrival in mock.work]
    mock.arrivals.clear()
    return bodies


def salts(door: FrontDoor, mock: MockBackend, requests: list[tuple[str, dict[str, Any]]]) -> list[str | None]:
    """Return the salt that came with each."""

    async def story() -> list[str | None]:
        found: list[str | None] = []
        for tenant, fields in requests:
            answer = await ask_as(door, tenant, chat("the same prompt " * 100, **fields))
            assert answer.is_good
            (body,) = bodies_at(mock)
            found.append(json.loads(body).get("cache_salt"))
        return found

    return run(story())


def test_each_tenant_has_salts_of_its_own(mocks: list[MockBackend], monkeypatch: pytest.MonkeyPatch) -> None:
    mocks[1].kill()
    requests: list[tuple[str, dict[str, Any]]] = [
        *(("alice", {}), ("bob", {}), ("alice", {})),
        *(("alice", {"cache_salt": "x"}), ("bob", {"cache_salt": "x"}), ("", {"cache_salt": "x"}), ("", {})),
    ]
    found = []
    for secret in (SECRET, SECRET, "", ""):
        monkeypatch.setenv(SALT_VARIABLE, secret)
        with front_door_of_one(mocks) as door:
            found.append(salts(door, mocks[0], requests))
    for alice, bob, again, alice_x, bob_x, nobody_x, nobody in found:
        assert alice == again
        told = [alice, bob, alice_x, bob_x, nobody_x]
        assert len(set(told)) == 5
        assert nobody is None, "there is nobody to be kept apart"
        for salt in told:
            assert salt is not None
            assert 32 <= len(salt) <= 256
            assert not any(word in salt.lower() for word in ("alice", "bob", "sk-exp"))
    assert found[0] == found[1], "the same secret, the same salts"
    assert not set(found[2]) & set(found[3]) - {None}, "without one they are others after each start"


@contextmanager
def front_door_of_one(mocks: list[MockBackend]) -> Iterator[FrontDoor]:
    who = "".join(f'[tenants.{name}]\nkey_hashes = ["{hash_of(key)}"]\n' for name, key in TENANTS.items())
    table = f'[[backends]]\nurl = "{mocks[0].url}"\nsend_cache_salt = true\n'
    with front_door([], config=f"{table}{who}[anonymous]\n") as door:
        yield door


def test_the_body_is_otherwise_what_it_was(mocks: list[MockBackend]) -> None:
    """Bytes in front of the salt are the client's own, also what no encoder would write so; other paths have none."""
    odd = b' {"model" : "mock", "messages": [{"role":"user","content":"\\u00e9 \xc3\xa9"}], "x": 1.0e0, "x": [ ] } \r\n'
    with front_door_of_one(mocks) as door:

        async def story() -> None:
            assert (await ask_as(door, "alice", odd)).is_good
            (body,) = bodies_at(mocks[0])
            client_part, _, salt = body.rpartition(b',"cache_salt":')
            assert client_part == odd.strip()[:-1].rstrip()
            assert salt.startswith(b'"')
            assert salt.endswith(b'"}')
            for path in ("/v1/embeddings", "/tokenize", "/v1/messages"):
                assert (await ask_as(door, "alice", odd, path)).is_good
                assert bodies_at(mocks[0]) == [odd]

        run(story())


def test_who_does_not_take_it_is_not_sent_it(mocks: list[MockBackend]) -> None:
    """Another attempt elsewhere has the body, and its length, that go there."""
    with salted_door(mocks) as door:

        async def story() -> None:
            mocks[0].behaviour.status = 500
            for number in range(8):
                assert (await ask_as(door, "alice", chat(f"{number}"))).is_good
            failed, served = bodies_at(mocks[0]), bodies_at(mocks[1])
            assert failed
            assert all(b"cache_salt" in body for body in failed)
            assert len(served) == 8
            assert not any(b"cache_salt" in body for body in served)
            all_do(mocks)

        run(story())


def test_predicted_hits_are_those_of_the_same_salt(mocks: list[MockBackend]) -> None:
    """What the engine keeps apart, the door keeps apart: no hit is expected from another tenant's prompt."""
    with front_door_of_one(mocks) as door:

        async def story() -> None:
            def known() -> int:
                return int(next(iter(door.backends().values()))["num_known_tokens"])

            prompt, seen = chat("a prompt of many blocks " * 400), [known()]
            for tenant in ("alice", "alice", "bob", "bob"):
                assert (await ask_as(door, tenant, prompt)).is_good
                seen.append(await asyncio.to_thread(known))
            assert seen[0] == 0
            assert seen[1] == seen[2] > 0
            assert seen[3] == seen[4] == 2 * seen[1]

        run(story())
