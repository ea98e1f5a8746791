"""Processes of one gateway know together what each of them heard."""

from __future__ import annotations

import asyncio
import multiprocessing
import stat
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from observed import traffic

from expediter.gateway.siblings import Siblings
from expediter.telemetry.exchanges import ExchangeRecord
from expediter.telemetry.history import History, merged
from expediter.telemetry.process_place import ALONE, ProcessPlace
from expediter.telemetry.recent_exchanges import RecentExchanges


def records() -> list[ExchangeRecord]:
    return list(traffic(40.0, seed=3))


def told_of(what: object) -> Any:
    """Return all of something; whether a route's candidates are a list or a tuple is no matter."""
    return msgspec.json.decode(msgspec.json.encode(what))


def knowing(mine: list[ExchangeRecord], place: ProcessPlace = ALONE) -> Siblings:
    history, recent = History(), RecentExchanges()
    for record in mine:
        history.record(record)
        recent.record(record)
    return Siblings(recent.find, history.since, place)


def _answer(folder: Path, slot: int, mine: list[ExchangeRecord], ready: Any, stop: Any) -> None:
    async def run() -> None:
        async with knowing(mine, ProcessPlace(folder, slot, 3)):
            ready.set()
            await asyncio.to_thread(stop.wait)

    asyncio.run(run())


def test_together_they_know_everything(tmp_path: Path) -> None:
    everything = records()
    context = multiprocessing.get_context("spawn")
    ready, stop = context.Event(), context.Event()
    process = context.Process(target=_answer, args=(tmp_path, 1, everything[1::2], ready, stop))
    process.start()
    try:
        assert ready.wait(60)

        async def ask() -> None:
            async with knowing(everything[0::2], ProcessPlace(tmp_path, 0, 3)) as siblings:
                told = await siblings.intervals(0)
                assert (siblings.num_processes, len(told)) == (3, 2), "nobody is in slot 2"
                alone = knowing(everything)
                wanted = merged(await alone.intervals(0))
                assert told_of(merged(told)) == told_of(wanted)
                for record in everything[:6]:
                    (found,) = await siblings.requests(record.tenant, record.request_id)
                    assert told_of(found) == told_of(record)
                assert await siblings.requests("nobody", everything[0].request_id) == []
                newest = wanted[-1].index
                assert {i.index for part in await siblings.intervals(newest) for i in part} == {newest}

        asyncio.run(ask())
    finally:
        stop.set()
        process.join(60)
    assert process.exitcode == 0


def test_one_that_hangs_or_talks_nonsense_costs_a_second_at_most(tmp_path: Path) -> None:
    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the other has given up
        writer.close()

    async def lie(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\xff\xff\xff\xffnonsense")
        await writer.drain()
        writer.close()

    async def ask() -> None:
        servers = [
            await asyncio.start_unix_server(who, tmp_path / f"process-{slot}") for slot, who in ((1, hang), (2, lie))
        ]
        everything = records()
        async with knowing(everything, ProcessPlace(tmp_path, 0, 3)) as siblings:
            started_s = time.monotonic()
            assert len(await siblings.intervals(0)) == 1
            assert time.monotonic() - started_s < 10
        for server in servers:
            server.close()
            await server.wait_closed()
        await asyncio.sleep(0)  # the last handler closes its side

    asyncio.run(ask())


@pytest.mark.parametrize("question", [b"", b"\x04\0\0\0junk", b"\xff\xff\xff\xff", b"\x01\0\0\0\xc1"])
def test_nonsense_asked_harms_nobody(tmp_path: Path, question: bytes) -> None:
    async def ask() -> None:
        everything = records()
        async with knowing(everything, ProcessPlace(tmp_path, 0, 2)):
            reader, writer = await asyncio.open_unix_connection(tmp_path / "process-0")
            writer.write(question)
            writer.write_eof()
            assert await reader.read() == b""
            writer.close()
            async with knowing([], ProcessPlace(tmp_path, 1, 2)) as other:
                (found,) = await other.requests(everything[0].tenant, everything[0].request_id)
                assert told_of(found) == told_of(everything[0])

    asyncio.run(ask())


def test_a_dead_ones_socket_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "process-0"
    path.write_text("left behind")

    async def enter() -> None:
        async with knowing([], ProcessPlace(tmp_path, 0, 2)):
            assert stat.S_ISSOCK(path.stat().st_mode)

    asyncio.run(enter())
