"""The admin API: backends come and go, keys are read again, and nobody gets in who should not."""

import pytest
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient
from test_backends import Door

from expediter.core.errors import ConfigurationError
from expediter.gateway.admin import build_admin, check_admin_address
from expediter.gateway.reload import Reloaded
from expediter.telemetry.exchanges import Outcome

BASE = "http://127.0.0.1:9000"


def client(door, **fields):
    return TestClient(build_admin(door.backends, **fields), base_url=BASE)


def test_backends_are_listed_added_drained_and_removed():
    door = Door(1)
    admin = client(door)
    row = admin.get("/backends").json()["backends"][0]
    assert (row["name"], row["state"], row["models"]) == ("b0", "up", ["m"])
    added = admin.post("/backends", json={"url": "http://other:1/base", "models": ["n"], "api_key_env": "KEY"})
    assert (added.status_code, added.json()) == (201, {"name": "other:1/base"})
    dispatch = door.send(model="n")
    assert admin.post("/backends/other:1/base/drain", json={}).json()["num_in_flight"] == 1
    assert door.backends.named("other:1/base").is_draining
    assert admin.delete("/backends/other:1/base").json()["num_in_flight"] == 1
    assert door.backends.models == ["m"]
    dispatch.ended(Outcome.OK, 0.0)
    assert admin.delete("/backends/other:1/base").status_code == 404
    assert "secret" not in admin.get("/backends").text


@pytest.mark.parametrize(
    ("body", "status", "what"),
    [
        ({"url": "nonsense"}, 400, "http://"),
        ({"url": "http://x", "max_requests": 0}, 400, "max_requests"),
        ({"url": "http://x", "other": 1}, 400, "other"),
        ({}, 400, "url"),
        ({"url": "http://b0:80", "name": "b0"}, 409, "already"),
        ({"url": "http://x", "api_key_env": "NOT_SET"}, 409, "NOT_SET"),
        ({"url": "http://x/" + "x" * 70_000}, 413, "longer"),
    ],
)
def test_what_cannot_be_added_is_explained(body, status, what):
    answer = client(Door(1)).post("/backends", json=body)
    assert answer.status_code == status
    assert what in answer.json()["error"]["message"]


def test_our_own_pool_is_not_for_removal():
    door = Door(0)
    door.backends.add_own("own", ["m"], lambda: True)
    assert client(door).delete("/backends/own").status_code == 404


def test_the_file_is_read_again():
    came = [Reloaded(after_restart=["[routing]"]), Reloaded("line 3")]

    async def reload():
        return came.pop(0)

    admin = client(Door(0), reload=reload)
    assert admin.post("/reload", json={}).json() == {"reloaded": True, "after_restart": ["[routing]"]}
    assert "line 3" in admin.post("/reload", json={}).json()["error"]["message"]
    assert client(Door(0)).post("/reload", json={}).status_code == 409


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/backends"), ("POST", "/backends"), ("DELETE", "/backends/b0"), ("POST", "/reload"), ("GET", "/no")],
)
def test_with_a_key_everything_needs_it(method, path):
    admin = client(Door(1), key="the key")
    for header in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "the key"},
        {"Authorization": "Basic the key"},
    ):
        assert admin.request(method, path, headers=header, json={}).status_code == 401
    given = {"Authorization": "Bearer the key"}
    assert admin.request(method, path, headers=given, json={}).status_code != 401


def test_without_a_key_only_loopback_names_will_do():
    admin = client(Door(1))
    for host in ("evil.example", "127.0.0.1.evil.example", "10.0.0.1:9000", ""):
        assert admin.get("/backends", headers={"Host": host}).status_code == 403
    for host in ("127.0.0.1:9000", "localhost:1", "[::1]:9000", "localhost"):
        assert admin.get("/backends", headers={"Host": host}).status_code == 200


def test_a_browsers_form_changes_nothing():
    door = Door(1)
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        answer = client(door).post("/backends", content=b'{"url": "http://x"}', headers={"Content-Type": kind})
        assert answer.status_code == 415
    assert len(list(door.backends)) == 1


def test_an_address_that_others_reach_needs_a_key():
    for host in ("127.0.0.1", "::1", "localhost"):
        check_admin_address(host, "")
    check_admin_address("0.0.0.0", "key")
    for host in ("0.0.0.0", "::", "10.1.1.1", "gateway.example"):
        with pytest.raises(ConfigurationError, match="admin listener"):
            check_admin_address(host, "")


def test_a_person_gives_the_key_to_a_browser_as_a_password():
    admin = client(Door(1), key="s3cret", pages=[Route("/dashboard", lambda _: Response("the page"))])
    asked = admin.get("/dashboard")
    assert asked.status_code == 401
    assert "Basic realm=" in asked.headers["www-authenticate"]
    assert admin.get("/dashboard", auth=("anybody", "s3cret")).text == "the page"
    for auth in (("s3cret", ""), ("anybody", "wrong"), ("anybody", "")):
        assert admin.get("/dashboard", auth=auth).status_code == 401
    for broken in ("Basic", "Basic !", "Basic c2VjcmV0", "Digest czNjcmV0"):
        assert admin.get("/dashboard", headers={"Authorization": broken}).status_code == 401
