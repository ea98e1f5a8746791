"""Several processes of one gateway: each sees what the others have dispatched, and where."""

from test_backends import HandClock, prompt

from expediter.gateway.backends.backend import Counts
from expediter.gateway.backends.config import BackendConfig
from expediter.gateway.backends.registry import Backends, Busy
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


def pair(num_backends=2, **fields):
    table, processes = Table(), []
    for number in range(2):
        backends = Backends(clock=HandClock(), shared=table.view(number))
        for each in range(num_backends):
            backends.add(BackendConfig(url=f"http://b{each}:80", name=f"b{each}", models=("m",), **fields))
        processes.append(backends)
    first, second = processes
    first.on_placed, second.on_placed = second.placed_elsewhere, first.placed_elsewhere
    return first, second


def send(backends, request):
    return backends.dispatched(backends.choose(request, "m", 0.0), request, 0.0, is_stream=True)


def test_both_spread_one_burst():
    first, second = pair()
    sent = [send((first, second)[number % 2], prompt(first=10_000 * number)) for number in range(8)]
    names = [dispatch.backend.name for dispatch in sent]
    assert (names.count("b0"), names.count("b1")) == (4, 4)
    for dispatch in sent:
        dispatch.ended(Outcome.OK, 0.0)
    first.look_around()
    assert all(status.num_in_flight == 0 for status in first.status())
    assert all(backend.elsewhere == Counts() for backend in first)


def test_a_limit_holds_for_all_and_room_is_noticed():
    first, second = pair(num_backends=1, max_requests=1)
    dispatch = send(first, prompt())
    assert second.choose(prompt(), "m", 0.0) == Busy()
    rooms = []
    second.on_room = lambda: rooms.append(1)
    second.look_around()
    assert not rooms
    dispatch.ended(Outcome.OK, 0.0)
    second.look_around()
    assert rooms == [1]


def test_a_prompt_is_known_where_it_was_not_sent_from():
    first, second = pair()
    dispatch = send(first, prompt(2048))
    dispatch.first_byte(0.0)
    decision = second.choose(prompt(2048), "m", 0.0).decision
    assert decision.num_cached_tokens == 2047
    assert next(each.name for each in second if each.replica_id == decision.replica_id) == dispatch.backend.name


def test_messages_that_are_none_change_nothing():
    first, _ = pair()
    for message in (
        b"",
        b"\xc1",
        b"\x93\xa1m\xa2b0\xc4\x03abc",
        b"\x93\xa1m\xa3who\xc4\x00",
        b"\x93\xa1x\xa2b0\xc4\x00",
    ):
        first.placed_elsewhere(message)
    assert first.index_bytes == 0


def test_long_prompts_fit_into_a_datagram():
    first, _ = pair()
    sizes = []
    first.on_placed = lambda message: sizes.append(len(message))
    send(first, prompt(500_000))
    assert 7000 < sizes[0] <= 8192
