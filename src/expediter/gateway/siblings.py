"""The processes of one gateway ask each other what each of them knows: its recent requests, its newest intervals.

A process listens on a Unix socket in a folder that only its user may enter. A question and its answer are msgpack
behind their length; nothing is asked on the path of a request.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from expediter.telemetry.exchanges import ExchangeRecord
from expediter.telemetry.history import Interval
from expediter.telemetry.process_place import ALONE, ProcessPlace

logger = logging.getLogger(__name__)

_SOCKETS: Final = "process"
_LENGTH: Final = struct.Struct("<I")
_MAX_QUESTION_BYTES: Final = 64 << 10
_MAX_ANSWER_BYTES: Final = 64 << 20
_TIMEOUT_S: Final = 1.0


class RequestsQuestion(msgspec.Struct, frozen=True, tag="requests"):
    """Which requests a tenant means by a name."""

    tenant: str
    name: str


class IntervalsQuestion(msgspec.Struct, frozen=True, tag="intervals"):
    """What ended since an interval."""

    since: int


Question = RequestsQuestion | IntervalsQuestion
Answer = TypeVar("Answer", list[ExchangeRecord], list[Interval])

# Candidates of a route are a sequence of their own kind, ranked when they are looked at.
_ENCODER: Final = msgspec.msgpack.Encoder(enc_hook=tuple)
_QUESTIONS: Final = msgspec.msgpack.Decoder(Question)
_RECORDS: Final = msgspec.msgpack.Decoder(list[ExchangeRecord])
_INTERVALS: Final = msgspec.msgpack.Decoder(list[Interval])


class Siblings:
    """Async context manager: answers the others while it is entered.

    Args:
        requests, intervals: what this process knows.
        place: of this process.
    """

    def __init__(
        self,
        requests: Callable[[str, str], list[ExchangeRecord]],
        intervals: Callable[[int], list[Interval]],
        place: ProcessPlace = ALONE,
    ) -> None:
        self._requests = requests
        self._intervals = intervals
        self._path = place.own(_SOCKETS)
        self._others = place.others(_SOCKETS)
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Siblings:
        if self._path is not None:
            self._path.unlink(missing_ok=True)  # a predecessor's that died
            self._server = await asyncio.start_unix_server(self._serve, self._path)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    @property
    def num_processes(self) -> int:
        return 1 + len(self._others)

    async def requests(self, tenant: str, name: str) -> list[ExchangeRecord]:
        """Return what all processes know by a name, this one's first."""
        question = RequestsQuestion(tenant, name)
        told = await self._ask(question, _RECORDS)
        return [record for records in (self._requests(tenant, name), *told) for record in records]

    async def intervals(self, since: int) -> list[list[Interval]]:
        """Return the intervals of this process, and of each other one that answered."""
        return [self._intervals(since), *await self._ask(IntervalsQuestion(since), _INTERVALS)]

    async def _ask(self, question: Question, decoder: msgspec.msgpack.Decoder[Answer]) -> Sequence[Answer]:
        body = msgspec.msgpack.encode(question)
        answers = await asyncio.gather(*(_ask_one(path, body) for path in self._others))
        return [decoder.decode(answer) for answer in answers if answer is not None]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                answer = self._answer(_QUESTIONS.decode(await _read(reader, _MAX_QUESTION_BYTES)))
                await _write(writer, _ENCODER.encode(answer))
        except (OSError, asyncio.IncompleteReadError, TimeoutError, msgspec.DecodeError) as error:
            logger.warning("a question of another process cannot be answered: %s", type(error).__name__)
        finally:
            writer.close()

    def _answer(self, question: Question) -> list[ExchangeRecord] | list[Interval]:
        if isinstance(question, RequestsQuestion):
            return self._requests(question.tenant, question.name)
        return self._intervals(question.since)


async def _ask_one(path: Path, question: bytes) -> bytes | None:
    """Return an answer, None if the process is not there or too busy."""
    writer = None
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(path)
            await _write(writer, question)
            return await _read(reader, _MAX_ANSWER_BYTES)
    except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
        logger.warning("%s of the gateway did not answer: %s", path.name, type(error).__name__)
        return None
    finally:
        if writer is not None:
            writer.close()


async def _read(reader: asyncio.StreamReader, max_bytes: int) -> bytes:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > max_bytes:
        raise OSError(f"a frame of {length} bytes")
    return await reader.readexactly(length)


async def _write(writer: asyncio.StreamWriter, body: bytes) -> None:
    writer.write(_LENGTH.pack(len(body)) + body)
    await writer.drain()
