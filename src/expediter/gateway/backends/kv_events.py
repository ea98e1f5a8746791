"""vLLM's KV cache events: a ZMQ subscription per backend that publishes them. Needs the extra `kv-events`.

A message has three frames: topic, number (8 bytes, big-endian), and a msgpack array [time, events, data-parallel rank].
An event is a map with its type's name under "type" (vLLM 0.32), or an array that begins with it (before). Messages that
were missed can be had again from a second socket, as long as the engine keeps them.

Source: vLLM's vllm/distributed/kv_events.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Hashable
from typing import Any, Final

import msgspec
import zmq
import zmq.asyncio

from expediter.control.kv_contents import CacheContents, Cleared, KvEvent, Removed, Stored
from expediter.gateway.backends.backend import Backend
from expediter.gateway.backends.contents import EXACT_BLOCK_TOKENS, Contents

logger = logging.getLogger(__name__)

_MAX_MESSAGE_BYTES: Final = 64 << 20
_MAX_QUEUED: Final = 10_000
_REPLAY_S: Final = 2.0
_END: Final = (-1).to_bytes(8, "big", signed=True)
_NUMBER_BYTES: Final = 8
_ON_DEVICE: Final = (None, "GPU")
"""Media that count: what was moved to the host has to be fetched, which may take as long as computing it."""
_ARRAY_FIELDS: Final = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}


def decode_batch(payload: bytes) -> list[KvEvent]:
    """Read a batch of events; those of kinds that we do not know are passed over.

    Raises:
        ValueError: it is no batch.
    """
    try:
        batch = msgspec.msgpack.decode(payload)
    except msgspec.DecodeError as error:
        raise ValueError("no msgpack") from error
    if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
        raise ValueError("no batch of events")
    return [event for event in map(_event, batch[1]) if event is not None]


def _event(raw: object) -> KvEvent | None:
    if isinstance(raw, list) and raw and isinstance(raw[0], str) and raw[0] in _ARRAY_FIELDS:
        raw = {"type": raw[0], **dict(zip(_ARRAY_FIELDS[raw[0]], raw[1:], strict=False))}
    if not isinstance(raw, dict):
        return None
    kind = raw.get("type")
    if kind == "AllBlocksCleared":
        return Cleared()
    # Models with several kinds of attention name the same block once per group; the first stands for all.
    if raw.get("medium") not in _ON_DEVICE or raw.get("group_idx") not in (None, 0):
        return None
    hashes = raw.get("block_hashes")
    if not isinstance(hashes, list) or not all(isinstance(each, Hashable) for each in hashes):
        return None
    if kind == "BlockRemoved":
        return Removed(tuple(hashes))
    block_tokens = raw.get("block_size")
    if kind == "BlockStored" and isinstance(block_tokens, int) and block_tokens > 0:
        parent = raw.get("parent_block_hash")
        return Stored(tuple(hashes), block_tokens, parent if isinstance(parent, Hashable) else None, _tokens(raw))
    return None


def _tokens(raw: dict[str, Any]) -> tuple[int, ...]:
    """Return the token ids of stored blocks, if nothing else decides what is in them."""
    extra, tokens = raw.get("extra_keys"), raw.get("token_ids")
    if raw.get("lora_id") is not None or raw.get("lora_name") is not None or (isinstance(extra, list) and any(extra)):
        return ()
    if not isinstance(tokens, list) or not all(isinstance(each, int) and 0 <= each < 1 << 31 for each in tokens):
        return ()
    return tuple(tokens)


class KvSubscription:
    """Follows one backend's events.

    Args:
        contents: hears what they say.
    Attributes:
        cache: what the backend's holds.
    """

    def __init__(self, contents: Contents, backend: Backend) -> None:
        self._contents = contents
        self._backend = backend
        self.cache = CacheContents(EXACT_BLOCK_TOKENS)

    async def run(self) -> None:
        """Follow until cancelled; ZMQ connects again by itself."""
        config = self._backend.config
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.SUB)
        try:
            socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
            socket.setsockopt(zmq.RCVHWM, _MAX_QUEUED)
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            socket.connect(config.kv_events)
            while True:
                frames = await socket.recv_multipart()
                await self._receive(context, frames)
        finally:
            socket.close(linger=0)
            context.term()

    async def _receive(self, context: zmq.asyncio.Context, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != _NUMBER_BYTES:
            logger.warning("backend %s sent a KV event that is none", self._backend.name)
            return
        number = int.from_bytes(frames[1], "big")
        if self.cache.misses(number) and self._backend.config.kv_replay:
            await self._catch_up(context, number)
        self._apply(number, frames[2])

    def _apply(self, number: int, payload: bytes) -> None:
        try:
            events = decode_batch(payload)
        except ValueError as error:
            logger.warning("backend %s sent KV events that cannot be read: %s", self._backend.name, error)
            events = []
        self.cache.root = self._contents.root(self._backend)
        news = self.cache.apply(number, events)
        self._contents.news(self._backend, news)
        if self.cache.is_complete:
            # Where it is known which prompts were dropped, no others need be.
            has_dropped = news.has_dropped and self.cache.root is None
            self._contents.holds(self._backend, self.cache.num_tokens, has_dropped=has_dropped)

    async def _catch_up(self, context: zmq.asyncio.Context, end: int) -> None:
        """Ask for the batches that are missing before one; what the engine no longer has stays missing."""
        socket = context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
            socket.connect(self._backend.config.kv_replay)
            begin = self.cache.next_number or 0
            await socket.send_multipart([b"", begin.to_bytes(_NUMBER_BYTES, "big")])
            async with asyncio.timeout(_REPLAY_S):
                while True:
                    frames = await socket.recv_multipart()
                    if len(frames) != 4 or frames[2] == _END:
                        return
                    number = int.from_bytes(frames[2], "big")
                    if number < end:
                        self._apply(number, frames[3])
        except TimeoutError:
            logger.warning("backend %s does not repeat its KV events", self._backend.name)
        finally:
            socket.close(linger=0)
