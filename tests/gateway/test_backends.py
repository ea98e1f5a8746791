"""The registry of backends: counts are exact, nobody who may not gets a request, and nobody is locked out."""

import tomllib
from collections import Counter, deque
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from expediter.assembly.file_config import load_file_config
from expediter.control.health import Failure, HealthConfig
from expediter.control.retry import RetryConfig
from expediter.core.errors import ConfigurationError
from expediter.core.request import Request
from expediter.core.slo import Slo
from expediter.gateway.backends.backend import Reported, Usage
from expediter.gateway.backends.config import Address, BackendConfig
from expediter.gateway.backends.dispatcher import Busy, Chosen, NobodyUp
from expediter.gateway.backends.registry import DEFAULT_ROUTING, Backends
from expediter.telemetry.exchanges import Outcome


class HandClock:
    def __init__(self):
        self.now_s = 0.0

    def now(self):
        return self.now_s


class Door:
    """Backends, and dispatches by hand."""

    def __init__(self, num_backends=4, models=("m",), **config):
        self.clock = HandClock()
        self.backends = Backends(clock=self.clock, environment={"KEY": "secret"})
        self.rooms = 0
        self.backends.hooks.on_room = self._room
        for number in range(num_backends):
            self.backends.add(BackendConfig(url=f"http://b{number}:80", name=f"b{number}", models=models, **config))

    def _room(self):
        self.rooms += 1

    def choose(self, request=None, model="m", **fields):
        return self.backends.dispatcher.choose(request or prompt(), model, self.clock.now_s, **fields)

    def send(self, request=None, model="m", is_stream=True, **fields):
        request = request or prompt()
        chosen = self.choose(request, model, **fields)
        assert isinstance(chosen, Chosen), chosen
        return self.backends.dispatcher.dispatched(chosen, request, self.clock.now_s, is_stream=is_stream)

    def fail(self, name, failure=Failure.STATUS_5XX, times=1):
        """Let requests at one backend fail."""
        others = [each.replica_id for each in self.backends if each.name != name]
        for _ in range(times):
            self.send(excluded=others).ended(failure, self.clock.now_s)


def prompt(num_tokens=512, first=0, **fields):
    return Request(request_id="r", prompt=np.arange(first, first + num_tokens, dtype=np.int32), max_tokens=16, **fields)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://a:8000", Address("a", 8000)),
        ("http://a:8000/v1/", Address("a", 8000)),
        ("https://a/openai/v1", Address("a", 443, is_tls=True, base_path="/openai")),
        ("http://[::1]:1", Address("::1", 1)),
        ("unix:/run/x.sock", Address("localhost", 80, uds="/run/x.sock")),
    ],
)
def test_addresses_are_read(url, address):
    assert Address.of(url) == address


@pytest.mark.parametrize(
    "url", ["a:8000", "ftp://a", "http://", "http://u:p@a", "http://a?x=1", "unix:x", "http://a:b"]
)
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ConfigurationError):
        BackendConfig(url=url)


def test_an_unknown_model_has_nobody():
    door = Door()
    assert door.backends.models == ["m"]
    assert not door.backends.knows("x")
    assert isinstance(door.choose(model="x"), NobodyUp)


def test_a_burst_is_counted_at_dispatch_and_spread():
    door = Door()
    sent = [door.send(prompt(first=1000 * number)).backend.name for number in range(12)]
    assert sorted(sent.count(f"b{number}") for number in range(4)) == [3, 3, 3, 3]


def test_counters_are_zero_when_everything_has_ended():
    door = Door()
    rng = np.random.default_rng(1)
    live = []
    for number in range(500):
        dispatch = door.send(prompt(int(rng.integers(1, 900)), first=int(rng.integers(3))), is_stream=bool(number % 2))
        live.append(dispatch)
        if rng.random() < 0.5:
            dispatch.first_byte(door.clock.now_s)
        if rng.random() < 0.5:
            ended = live.pop(int(rng.integers(len(live))))
            how = Failure.BROKEN if rng.random() < 0.05 else Outcome.CLIENT_GONE if rng.random() < 0.5 else Outcome.OK
            ended.ended(how, door.clock.now_s)
            ended.ended(Outcome.OK, door.clock.now_s)
            ended.first_byte(door.clock.now_s)
        door.clock.now_s += 0.01
    for dispatch in live:
        dispatch.ended(Outcome.CLIENT_GONE, door.clock.now_s)
    for backend in door.backends:
        assert (backend.num_in_flight, backend.num_pending_tokens) == (0, 0)
        assert (backend.num_context_tokens, backend.num_answered) == (0, 0)
        assert backend.num_dispatched == sum(backend.outcomes.values())


def test_who_is_full_is_passed_over_and_its_room_is_announced():
    door = Door(2, max_requests=1)
    first, _ = door.send(), door.send()
    assert door.choose() == Busy()
    assert door.rooms == 2  # when each of them was added
    first.ended(Outcome.OK, 0.0)
    assert door.rooms == 3
    assert door.send().backend is first.backend


def test_a_refused_connection_ejects_and_the_others_go_on():
    door = Door()
    door.fail("b0", Failure.CONNECT)
    assert "b0" not in {door.send().backend.name for _ in range(20)}


def test_four_hundred_thirty_are_nobodys_failure():
    door = Door(1)
    for _ in range(30):
        dispatch = door.send()
        dispatch.first_byte(0.0)
        dispatch.ended(Outcome.CLIENT_ERROR, 0.0)
    assert isinstance(door.choose(), Chosen)
    assert door.backends.status()[0].state == "up"


def test_when_all_fail_all_are_tried():
    door = Door()
    for _ in range(3):
        for name in ("b0", "b1", "b2", "b3"):
            door.fail(name, times=3)
    assert {each.state for each in door.backends.status()} == {"ejected"}
    assert isinstance(door.choose(), Chosen)
    dispatch = door.send()
    dispatch.first_byte(0.1)
    assert [each.state for each in door.backends.status()].count("up") == 1


def probe(door, failure=None):
    """Answer all probes that are due."""
    for backend in door.backends.health.due_probes(door.clock.now_s):
        door.backends.health.probed(backend, failure, door.clock.now_s)


@pytest.mark.parametrize("failure", [Failure.TIMEOUT, Failure.CONNECT])
def test_one_that_is_back_gets_the_next_request_even_if_others_look_better(failure):
    door = Door()
    learn(door)

    def answered():
        dispatch = door.send(prompt(4000))
        dispatch.first_byte(door.clock.now_s)
        dispatch.ended(Outcome.OK, door.clock.now_s)
        return dispatch.backend

    holder = answered()
    victim = next(backend for backend in door.backends if backend is not holder)
    door.fail(victim.name, failure)
    assert {answered() for _ in range(4)} == {holder}
    door.clock.now_s += 1.0
    probe(door)
    tried = door.send(prompt(4000))
    assert (tried.backend, tried.is_trial) == (victim, True)
    assert answered() is holder, "one at a time"
    tried.ended(Outcome.CLIENT_GONE, door.clock.now_s)
    assert answered() is victim, "who left says nothing about it"
    assert {each.state for each in door.backends.status()} == {"up"}


def test_a_session_returns_home_from_a_trial():
    door = Door()
    home = door.send(prompt(first=0, session="s"))
    home.ended(Outcome.OK, 0.0)
    victim = next(backend for backend in door.backends if backend is not home.backend)
    door.fail(victim.name, Failure.TIMEOUT)
    door.clock.now_s += 1.0
    probe(door)
    homes = [door.send(prompt(first=5000 * number, session="s")).backend for number in range(1, 4)]
    assert homes == [victim, home.backend, home.backend]


def test_a_trial_is_for_a_request_that_can_be_tried_again_of_a_model_that_is_served_there():
    door, can_retry = Door(2), [False]
    door.backends.add(BackendConfig(url="http://n", name="n", models=("n",)))
    door.backends.hooks.can_retry = lambda now_s: can_retry[0]
    door.send(model="n").ended(Failure.TIMEOUT, door.clock.now_s)
    door.clock.now_s += 1.0
    probe(door)
    assert {door.send(model="m").backend.name for _ in range(4)} == {"b0", "b1"}
    door.fail("b0", Failure.TIMEOUT)
    door.clock.now_s += 1.0
    probe(door)
    assert door.send().backend.name == "b1"  # it could not be tried again
    can_retry[0] = True
    assert door.send(excluded={99}).backend.name == "b1"  # it has been tried already
    chosen = door.choose()
    assert (chosen.backend.name, "well again" in chosen.decision.because) == ("b0", True)


def test_a_request_that_would_be_late_there_is_not_used_for_a_trial():
    door = Door(2)
    learn(door)
    slow, fast = door.backends
    for number in range(20):
        dispatch = door.send(prompt(2000, first=7_000_000 + 10_000 * number), excluded={fast.replica_id})
        door.clock.now_s += 3.0
        dispatch.first_byte(door.clock.now_s)
        dispatch.ended(Outcome.OK, door.clock.now_s)
    door.fail(slow.name, Failure.TIMEOUT)
    door.clock.now_s += 1.0
    probe(door)
    target = {"slo": Slo(ttft_s=0.05), "refuse_late": True, "arrival_s": door.clock.now_s}
    assert door.send(prompt(2000, first=8_000_000, **target)).backend is fast
    assert door.send(prompt(2000, first=8_000_000)).backend is slow


def test_who_waits_because_the_others_are_full_goes_on_trial():
    door = Door(2, max_requests=1)
    door.fail("b0", Failure.TIMEOUT)
    assert door.send().backend.name == "b1"
    assert door.choose() == Busy()
    door.clock.now_s += 1.0
    probe(door)
    rooms = door.rooms
    door.backends.look_at_the_clock(door.clock.now_s)
    assert door.rooms > rooms
    assert door.send().backend.name == "b0"


def test_who_was_tried_already_is_not_tried_again():
    door = Door(2)
    first = door.send()
    second = door.send(excluded={first.backend.replica_id})
    assert second.backend is not first.backend
    assert isinstance(door.choose(excluded={0, 1}), NobodyUp)
    assert isinstance(door.choose(), Chosen)


def test_drained_and_removed_backends_get_nothing_more():
    door = Door(2)
    dispatch = door.send()
    door.backends.drain(dispatch.backend)
    assert all(door.send().backend is not dispatch.backend for _ in range(4))
    door.backends.remove(dispatch.backend)
    assert len(list(door.backends)) == 1
    dispatch.first_byte(0.0)
    dispatch.ended(Outcome.OK, 0.0)
    assert dispatch.backend.num_pending_tokens == 0
    door.backends.add(BackendConfig(url="http://b9:80", models=("m", "n")))
    assert door.backends.models == ["m", "n"]


def test_names_are_unique_and_keys_come_from_the_environment():
    door = Door(1)
    with pytest.raises(ConfigurationError, match="already"):
        door.backends.add(BackendConfig(url="http://other", name="b0"))
    with pytest.raises(ConfigurationError, match="NO_SUCH is not set"):
        door.backends.add(BackendConfig(url="http://other", api_key_env="NO_SUCH"))
    assert door.backends.add(BackendConfig(url="http://other", api_key_env="KEY")).authorization == b"Bearer secret"


def test_models_do_not_share_prefixes_but_share_load():
    door = Door(2, models=("m", "n"))
    first = door.send(model="m")
    first.first_byte(0.0)
    assert door.choose(model="m").decision.num_cached_tokens > 0
    chosen = door.choose(model="n")
    assert chosen.decision.num_cached_tokens == 0
    assert chosen.backend is not first.backend


def test_the_speed_of_a_backend_is_learned_and_predicts():
    door, rng = Door(2), np.random.default_rng(0)
    speeds = {"b0": 1e-4, "b1": 1e-3}
    for number in range(200):
        dispatch = door.send(prompt(int(rng.integers(100, 4000)), first=number * 10_000))
        taken_s = 0.02 + speeds[dispatch.backend.name] * (dispatch.num_ahead + dispatch.num_new)
        dispatch.first_byte(door.clock.now_s + taken_s)
        dispatch.ended(Outcome.OK, door.clock.now_s + taken_s, Usage(100, 10, 0))
        door.clock.now_s += 0.05
    learned = {each.name: each.speed for each in door.backends.status()}
    for name, token_s in speeds.items():
        assert learned[name].token_s == pytest.approx(token_s, rel=0.05)
        assert learned[name].overhead_s + learned[name].step_s == pytest.approx(0.02, rel=0.2)
    chosen = door.choose(prompt(1000, first=-5000))
    assert chosen.backend.name == "b0"
    assert chosen.predicted_ttft_s == pytest.approx(0.12, rel=0.1)


def test_an_own_pool_is_one_of_them_while_it_is_ready():
    door, is_ready = Door(1), [True]
    own = door.backends.add_own("own", ["m"], lambda: is_ready[0])
    assert own.is_own
    assert {door.send().backend.name for _ in range(4)} == {"b0", "own"}
    for _ in range(5):
        door.send(excluded={0}).ended(Failure.STATUS_5XX, 0.0)
    assert {door.send().backend.name for _ in range(8)} == {"b0", "own"}  # its supervisor knows better
    is_ready[0] = False
    assert {door.send().backend.name for _ in range(4)} == {"b0"}


@pytest.mark.parametrize("knows_speed", [False, True])
@pytest.mark.parametrize("own_tokens", [8, 64, 512])
def test_one_popular_prefix_floods_nobody_and_is_still_hit(knows_speed, own_tokens):
    """96 requests with one beginning of 4 KB, 16 at a time, on four backends; hits as the backends would count them."""
    door, shared = Door(), np.arange(1024, dtype=np.int32)
    if knows_speed:
        learn(door)
    live, sent, hits = deque(), Counter(), 0
    for number in range(96):
        if len(live) == 16:
            oldest = live.popleft()
            oldest.first_byte(door.clock.now_s)
            oldest.ended(Outcome.OK, door.clock.now_s)
        tail = np.full(own_tokens, 10_000 + number, np.int32)
        dispatch = door.send(Request(request_id=str(number), prompt=np.concatenate((shared, tail)), max_tokens=16))
        live.append(dispatch)
        hits += sent[dispatch.backend.name] > 0
        sent[dispatch.backend.name] += 1
        door.clock.now_s += 0.01
    assert max(sent.values()) <= 48
    assert hits >= 0.9 * 95


def learn(door):
    """Let every backend's speed be known."""
    for number in range(100):
        dispatch = door.send(prompt(200 + 30 * number, first=100_000 * (number + 1)))
        door.clock.now_s += 0.01 + 1e-5 * dispatch.num_new
        dispatch.first_byte(door.clock.now_s)
        dispatch.ended(Outcome.OK, door.clock.now_s)
    assert all(each.speed is not None for each in door.backends.status())


def test_thousands_of_long_prompts_stay_within_the_bound():
    routing = replace(DEFAULT_ROUTING, index_max_bytes=1 << 20)
    backends = Backends(clock=HandClock(), routing=routing)
    for number in range(4):
        backends.add(BackendConfig(url=f"http://b{number}", models=("m",)))
    rng = np.random.default_rng(0)
    used = []
    for number in range(5_000):
        request = Request(request_id="r", prompt=rng.integers(0, 1 << 30, 8192, np.int32), max_tokens=1)
        chosen = backends.dispatcher.choose(request, "m", number / 100)
        backends.dispatcher.dispatched(chosen, request, number / 100, is_stream=False).ended(Outcome.OK, number / 100)
        if number % 1000 == 999:
            used.append(backends.contents.num_bytes)
    assert max(used) <= 1 << 20
    assert used[-1] > 3 << 18  # the bound was reached, or this would say nothing


def test_equal_backends_have_equal_speeds_and_new_prompts_alternate():
    door, rng, sent = Door(2), np.random.default_rng(0), []
    for number in range(300):
        dispatch = door.send(prompt(int(rng.integers(100, 4000)), first=number * 10_000))
        taken_s = (0.02 + 1e-4 * dispatch.num_new) * rng.uniform(0.8, 1.2)
        dispatch.first_byte(door.clock.now_s + taken_s)
        dispatch.ended(Outcome.OK, door.clock.now_s + taken_s, Usage(100, 10, 0))
        door.clock.now_s += 0.05
        sent.append(dispatch.backend.name)
    one, two = (each.speed for each in door.backends.status())
    assert one == two
    assert 140 <= sent.count("b0") <= 160


@pytest.mark.parametrize("num_tokens", [8, 512, 4000])
@pytest.mark.parametrize("knows_speed", [False, True])
def test_one_that_works_for_others_gets_less(knows_speed, num_tokens):
    door, sent = Door(2), Counter()
    if knows_speed:
        learn(door)
    door.backends.reported(door.backends.named("b0"), Reported(0.0, 4, 0, 0.1, 4))
    for number in range(10):
        dispatch = door.send(prompt(num_tokens, first=50_000_000 + 10_000 * number))
        door.clock.now_s += 0.01 + 1e-5 * num_tokens
        dispatch.first_byte(door.clock.now_s)
        dispatch.ended(Outcome.OK, door.clock.now_s)
        sent[dispatch.backend.name] += 1
    assert sent["b1"] >= 9


def test_a_session_stays_where_it_is_until_that_has_more_than_its_share():
    door = Door()
    first = door.send(prompt(first=0, session="s"))
    first.ended(Outcome.OK, 0.0)
    homes = {door.send(prompt(first=5000 * number, session="s")).backend.name for number in range(1, 3)}
    assert homes == {first.backend.name}
    homes = {door.send(prompt(first=5000 * number, session="s")).backend.name for number in range(3, 20)}
    assert len(homes) > 1


def test_the_slow_one_is_tried_again_when_it_may_have_recovered():
    door = Door(2)
    learn(door)
    slow = door.backends.named("b0")
    for number in range(20):
        dispatch = door.send(prompt(2000, first=7_000_000 + 10_000 * number), excluded={1})
        dispatch.first_byte(door.clock.now_s + 3.0)
        dispatch.ended(Outcome.OK, door.clock.now_s + 3.0)
        door.clock.now_s += 3.0

    def chosen(number):
        dispatch = door.send(prompt(2000, first=9_000_000 + 10_000 * number))
        dispatch.first_byte(door.clock.now_s + 0.03)
        dispatch.ended(Outcome.OK, door.clock.now_s + 0.03)
        return dispatch.backend

    assert all(chosen(number) is not slow for number in range(20))
    door.clock.now_s += 600.0
    door.backends.look_at_the_clock(door.clock.now_s)
    assert any(chosen(number) is slow for number in range(20, 40))


def test_a_plain_response_counts_as_computed_when_it_should_be():
    door = Door(1)
    learn(door)
    dispatch = door.send(prompt(5000, first=-20_000), is_stream=False)
    backend = dispatch.backend
    assert backend.num_pending_tokens == dispatch.num_new
    door.backends.look_at_the_clock(door.clock.now_s + 10.0)
    assert (backend.num_pending_tokens, backend.num_answered) == (0, 1)
    dispatch.ended(Outcome.OK, door.clock.now_s + 20.0)
    assert (backend.num_pending_tokens, backend.num_answered) == (0, 0)


def test_a_backend_whose_process_went_away_is_thought_of_as_new():
    door = Door(2)
    learn(door)
    door.fail("b0", Failure.CONNECT)
    door.backends.look_at_the_clock(door.clock.now_s)
    fresh, known = (each for each in door.backends)
    assert not fresh.profile.speed.is_known
    assert fresh.profile.speed.token_s == known.profile.speed.token_s


def test_a_backend_whose_process_went_away_has_lost_its_cache():
    door = Door(1)
    door.send().ended(Outcome.OK, 0.0)
    assert door.backends.status()[0].num_known_tokens
    door.fail("b0", Failure.CONNECT)
    assert not door.backends.status()[0].num_known_tokens


def test_the_example_has_every_field_and_the_defaults():
    path = Path(__file__).parents[2] / "docs/examples/backends.toml"
    config = load_file_config(path)
    assert (config.routing, config.health, config.door.retry) == (DEFAULT_ROUTING, HealthConfig(), RetryConfig())
    assert [each.shown_name for each in config.backends] == ["left", "right"]
    shown = tomllib.loads(path.read_text())["backends"][1]
    assert set(shown) == {field.name for field in fields(BackendConfig)}
