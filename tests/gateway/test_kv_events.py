"""vLLM's KV events over real sockets, and as it wrote them.

`vllm_kv_events.msgpack` is what vLLM 0.32 published for one prompt of 64 tokens and a reset of its prefix cache.
"""

import asyncio
import json
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import tokenizers
import zmq
import zmq.asyncio
from test_backends import Door, prompt
from test_watcher import until
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from expediter.control.kv_contents import Cleared, Removed, Stored
from expediter.core.request import Request
from expediter.engine.tokenizer import Tokenizer
from expediter.gateway.backends.config import BackendConfig
from expediter.gateway.backends.kv_events import KvSubscription, decode_batch
from expediter.gateway.backends.prompts import token_ids
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
    (found,) = first
    assert found[:3] == ((5560743318068401453, 4675927160344611086), 32, None)
    assert len(found.tokens) == 64
    assert second == [Cleared()]


def test_arrays_of_older_versions_are_read():
    payload = batch(
        ["BlockStored", [1, b"x"], None, [0] * 32, 16, None, "GPU"], ["BlockRemoved", [1], "GPU"], ["AllBlocksCleared"]
    )
    assert decode_batch(payload) == [Stored((1, b"x"), 16, None, (0,) * 32), Removed((1,)), Cleared()]


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
    config = BackendConfig(url="http://kv", kv_events=publisher.events, **{"models": ("m",), **fields})
    backend = door.backends.add(config)
    subscription = KvSubscription(door.backends.contents, backend)
    task = asyncio.create_task(subscription.run())
    try:
        await publisher.joined()
        yield door, backend, publisher, subscription.cache
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


TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} end {% endfor %}assistant"
WORDS = ["user", "assistant", "end", "unknown", *(f"w{number}" for number in range(200))]


@pytest.fixture
def model_folder(tmp_path):
    """A folder with a tokenizer of a token per word, and a chat template."""
    made = tokenizers.Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="unknown"))
    made.pre_tokenizer = WhitespaceSplit()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return tmp_path


class Body:
    """What the door knows of a request's body."""

    def __init__(self, messages=b"", prompt=b"", tools=b""):
        self.messages, self.prompt, self.tools = (msgspec.Raw(each) for each in (messages, prompt, tools))

    def prompt_tokens(self):
        return np.frombuffer(bytes(self.messages or self.prompt)[:4], np.int32)


def chat(*words):
    return Body(messages=json.dumps([{"role": "user", "content": " ".join(words)}]).encode())


def test_prompts_become_the_ids_that_the_backend_will_make(model_folder):
    text = Tokenizer.from_folder(model_folder)
    assert token_ids(text, chat("w0", "w1")).tolist() == [0, 4, 5, 2, 1]
    parts = b'[{"role": "user", "content": [{"type": "text", "text": "w0"}, {"type": "text", "text": "w1"}]}]'
    assert token_ids(text, Body(messages=parts)).tolist() == [0, 4, 5, 2, 1]
    assert token_ids(text, Body(prompt=b'"w3 w4"')).tolist() == [7, 8]
    assert token_ids(text, Body(prompt=b"[9, 8]")).tolist() == [9, 8]


@pytest.mark.parametrize(
    "body",
    [
        Body(),
        Body(messages=b'[{"role": "user", "content": [{"type": "image_url"}]}]'),
        Body(messages=b"7"),
        Body(messages=b"[7]"),
        Body(prompt=b'["a", "b"]'),
        Body(prompt=b"[]"),
        Body(prompt=b"[99999999999]"),
        Body(prompt=b'"' + b"x" * 40_000 + b'"'),
    ],
)
def test_prompts_that_cannot_be_known_are_compared_as_bytes(model_folder, body):
    assert token_ids(Tokenizer.from_folder(model_folder), body) is None


def test_with_a_tokenizer_events_tell_which_prompts_are_held(tmp_path, model_folder):
    async def run():
        async with subscribed(tmp_path, tokenizer=str(model_folder), models=("kv",)) as (door, backend, publisher, _):
            body = chat(*(f"w{number % 200}" for number in range(80)))
            tokens = door.backends.contents.prompt_tokens("kv", body)
            request = Request(request_id="r", prompt=tokens, max_tokens=1, tenant="t", cache_salt="t/")

            ids = tokens.tolist()
            await publisher.publish(stored(1, 2, parent_block_hash=None, token_ids=ids[:64]))
            await until(lambda: known(door, backend) == 64)
            await publisher.publish(removed(2))
            await until(lambda: known(door, backend) == 32)
            await publisher.publish(stored(7, parent_block_hash=1, token_ids=ids[32:64], extra_keys=[["a salt"]]))
            await until(lambda: backend.num_cache_tokens == 64)
            assert known(door, backend) == 32
            assert door.choose(request, "kv").decision.num_cached_tokens == 32

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
