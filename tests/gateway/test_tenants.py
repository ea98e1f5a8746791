"""Who may come in: keys, what a tenant's requests may ask for, and a file that changes under a running server."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from live_server import LiveServer, Reply, start_fake_server, start_process, wait_until

from expediter.assembly.file_config import load_file_config
from expediter.cli.main import main
from expediter.control.limits import Limits
from expediter.core.errors import ConfigurationError
from expediter.core.slo import SloClass
from expediter.gateway.reload import FileReload
from expediter.gateway.tenants import KEY_PREFIX, Tenant, TenantBook, TenantConfig, Tenants, hash_of, new_key

ALICE = TenantConfig(key_hashes=(hash_of("key-a"),), weight=2.0, limits=Limits(max_requests_per_minute=5))
BOB = TenantConfig(key_env=("BOB_KEY", "BOB_KEY_2"))
ENVIRONMENT = {"BOB_KEY": "key-b", "BOB_KEY_2": "key-c"}


def book(**more: object) -> TenantBook:
    return TenantBook({"alice": ALICE, "bob": BOB}, environment=ENVIRONMENT, **more)  # type: ignore[arg-type]


def name_of(tenants: Tenants, authorization: bytes | None, x_api_key: bytes | None = None) -> str | None:
    found = tenants.of(authorization, x_api_key)
    return None if found is None else found.name


# -- keys ------------------------------------------------------------------------------------------------------------


def test_a_key_says_whose_request_it_is() -> None:
    tenants = Tenants(book())
    assert name_of(tenants, b"Bearer key-a") == name_of(tenants, b"bearer  key-a ") == "alice"
    assert name_of(tenants, b"Bearer key-b") == name_of(tenants, b"Bearer key-c") == "bob"
    assert name_of(tenants, None, b"key-c") == "bob"
    assert name_of(tenants, b"Bearer key-b", b"key-c") == "bob"
    for nobody in (b"", b"Bearer", b"Bearer ", b"key-a", b"Basic key-a", b"Bearer KEY-A", b"Bearer \xff\xfe"):
        assert name_of(tenants, nobody) is None
    assert name_of(tenants, b"Bearer key-a", b"key-b") is None
    assert name_of(tenants, None) is None
    assert name_of(tenants, None, b"") is None


def test_without_keys_everybody_is_the_anonymous_tenant() -> None:
    tenants = Tenants(TenantBook())
    assert not tenants.book.has_keys
    for given in (None, b"Bearer EMPTY", b"Bearer sk-anything", b"Basic x", b""):  # clients cannot do without one
        assert name_of(tenants, given) == name_of(tenants, given, b"dummy") == ""


def test_an_anonymous_tenant_beside_others() -> None:
    tenants = Tenants(book(anonymous=TenantConfig(limits=Limits(max_concurrent_requests=1))))
    assert name_of(tenants, None) == ""
    assert name_of(tenants, b"Bearer key-a") == "alice"
    assert name_of(tenants, b"Bearer wrong") is None  # its owner would take these limits for its own
    assert name_of(tenants, None, b"wrong") is None
    assert tenants.limits[""] == Limits(max_concurrent_requests=1)
    assert tenants.weights == {"alice": 2.0, "bob": 1.0, "": 1.0}


def test_keys_of_the_flag_are_the_default_tenants() -> None:
    tenants = Tenants(book(keys=["flag"]))
    assert name_of(tenants, b"Bearer flag") == "default"
    described = TenantBook({"default": ALICE}, keys=["flag"])
    for key in (b"flag", b"key-a"):
        found = described.of_key(key)
        assert found is not None
        assert found.limits == ALICE.limits


def test_a_new_key_is_random_and_its_hash_is_that_of_sha256sum() -> None:
    assert new_key() != new_key()
    assert new_key().startswith(KEY_PREFIX)
    assert len(new_key()) > 40
    assert hash_of("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_the_command_prints_a_key_and_its_hash(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key"]) == 0
    key, hashed = (line.split()[1] for line in capsys.readouterr().out.splitlines())
    assert TenantBook({"a": TenantConfig(key_hashes=(hashed,))}).of_key(key.encode()) is not None


@pytest.mark.parametrize(
    ("tenants", "message"),
    [
        ({"a": TenantConfig()}, "tenant 'a' has no key"),
        ({"a": TenantConfig(key_hashes=("xyz",))}, "tenant 'a': key_hashes number 1"),
        ({"a": TenantConfig(key_hashes=(hash_of("k"), hash_of("k").upper()))}, "key_hashes number 2"),
        ({"a": TenantConfig(key_env=("NONE",))}, "tenant 'a': the environment variable NONE"),
        ({"a": ALICE, "b": ALICE}, "tenant 'a' and tenant 'b' have the same API key"),
        ({"a": TenantConfig(key_hashes=(hash_of("k"),), slo_class="gold")}, "no SLO class 'gold'"),
        ({"a": TenantConfig(key_hashes=(hash_of("k"),), weight=0.0)}, "weight"),
        ({"a": TenantConfig(key_hashes=(hash_of("k"),), weight=float("nan"))}, "weight"),
    ],
)
def test_what_a_book_cannot_hold(tenants: dict[str, TenantConfig], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        TenantBook(tenants)
    assert hash_of("k") not in str(caught.value)


# -- what a tenant may ask for ---------------------------------------------------------------------------------------


def test_nobody_gets_ahead_of_its_tenants_priority() -> None:
    tenant = Tenant(name="a", priority=2)
    assert [tenant.priority_of(asked) for asked in (None, -5, 2, 7)] == [2, 2, 2, 7]
    assert [Tenant(name="a").priority_of(asked) for asked in (None, -5, 7)] == [0, -5, 7]


def test_no_two_tenants_share_a_salt() -> None:
    names = ("", "a", "b", "a.b")
    asked = (None, "x", "a/", "/", "b/x", "/x")
    salts = {(name, salt): Tenant(name=name).cache_salt(salt) for name in names for salt in asked}
    assert len(set(salts.values())) == len(salts)


def test_models_of_a_tenant() -> None:
    assert Tenant().may_use("anything")
    limited = Tenant(models=frozenset({"small"}))
    assert limited.may_use("small")
    assert not limited.may_use("large")


def test_a_class_is_known_to_every_tenant() -> None:
    classes = {"fast": SloClass(ttft_s=1.0)}
    made = TenantBook({"a": TenantConfig(key_hashes=(hash_of("k"),), slo_class="fast")}, slo_classes=classes)
    assert made.tenants["a"].slo_classes == classes


# -- a running server ------------------------------------------------------------------------------------------------


def text(**tenants: str) -> str:
    """Return a file with these tenants, by name, and lines of each."""
    return "\n".join(f"[tenants.{name}]\n{lines}" for name, lines in tenants.items())


def key_line(key: str) -> str:
    return f'key_hashes = ["{hash_of(key)}"]'


def as_(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.toml"
    path.write_text(text(alice=key_line("key-a"), bob=key_line("key-b") + '\nmodels = ["also-fake"]'))
    return path


@pytest.fixture
def live(model_folder: Path, file: Path) -> Iterator[LiveServer]:
    with start_fake_server(model_folder, "--config", str(file), "--num-blocks", "128") as server:
        server.metrics_headers = as_("key-a")
        yield server


def test_a_file_that_cannot_be_used_changes_nothing_and_is_told(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    tenants = Tenants(load_file_config(file).tenant_book((), {}))

    def put(book: TenantBook) -> list[str]:
        tenants.book = book
        return []

    reload = FileReload(file, lambda: load_file_config(file).tenant_book((), {}), put)
    before = tenants.book

    def after(content: str) -> str | None:
        file.write_text(content)
        return asyncio.run(reload.reload()).error

    for wrong in (
        "[tenants.alice",
        text(alice="weight = 0\n" + key_line("key-a")),
        text(alice="key_hashes = []"),
        "x = 1",
    ):
        caplog.clear()
        error = after(wrong)
        assert error is not None
        assert error in caplog.text
        assert tenants.book is before
    assert after(text(carol=key_line("key-c"))) is None
    assert list(tenants.book.tenants) == ["carol"]


def status(server: LiveServer, key: str) -> int:
    return server.get("/v1/models", headers=as_(key)).status


def test_the_file_changes_under_a_running_server(live: LiveServer, file: Path) -> None:
    assert (status(live, "key-a"), status(live, "key-c")) == (200, 401)

    file.write_text(text(carol=key_line("key-c")))  # noticed on its own
    wait_until(lambda: status(live, "key-c") == 200, what="a new tenant is known")
    assert status(live, "key-a") == 401

    file.write_text("[tenants.carol]\nkey_hashes = [")  # half written: the old one stays
    live.process.send_signal(signal.SIGHUP)
    other = file.with_suffix(".new")
    other.write_text(text(carol=key_line("key-c"), dave=key_line("key-d")))
    assert status(live, "key-c") == 200
    os.replace(other, file)  # as careful editors and mounted secrets do it
    live.process.send_signal(signal.SIGHUP)
    wait_until(lambda: status(live, "key-d") == 200, what="the next good file is in force")
    assert status(live, "key-c") == 200

    file.unlink()
    live.process.send_signal(signal.SIGHUP)
    assert status(live, "key-d") == 200


def test_the_file_changes_under_several_processes(file: Path) -> None:
    """All of them read it again, and one that is started again knows what the others know."""
    flags = (
        "serve",
        "--backend",
        "http://127.0.0.1:9",
        "--gateway-processes",
        "2",
        "--port",
        "0",
        "--config",
        str(file),
    )
    with start_process(sys.executable, "-m", "expediter.cli.main", *flags) as server:
        pids = server.replica_pids()
        assert len(pids) == 2

        def all_say(key: str, expected: int) -> bool:
            return {status(server, key) for _ in range(20)} == {expected}  # the kernel deals connections at random

        assert all_say("key-a", 200)
        file.write_text(text(carol=key_line("key-c")))
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: all_say("key-a", 401) and all_say("key-c", 200), what="all know it")
        file.write_text("[tenants")
        os.kill(pids[0], signal.SIGKILL)
        wait_until(lambda: len(set(server.replica_pids()) - set(pids)) == 1, what="another takes its place")
        for _ in range(10):
            assert all_say("key-a", 401)
        wait_until(lambda: all_say("key-c", 200), what="the new one answers")
        assert server.stop() == 0


def test_a_server_does_not_start_with_a_file_that_is_wrong(model_folder: Path, file: Path) -> None:
    file.write_text("[tenants.alice]")
    with pytest.raises(ConfigurationError, match="tenant 'alice' has no key"):
        load_file_config(file).tenant_book((), {})


def test_one_tenants_cache_is_closed_to_another(live: LiveServer) -> None:
    """SECURITY.md: the prefix cache is rooted in the tenant; usage does not tell of others' hits."""
    prompt = "a secret that is long enough to fill a few blocks of the cache " * 3

    def cached(key: str, **fields: object) -> int:
        reply = live.complete(prompt, headers=as_(key), max_tokens=1, model="also-fake", **fields)
        assert reply.status == 200, reply.body
        details = reply.json["usage"]["prompt_tokens_details"]
        return 0 if details is None else int(details["cached_tokens"])

    assert cached("key-a") == 0
    assert cached("key-a") > 100
    assert cached("key-b") == 0
    assert cached("key-b") > 100
    assert cached("key-b", cache_salt="alice/") == 0
    assert cached("key-a", cache_salt="mine") == 0
    assert cached("key-a") > 100


def test_one_tenant_cannot_flush_anothers_cache(live: LiveServer) -> None:
    """SECURITY.md: prompts of several times the pool, that come twice, evict nothing that another uses."""
    prompt = "a prefix that its owner wants to find again " * 2

    def send(key: str, text: str) -> int:
        reply = live.complete(text, headers=as_(key), max_tokens=1, model="also-fake")
        details = reply.json["usage"]["prompt_tokens_details"]
        return 0 if details is None else int(details["cached_tokens"])

    send("key-a", prompt)
    for number in range(12):
        for _ in range(2):
            send("key-b", f"{number:02}" * 200)  # 25 blocks of the pool's 128 each
    assert send("key-b", "00" * 200) == 0, "the flood was no larger than the pool"
    assert send("key-a", prompt) > 60


def test_models_are_listed_for_who_may_use_them(live: LiveServer) -> None:
    def listed(key: str) -> list[str]:
        return [entry["id"] for entry in live.get("/v1/models", headers=as_(key)).json["data"]]

    assert listed("key-a") == ["fake", "also-fake"]
    assert listed("key-b") == ["also-fake"]
    for path in ("/v1/models/fake", "/v1/models/none"):
        assert live.get(path, headers=as_("key-b")).status == 404
    for model in ("fake", "none"):
        reply = live.complete("hi", headers=as_("key-b"), model=model)
        assert (reply.status, reply.json["error"]["code"]) == (404, "model_not_found")
        assert "also-fake" in reply.json["error"]["message"]
        assert ", fake" not in reply.json["error"]["message"]
    assert live.complete("hi", headers=as_("key-b"), model="also-fake").status == 200
    assert live.complete("hi", headers=as_("key-b")).status == 200  # the first that it may use


# -- limits and the queue in front of our own replicas -----------------------------------------------------------------

CROWDED = """
[tenants.one]
{one}
max_concurrent_requests = 1
[tenants.two]
{two}
max_tokens_per_minute = 1000
[tenants.flood]
{flood}
[tenants.calm]
{calm}
[queue]
max_requests = 4
"""


@pytest.fixture(scope="module")
def crowded(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """One sequence at a time, 20 ms a token: 64 requests fit into the replica, and 4 more before it."""
    path = tmp_path_factory.mktemp("config") / "tenants.toml"
    path.write_text(CROWDED.format(**{name: key_line(f"key-{name}") for name in ("one", "two", "flood", "calm")}))
    flags = ("--model", "toy", "--step-s", "0.02", "--max-num-seqs", "1", "--num-blocks", "1024")
    with start_fake_server(model_folder, *flags, "--config", str(path)) as server:
        server.metrics_headers = as_("key-calm")
        yield server


HELD: Counter[int] = Counter()
"""Requests that `held` has open, by the server's port."""


@contextmanager
def held(
    server: LiveServer, key: str, count: int, *, for_another: bool = False, **fields: object
) -> Iterator[list[http.client.HTTPConnection]]:
    """Have so many requests open that end with their connections; the server has read each before the next is sent.

    With `for_another` each takes another's place, so that their number does not tell whether it is in.
    """
    body = json.dumps({"prompt": "hold", "max_tokens": 2000, "ignore_eos": True, **fields})
    connections: list[http.client.HTTPConnection] = []
    before = HELD[server.port]
    wait_until(lambda: in_flight(server) == before, what="who has been answered is out")
    HELD[server.port] += 0 if for_another else count
    try:
        for _ in range(count):
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
            connection.request("POST", "/v1/completions", body, {**as_(key), "Content-Type": "application/json"})
            connections.append(connection)
            if not for_another:
                wait_until(lambda: in_flight(server) == before + len(connections), what="it is in")
        yield connections
    finally:
        for connection in connections:
            connection.close()
        HELD[server.port] = before
        wait_until(lambda: in_flight(server) <= before, what="all have left")


def in_flight(server: LiveServer) -> float:
    return server.metric("expediter:gateway_requests_in_flight")


def error_of(reply: Reply) -> tuple[int, str, str]:
    error = reply.json["error"]
    return reply.status, error["type"], error["code"]


def test_a_place_is_free_when_its_request_has_gone(crowded: LiveServer) -> None:
    """Case 39 (litellm #27955), for our own replicas: streams and others, left before their end."""
    for stream in (True, False):
        with held(crowded, "key-one", 1, stream=stream):
            refused = crowded.complete("hi", headers=as_("key-one"))
            assert error_of(refused) == (429, "concurrency", "rate_limit_exceeded")
            assert int(refused.headers["retry-after"]) >= 1
        assert crowded.complete("hi", headers=as_("key-one"), max_tokens=1).status == 200


def refusals_of(server: LiveServer, tenant: str) -> int:
    """Return how often a tenant met a limit; what it is shown of the metrics is its own."""
    lines = server.get("/metrics", headers=as_(f"key-{tenant}")).body.decode().splitlines()
    found = [line for line in lines if line.startswith("expediter:gateway_requests_total{") and "over_limit" in line]
    return sum(int(float(line.rsplit(" ", 1)[1])) for line in found if f'tenant="{tenant}"' in line)


@pytest.mark.parametrize("length", ["Content-Length: 9000000", "Transfer-Encoding: chunked"])
def test_a_large_body_of_who_is_over_its_limit_is_not_read(crowded: LiveServer, length: str) -> None:
    """Case 41: a refusal is cheap; the head is enough for it."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key-one\r\n{length}\r\n\r\n"
    with held(crowded, "key-one", 1):
        before = refusals_of(crowded, "one")
        with socket.create_connection(("127.0.0.1", crowded.port), timeout=10) as connection:
            connection.sendall(head.encode())
            answer = connection.recv(65536)
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert b"retry-after: " in answer.lower()
        assert refusals_of(crowded, "one") == before + 1


def test_tokens_are_reserved_and_what_was_not_used_comes_back(crowded: LiveServer) -> None:
    """Case 40 (litellm #18730), for our own replicas, whose usage is exact."""
    with held(crowded, "key-two", 1, max_tokens=900):
        refused = crowded.complete("hi", headers=as_("key-two"), max_tokens=500)
        assert error_of(refused) == (429, "tokens", "rate_limit_exceeded")
        assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert crowded.complete("hi", headers=as_("key-two"), max_tokens=1).status == 200
    never = crowded.complete("hi", headers=as_("key-two"), max_tokens=1100)
    assert error_of(never) == (429, "tokens", "rate_limit_exceeded")
    assert "retry-after" not in never.headers
    assert "max_tokens" in never.json["error"]["message"]


def test_a_flood_is_turned_away_and_keeps_nobody_else_out(crowded: LiveServer) -> None:
    """Case 41 (vllm #18826), for our own replicas: a bounded queue, and an answer that says when to come back."""
    with held(crowded, "key-flood", 68) as flood:
        for _ in range(3):
            refused = crowded.complete("hi", headers=as_("key-flood"))
            assert error_of(refused) == (503, "service_unavailable", "queue_full")
            assert int(refused.headers["retry-after"]) >= 1
        with held(crowded, "key-calm", 1, for_another=True):
            pushed_out = flood[-1].getresponse()  # the newest of the flood makes room
            assert pushed_out.status == 503
            assert int(pushed_out.headers["Retry-After"]) >= 1
            assert in_flight(crowded) == 68


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_ahead", [2, 66])
def test_who_waits_past_its_deadline_is_never_computed(crowded: LiveServer, num_ahead: int, stream: bool) -> None:
    """Wherever it waits: in the replica's queue, or in the one before it."""

    def computed() -> float:
        return crowded.metric("expediter:tenant_prompt_tokens_total", tenant="calm")

    with held(crowded, "key-flood", num_ahead):
        before = computed()
        headers = {**as_("key-calm"), "X-Deadline-Ms": "300"}
        reply = crowded.complete("hi", headers=headers, stream=stream)
        assert error_of(reply) == (504, "timeout", "deadline_exceeded")
        assert computed() == before
    wait_until(lambda: crowded.metric("expediter:gateway_requests_total", tenant="calm", outcome="expired") > 0)
    reply = crowded.complete("hi", headers={**as_("key-calm"), "X-Deadline-Ms": "30000"}, stream=stream, max_tokens=1)
    assert reply.status == 200, "a deadline that is kept changes nothing"


def test_who_would_rather_be_refused_is_told_before_it_is_late(crowded: LiveServer) -> None:
    with held(crowded, "key-flood", 66):
        reply = crowded.complete("hi", headers=as_("key-calm"), refuse_late=True, ttft_ms=300)
        assert error_of(reply) == (503, "service_unavailable", "late")
        assert int(reply.headers["retry-after"]) >= 1
