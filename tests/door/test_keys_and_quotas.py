"""Keys, their limits, and a full house, at the door (CASES 39, 40, 41, 51)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from hashlib import sha256

from tests.door.front_door import front_door, run, until
from tests.door.http_client import CHAT, Answer, Connection, ask, ask_all, chat
from tests.door.mock_backends import MockBackend, all_do

ALICE = {"authorization": "Bearer sk-alice"}
BOB = {"authorization": "Bearer sk-bob"}
STREAM = {"num_chunks": 2000, "gap_s": 0.02}


def num_working(mocks: Sequence[MockBackend]) -> int:
    return sum(mock.num_in_flight for mock in mocks)


def two_keys(mocks: Sequence[MockBackend], alice: str = "", *, max_requests: int | None = None, more: str = "") -> str:
    """Return a configuration with two keys; `alice` are lines of her table, `max_requests` what each backend takes."""
    text = more + "\n"
    for name, lines in (("alice", alice), ("bob", "")):
        hashed = sha256(f"sk-{name}".encode()).hexdigest()
        text += f'[tenants.{name}]\nkey_hashes = ["{hashed}"]\n{lines}\n'
    for mock in mocks:
        text += f'[[backends]]\nurl = "{mock.url}"\n'
        text += "" if max_requests is None else f"max_requests = {max_requests}\n"
    return text


def test_a_slot_of_a_key_comes_back_when_its_stream_is_left(mocks: list[MockBackend]) -> None:
    """Case 39 (litellm #27955): a key that may have one request at a time leaves a stream; its next one is served."""
    with front_door([], config=two_keys(mocks, "max_concurrent_requests = 1")) as door:

        async def story() -> None:
            all_do(mocks, **STREAM)
            for _ in range(5):
                connection = await Connection.open(door.port)
                connection.send("POST", CHAT, chat(stream=True), ALICE)
                await connection.reader.readuntil(b"data: ")
                refused = await ask(door.port, chat(), headers=ALICE)
                assert refused.status == 429
                assert refused.json["error"]["code"]
                assert int(refused.headers["retry-after"]) >= 1
                connection.leave()
                await until(lambda: num_working(mocks) == 0, 2, "the backend sees it")
            all_do(mocks)
            for _ in range(5):
                assert (await ask(door.port, chat(), headers=ALICE)).is_good

        run(story())


def test_tokens_are_reserved_before_and_settled_after(mocks: list[MockBackend]) -> None:
    """Case 40 (litellm #18730): five at once whose sum is over the limit; what is not used is given back."""
    with front_door([], config=two_keys(mocks, "max_tokens_per_minute = 2500")) as door:

        async def story() -> None:
            all_do(mocks, prefill_s=0.5)
            body = chat("t" * 100, max_tokens=900)
            answers = await asyncio.gather(*(ask(door.port, body, headers=ALICE) for _ in range(5)))
            assert sorted(answer.status for answer in answers) == [200, 200, 429, 429, 429]
            refused = next(answer for answer in answers if answer.status == 429)
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            assert refused.took_s < 0.4, "refused at once, not after the others"
            others = await asyncio.gather(*(ask(door.port, body, headers=BOB) for _ in range(5)))
            assert all(answer.is_good for answer in others), "another key has its own"
            assert sum(len(mock.work) for mock in mocks) == 2 + 5
            # The backends say what each took: 900 tokens of output, as many as were asked for.
            assert (await ask(door.port, body, headers=ALICE)).status == 429
            small = chat("t", max_tokens=5)
            assert (await ask(door.port, small, headers=ALICE)).is_good

        run(story())


def test_what_a_request_did_not_use_is_there_for_the_next(mocks: list[MockBackend]) -> None:
    """Case 40, settled: streams that are left early, or fail, do not use up what was reserved for them."""
    with front_door([], config=two_keys(mocks, "max_tokens_per_minute = 2500")) as door:

        async def story() -> None:
            for _ in range(6):
                all_do(mocks, status=500)
                assert (await ask(door.port, chat(max_tokens=2000), headers=ALICE)).status >= 500
            all_do(mocks)
            await asyncio.sleep(1.0)  # the backends recover
            started_s = time.monotonic()
            while not (await ask(door.port, chat(max_tokens=2000), headers=ALICE)).is_good:
                assert time.monotonic() - started_s < 6
                await asyncio.sleep(0.1)

        run(story())


def test_a_flood_meets_a_bounded_queue_and_what_is_admitted_is_in_time(
    mocks: list[MockBackend],
) -> None:
    """Case 41 (vllm #18826, TGI #1733): room for 8 at once and 16 waiting; 300 come.

    Those beyond are told so at once, with a Retry-After; whoever is let in waits no longer than the queue is long.
    """
    two = mocks[:2]
    with front_door([], config=two_keys(two, max_requests=4, more="[queue]\nmax_requests = 16\n")) as door:

        async def story() -> None:
            all_do(two, prefill_s=0.2)
            bodies = [chat(f"flood {i}") for i in range(300)]
            answers = await asyncio.gather(*(ask(door.port, body, headers=BOB) for body in bodies))
            good = [answer for answer in answers if answer.is_good]
            refused = [answer for answer in answers if answer.status == 503]
            assert len(good) + len(refused) == 300, {answer.status for answer in answers}
            assert len(good) >= 24
            assert len(refused) >= 200
            assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
            assert max(answer.took_s for answer in good) < 8 * 0.2 + 4
            assert sum(len(mock.work) for mock in two) == len(good), "the others cost no backend anything"
            assert max_at_once(two[0]) <= 4
            assert (await ask(door.port, chat(), headers=BOB)).is_good

        run(story())


def max_at_once(mock: MockBackend) -> int:
    """Return the most requests that a backend had at one time."""
    edges = [(each.at_s, 1) for each in mock.work]
    edges += [(each.ended_s, -1) for each in mock.work if each.ended_s is not None]
    most = now = 0
    for _, change in sorted(edges):
        now += change
        most = max(most, now)
    return most


def test_a_deadline_that_passes_in_the_queue_costs_no_prefill(mocks: list[MockBackend]) -> None:
    one = mocks[:1]
    with front_door([], config=two_keys(one, max_requests=1)) as door:

        async def story() -> None:
            all_do(one, prefill_s=1.5)
            first = asyncio.create_task(ask(door.port, chat("first"), headers=BOB))
            await until(lambda: num_working(one) == 1)
            late = await ask(door.port, chat("late"), headers={**BOB, "x-deadline-ms": "300"})
            assert late.status == 504
            assert late.json["error"]["code"] == "deadline_exceeded"
            assert 0.2 < late.took_s < 1.2
            assert (await first).is_good
            assert not any(b"late" in arrival.body for arrival in one[0].work)

        run(story())


def test_no_route_of_the_door_answers_without_a_key(mocks: list[MockBackend]) -> None:
    """Case 51 (vllm #58144, #10531, PR#42064): whatever the method, the spelling or the path; but for two probes."""
    paths = [
        *("/", "/v1/models", CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/metrics"),
        *("/version", "/steps", "/requests/x", "/dashboard", "/dashboard/feed", "/docs", "/openapi.json", "/nothing"),
        *("//v1/models", "/v1//models", "/%2e/v1/models", "/v1/models/", "/health/../v1/models", "/V1/MODELS"),
        *("/health/", "//health", "/ready/x", "/v1/models?x=/health", "http://door/v1/models", "*", "/backends"),
    ]
    with front_door([], config=two_keys(mocks)) as door:

        async def story() -> None:
            for path in paths:
                for method in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"):
                    connection = await Connection.open(door.port)
                    connection.send(method, path, b"")
                    status = int((await asyncio.wait_for(connection.reader.readline(), 10)).split()[1])
                    assert status in (400, 401, 405), (method, path, status)
                    assert status == 401 or path in ("*", "http://door/v1/models"), (method, path, status)
                    connection.leave()
            for header in ({"authorization": "Bearer wrong"}, {"authorization": "sk-alice"}, {"x-api-key": "wrong"}):
                answer = await ask(door.port, chat(), headers=header)
                assert answer.status == 401
                assert answer.json["error"]["code"] == "invalid_api_key"
            assert num_working(mocks) == 0
            assert not any(mock.work for mock in mocks)
            assert (await ask(door.port, chat(), headers=ALICE)).is_good

        run(story())
        for path in ("/health", "/ready"):
            assert door.get(path).status == 200
        forwarded = next(arrival for mock in mocks for arrival in mock.work)
        assert "sk-alice" not in str(forwarded.headers), "a client's key is none of the backend's business"


def test_a_models_allow_list_holds_at_the_door(mocks: list[MockBackend]) -> None:
    for mock in mocks[:2]:
        mock.models = {"small": 8192}
    with front_door([], config=two_keys(mocks, 'models = ["mock"]')) as door:

        async def story() -> None:
            assert (await ask(door.port, chat(), headers=ALICE)).is_good
            for headers, status in ((ALICE, 404), (BOB, 200)):
                assert (await ask(door.port, chat(model="small"), headers=headers)).status == status
            unknown = await ask(door.port, chat(model="psychic"), headers=BOB)
            assert unknown.status == 404
            assert unknown.json["error"]["code"] == "model_not_found"
            assert "mock" in unknown.json["error"]["message"]
            assert "small" in unknown.json["error"]["message"]
            answers: list[Answer] = await ask_all(door.port, [chat(model="small")] * 20, 4, headers=BOB)
            assert all(answer.is_good for answer in answers)
            assert not any(b"small" in arrival.body for mock in mocks[2:] for arrival in mock.work)

        run(story())
