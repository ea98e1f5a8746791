"""vLLM's KV events over real sockets, and as it wrote them.

`vllm_kv_events.msgpack` is what vLLM 0.32 published for one prompt of 64 tokens and a reset of its prefix cache.
"""

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio
from test_backends import Door, prompt
from test_watcher import until

from expediter.control.kv_contents import Cleared, Removed, Stored
from expediter.gateway.backends.config import BackendConfig
from expediter.gateway.backends.kv_events import KvSubscription, decode_batch
from expediter.telemetry.exchanges import Outcome

RECORDED = Path(__file__).parent / "vllm_kv_events.msgpack"


def batch(*events):
    return msgspec.msgpack.encode([1.0, list(events), 0])


def stored(*hashes, **fields):
    return {"type": "BlockStored", "block_hashes": list(hashes), "block_size": 32, "medium": "GPU", **fields}


def removed(*hashes):
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"}


def test_what_vllm_published_is_read():
    messages = msgspec.msgpack.decode(RECORDED.read_bytes())
    first, second = (decode_batch(payload) for _, _, payload in messages)
    assert first == [Stored((5560743318068401453, 4675927160344611086), 32)]
    assert second == [Cleared()]


def test_arrays_of_older_versions_are_read():
    payload = batch(
        ["BlockStored", [1, b"x"], None, [0] * 32, 16, None, "GPU"], ["BlockRemoved", [1], "GPU"], ["AllBlocksCleared"]
    )
    assert decode_batch(payload) == [Stored((1, b"x"), 16), Removed((1,)), Cleared()]


def test_what_does_not_count_is_passed_over():
    payload = batch(
        stored(1, medium="CPU"),
        stored(1, group_idx=1),
        stored([1]),
        {"type": "Other"},
        7,
        [],
        {**stored(1), "block_size": 0},
    )
    assert decode_batch(payload) == []


@pytest.mark.parametrize("payload", [b"", b"\xc1", msgspec.msgpack.encode(7), msgspec.msgpack.encode([1, 2])])
def test_what_is_no_batch_is_an_error(payload):
    with pytest.raises(ValueError, match="no "):
        decode_batch(payload)


class Publisher:
    """A vLLM's side: publishes, and repeats what was asked for."""

    def __init__(self, folder):
        self.events, self.replay = f"ipc://{folder}/events", f"ipc://{folder}/replay"
        self.context = zmq.asyncio.Context()
        self.pub, self.router = self.context.socket(zmq.XPUB), self.context.socket(zmq.ROUTER)
        self.pub.bind(self.events)
        self.router.bind(self.replay)
        self.sent = []

    async def joined(self):
        """Wait until somebody has subscribed."""
        await self.pub.recv()

    async def publish(self, *events, is_lost=False):
        number, payload = len(self.sent).to_bytes(8, "big"), batch(*events)
        self.sent.append(payload)
        if not is_lost:
            await self.pub.send_multipart([b"kv", number, payload])

    async def repeat(self):
        client, _, begin = await self.router.recv_multipart()
        for number in range(int.from_bytes(begin, "big"), len(self.sent)):
            await self.router.send_multipart([client, b"", b"kv", number.to_bytes(8, "big"), self.sent[number]])
        await self.router.send_multipart([client, b"", b"", (-1).to_bytes(8, "big", signed=True), b""])

    def close(self):
        self.pub.close(linger=0)
        self.router.close(linger=0)
        self.context.term()


@asynccontextmanager
async def subscribed(folder, **fields):
    door, publisher = Door(1), Publisher(folder)
    config = BackendConfig(url="http://kv", models=("m",), kv_events=publisher.events, **fields)
    backend = door.backends.add(config)
    subscription = KvSubscription(door.backends, backend)
    task = asyncio.create_task(subscription.run())
    try:
        await publisher.joined()
        yield door, backend, publisher, subscription.contents
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        publisher.close()


def test_a_cache_that_was_cleared_is_known_to_hold_nothing(tmp_path):
    async def run():
        async with subscribed(tmp_path) as (door, backend, publisher, _):
            await publisher.publish(stored(1, 2, 3))
            await until(lambda: backend.num_cache_tokens == 96)
            door.send(excluded={0}).ended(Outcome.OK, 0.0)
            assert known(door, backend)
            await publisher.publish({"type": "AllBlocksCleared"})
            await until(lambda: not known(door, backend))
            assert backend.num_cache_tokens == 0

    asyncio.run(run())


def known(door, backend):
    return next(each.num_known_tokens for each in door.backends.status() if each.name == backend.name)


def test_what_was_evicted_is_no_longer_believed_in(tmp_path):
    async def run():
        async with subscribed(tmp_path) as (door, backend, publisher, _):
            for number in range(4):
                door.send(prompt(512, first=10_000 * number), excluded={0}).ended(Outcome.OK, 0.0)
            assert known(door, backend) == 2048
            await publisher.publish(stored(*range(64)))
            await publisher.publish(removed(*range(32)))
            await until(lambda: backend.num_cache_tokens == 1024)
            door.send(prompt(128, first=-1000), excluded={0}).ended(Outcome.OK, 0.0)
            assert known(door, backend) <= 1024

    asyncio.run(run())


def test_what_was_missed_is_asked_for(tmp_path):
    async def run():
        async with subscribed(tmp_path, kv_replay=f"ipc://{tmp_path}/replay") as (_, backend, publisher, contents):
            await publisher.publish(stored(1))
            await until(lambda: backend.num_cache_tokens == 32)
            await publisher.publish(stored(2, 3), is_lost=True)
            repeats = asyncio.create_task(publisher.repeat())
            await publisher.publish(removed(1))
            await until(lambda: backend.num_cache_tokens == 64)
            assert contents.is_complete
            await repeats

    asyncio.run(run())


def test_what_was_missed_for_good_is_not_believed_in(tmp_path):
    async def run():
        async with subscribed(tmp_path) as (_, backend, publisher, contents):
            await publisher.publish(stored(1))
            await until(lambda: backend.num_cache_tokens == 32)
            await publisher.publish(removed(1), is_lost=True)
            await publisher.publish(stored(2))
            await until(lambda: contents.next_number == 3)
            assert not contents.is_complete

    asyncio.run(run())


def test_messages_that_are_none_change_nothing(tmp_path):
    async def run():
        async with subscribed(tmp_path) as (_, backend, publisher, _):
            await publisher.pub.send_multipart([b"kv", b"short", b"x"])
            await publisher.pub.send_multipart([b"only one"])
            await publisher.pub.send_multipart([b"kv", (0).to_bytes(8, "big"), b"\xc1"])
            publisher.sent.append(b"")
            await publisher.publish(stored(5))
            await until(lambda: backend.num_cache_tokens == 32)

    asyncio.run(run())
