"""Who may come in: keys, what a tenant's requests may ask for, and a file that changes under a running server."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_server import LiveServer, start_fake_server, wait_until

from expediter.assembly.file_config import load_file_config
from expediter.control.limits import Limits
from expediter.core.errors import ConfigurationError
from expediter.core.slo import SloClass
from expediter.gateway.reload import TenantReload
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
    assert not tenants.needs_key
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


def test_listeners_hear_of_another_book() -> None:
    tenants = Tenants(TenantBook())
    heard: list[TenantBook] = []
    tenants.on_change(heard.append)
    other = book()
    tenants.replace(other)
    assert heard == [other]
    assert tenants.needs_key


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
    reload = TenantReload(file, lambda: load_file_config(file).tenant_book((), {}), tenants)
    before = tenants.book

    def after(content: str) -> str | None:
        file.write_text(content)
        asyncio.run(reload.reload())
        return reload.error

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
