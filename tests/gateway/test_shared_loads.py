"""Several processes of one gateway: each sees what the others have dispatched, and where."""

import msgspec
from test_backends import HandClock, prompt

from expediter.gateway.backends.backend import Counts
from expediter.gateway.backends.config import BackendConfig
from expediter.gateway.backends.dispatcher import Busy
from expediter.gateway.backends.registry import Backends
from expediter.telemetry.exchanges import Outcome


class Table:
    """What two processes would share."""

    def __init__(self):
        self.rows = [{}, {}]

    def view(self, number):
        table = self

        class View:
            def publish(self, name, counts):
                table.rows[number][name] = counts

            def others(self, name):
                return table.rows[1 - number].get(name, Counts())

        return View()


class Process:
    """One of two, with a clock that both turn."""

    def __init__(self, clock, loads, names, **fields):
        self.clock = clock
        self.backends = Backends(clock=clock, loads=loads)
        self.sharing = self.backends.sharing
        for name in names:
            self.backends.add(BackendConfig(url=f"http://{name}:80", name=name, models=("m",), **fields))

    def choose(self, request):
        return self.backends.dispatcher.choose(request, "m", self.clock.now_s)

    def send(self, request):
        chosen = self.choose(request)
        return self.backends.dispatcher.dispatched(chosen, request, self.clock.now_s, is_stream=True)


def pair(num_backends=2, **fields):
    table, clock, names = Table(), HandClock(), [f"b{each}" for each in range(num_backends)]
    first, second = (Process(clock, table.view(number), names, **fields) for number in range(2))
    first.sharing.tell, second.sharing.tell = second.sharing.heard, first.sharing.heard
    return first, second, clock


def test_both_spread_one_burst():
    first, second, clock = pair()
    sent = []
    for number in range(8):
        clock.now_s += 0.002
        sent.append((first, second)[number % 2].send(prompt(first=10_000 * number)))
    names = [dispatch.backend.name for dispatch in sent]
    assert (names.count("b0"), names.count("b1")) == (4, 4)
    for dispatch in sent:
        dispatch.ended(Outcome.OK, clock.now_s)
    for process in (second, first):
        process.sharing.exchange(clock.now_s)
    assert all(status.num_in_flight == 0 for status in first.backends.status())
    assert all(backend.elsewhere == Counts() for backend in first.backends)


def test_a_limit_holds_for_all_and_room_is_noticed():
    first, second, clock = pair(num_backends=1, max_requests=1)
    dispatch = first.send(prompt())
    clock.now_s += 0.002
    assert second.choose(prompt()) == Busy()
    rooms = []
    second.backends.hooks.on_room = lambda: rooms.append(1)
    second.sharing.exchange(clock.now_s)
    assert not rooms
    dispatch.ended(Outcome.OK, clock.now_s)
    for process in (first, second):
        process.sharing.exchange(clock.now_s)
    assert rooms == [1]


def test_looking_is_not_done_for_each_request():
    first, second, clock = pair(num_backends=1, max_requests=2)
    second.choose(prompt())
    for _ in range(2):
        first.send(prompt())
    assert second.choose(prompt()) != Busy()
    clock.now_s += 0.002
    assert second.choose(prompt()) == Busy()


def test_prompts_are_known_where_they_were_not_sent_from():
    first, second, clock = pair()
    sent = [first.send(prompt(2048, first=10_000 * number)) for number in range(2)]
    first.sharing.exchange(clock.now_s)
    clock.now_s += 0.002
    for number, dispatch in enumerate(sent):
        dispatch.ended(Outcome.OK, clock.now_s)
        chosen = second.choose(prompt(2048, first=10_000 * number))
        assert chosen.decision.num_cached_tokens == 2047
        assert chosen.backend.name == dispatch.backend.name


def test_messages_that_are_none_change_nothing():
    first, *_ = pair()
    for placed in ([["m", "b0", b"abc"]], [["m", "who", b""]], [["x", "b0", b"12345678"]], ["m", "b0", b""]):
        first.sharing.heard(msgspec.msgpack.encode(placed))
    for message in (b"", b"\xc1"):
        first.sharing.heard(message)
    assert first.backends.contents.num_bytes == 0


def test_long_prompts_and_many_short_ones_fit_into_datagrams():
    first, _, clock = pair()
    sizes = []
    first.sharing.tell = lambda message: sizes.append(len(message))
    first.send(prompt(500_000))
    for number in range(100):
        first.send(prompt(4096, first=1_000_000 + 10_000 * number))
    first.sharing.exchange(clock.now_s)
    assert 7000 < sizes[0] <= 8192
    assert max(sizes) <= 8192
    assert sum(sizes) > 100 * 32 * 8
