"""What gateway processes know of each other: sums without locks, and nothing of a dead one's load."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from expediter.control.limits import Exceeded, Limits, Reservation, TenantLimits
from expediter.gateway.backends.backend import Counts
from expediter.gateway.processes import Placements, SharedLimits, SharedLoads, SharedTable


def tables(folder: Path, num_slots: int) -> list[SharedTable]:
    return [SharedTable(folder, slot, num_slots) for slot in range(num_slots)]


@pytest.mark.parametrize("num_slots", [2, 3])
def test_each_sees_the_sum_of_the_others(tmp_path: Path, num_slots: int) -> None:
    loads = [SharedLoads(table) for table in tables(tmp_path, num_slots)]
    assert loads[0].others("a") == Counts(0, 0, 0)
    for number, load in enumerate(loads, 1):
        load.publish("b", Counts(number, 10 * number, 100 * number))
        load.publish("a", Counts(number, 0, 0))
    total = sum(range(1, num_slots + 1))
    for number, load in enumerate(loads, 1):
        assert load.others("a") == Counts(total - number, 0, 0)
        assert load.others("b") == Counts(total - number, 10 * (total - number), 100 * (total - number))


def test_what_a_dead_process_had_in_flight_is_forgotten_when_its_place_is_taken(tmp_path: Path) -> None:
    first, second = tables(tmp_path, 2)
    SharedLoads(first).publish("a", Counts(5, 50, 500))
    SharedLimits(TenantLimits({"t": Limits(max_requests_per_minute=9)}), first).reserve("t", 7, 0.0)
    others = SharedLoads(second)
    assert others.others("a") == Counts(5, 50, 500)
    again = SharedTable(tmp_path, 0, 2)
    SharedLoads(again)
    assert others.others("a") == Counts(0, 0, 0)
    assert again.own("tenant t")[:2] == (1, 7), "what tenants have used stays used"


def test_more_names_than_there_is_room_for_are_left_out(tmp_path: Path) -> None:
    (table,) = tables(tmp_path, 1)
    for number in range(1030):
        table.publish(f"name {number}", number, 0, 0)
    assert table.own("name 1023") == (1023, 0, 0)
    assert table.own("name 1029") == (0, 0, 0)


def test_a_tenants_limit_holds_over_all_processes(tmp_path: Path) -> None:
    limits = {"t": Limits(max_requests_per_minute=10, max_concurrent_requests=6)}
    processes = [SharedLimits(TenantLimits(limits), table) for table in tables(tmp_path, 2)]
    given: list[tuple[SharedLimits, Reservation]] = []
    for number in range(20):
        process = processes[number % 2]
        reserved = process.reserve("t", 1, now_s=0.0)
        if isinstance(reserved, Reservation):
            given.append((process, reserved))
    assert len(given) == 6
    for process, reservation in given:
        reservation.settle(1, 0.0)
        process.publish()
    more = [processes[number % 2].reserve("t", 1, now_s=0.0) for number in range(20)]
    assert sum(not isinstance(one, Exceeded) for one in more) == 4


def test_a_process_that_takes_anothers_place_neither_locks_a_tenant_out_nor_keeps_its_places(tmp_path: Path) -> None:
    limits = {"t": Limits(max_requests_per_minute=10, max_concurrent_requests=2)}
    first, second = (SharedLimits(TenantLimits(limits), table) for table in tables(tmp_path, 2))
    for number in range(1000):  # for ten hours, one after the other
        reserved = first.reserve("t", 1, now_s=36.0 * number)
        assert isinstance(reserved, Reservation)
        reserved.settle(1, 36.0 * number)
    now_s = 36_000.0
    for _ in range(2):
        assert isinstance(first.reserve("t", 1, now_s), Reservation)
    assert isinstance(second.reserve("t", 1, now_s), Exceeded)
    SharedLimits(TenantLimits(limits), SharedTable(tmp_path, 0, 2))  # the first was killed, its requests are no more
    late = SharedLimits(TenantLimits(limits), SharedTable(tmp_path, 1, 2))
    refused = late.reserve("t", 1, now_s)
    assert isinstance(refused, Exceeded), "the first may have given out all of it this minute"
    assert refused.retry_after_s == pytest.approx(6.0)
    assert isinstance(late.reserve("t", 1, now_s + 6.0), Reservation)


def test_who_listens_from_the_start_knows_when_the_others_requests_came(tmp_path: Path) -> None:
    limits = {"t": Limits(max_requests_per_minute=10)}
    first, second = (SharedLimits(TenantLimits(limits), table) for table in tables(tmp_path, 2))
    second.listen(0.0)
    for second_s in range(0, 600, 6):
        assert isinstance(first.reserve("t", 1, float(second_s)), Reservation)
        second.listen(float(second_s))
    assert sum(isinstance(second.reserve("t", 1, 660.0), Reservation) for _ in range(20)) == 10


def test_placements_arrive_and_a_dead_listener_hurts_nobody(tmp_path: Path) -> None:
    async def story() -> None:
        paths = [tmp_path / f"p-{slot}" for slot in range(3)]
        first = Placements(paths[0], paths[1:])
        second = Placements(paths[1], [paths[0], paths[2]])
        heard: list[bytes] = []
        second.start(heard.append)
        first.start(heard.append)
        first.tell(b"one")
        async with asyncio.timeout(10):
            while not heard:  # noqa: ASYNC110 - a list has no event
                await asyncio.sleep(0.001)
        assert heard == [b"one"]
        assert first.num_dropped == 1, "nobody is at the third place"
        for _ in range(5000):
            first.tell(b"x" * 4096)
        assert first.num_dropped > 5001, "what is too much is dropped, not waited for"
        first.stop()
        second.stop()

    asyncio.run(story())
