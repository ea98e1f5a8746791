"""What clients want their output to match, and its compilation in processes that may be killed."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import sys
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

import msgspec

from expediter.core.errors import CapacityError
from expediter.core.ranges import require_above_zero, require_at_least
from expediter.core.request import MAX_GRAMMAR_BYTES, Grammar
from expediter.engine.structured import GrammarKind
from expediter.gateway.bodies import GenerationBody, JsonObjectFormat, JsonSchemaFormat
from expediter.gateway.errors import bad_request
from expediter.gateway.grammar_turns import Turns
from expediter.gateway.grammar_worker import LENGTH, Answer, Question
from expediter.runtime.replica_process import to_its_end

logger = logging.getLogger(__name__)

_START_S: Final = 60.0
"""For a worker to load the tokenizer; not counted against any grammar."""
_LATE_KEPT_S: Final = 60.0
_MAX_LATE_KEPT_S: Final = 3600.0
"""For so long a grammar that took too long is refused without another try: the first time, and at most; it doubles."""
_MAX_LATE: Final = 1024
"""Grammars that are remembered for that; a hash each."""
_ANY_OBJECT: Final = '{"type": "object"}'
_ANSWER: Final = msgspec.msgpack.Decoder(Answer)


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A grammar as a client wrote it.

    Attributes:
        param: field of the body that it came in, for errors.
    """

    kind: GrammarKind
    text: str
    param: str

    @property
    def key(self) -> bytes:
        """What it is known by: its kind and its text, which may be long."""
        return hashlib.sha256(f"{self.kind} {self.text}".encode()).digest()


def spec_of(body: GenerationBody) -> GrammarSpec | None:
    """Return what a body's output has to match; None for anything.

    Raises:
        ApiError: 400, the body says it in two ways.
    """
    specs = [spec for spec in (_of_response_format(body), _of_structured_outputs(body)) if spec is not None]
    if not specs:
        return None
    if len(specs) > 1:
        raise bad_request("give either response_format or structured_outputs", "structured_outputs")
    return specs[0]


def check_end(body: GenerationBody, spec: GrammarSpec) -> None:
    """Refuse a body whose output may not end where it is complete.

    Raises:
        ApiError: 400, it names the field.
    """
    for name in ("ignore_eos", "min_tokens"):
        if getattr(body, name):
            raise bad_request(f"{name} does not go with {spec.param}: the output ends where it is complete", name)


def _of_response_format(body: GenerationBody) -> GrammarSpec | None:
    match body.response_format:
        case JsonObjectFormat():
            return GrammarSpec("json_schema", _ANY_OBJECT, "response_format")
        case JsonSchemaFormat(json_schema=given):
            return GrammarSpec("json_schema", _text_of(given.schema, "response_format"), "response_format")
    return None


def _of_structured_outputs(body: GenerationBody) -> GrammarSpec | None:
    given, param = body.structured_outputs, "structured_outputs"
    if given is None:
        return None
    specs = []
    if bytes(given.json) not in (b"", b"null"):
        specs.append(GrammarSpec("json_schema", _text_of(given.json, param), param))
    if given.json_object:
        specs.append(GrammarSpec("json_schema", _ANY_OBJECT, param))
    if given.regex is not None:
        specs.append(GrammarSpec("regex", given.regex, param))
    if given.choice is not None:
        specs.append(GrammarSpec("choice", msgspec.json.encode(given.choice).decode(), param))
    if given.grammar is not None:
        specs.append(GrammarSpec("lark", given.grammar, param))
    if len(specs) != 1:
        raise bad_request("structured_outputs takes one of json, json_object, regex, choice and grammar", param)
    return specs[0]


def _text_of(schema: msgspec.Raw, param: str) -> str:
    """Return a schema as it was sent; vLLM's clients may send it as a text, too."""
    try:
        text = bytes(schema).decode()
        return msgspec.json.decode(schema, type=str) if text.startswith('"') else text
    except (UnicodeDecodeError, msgspec.DecodeError) as error:
        raise bad_request(f"{param} is not valid JSON in UTF-8", param) from error


@dataclass(frozen=True, slots=True)
class _Known:
    """An outcome that stays so. `tenant` had it compiled."""

    answer: Answer
    tenant: str


@dataclass(frozen=True, slots=True)
class _Late:
    """A grammar that took too long: until when it is refused, and how often it did."""

    answer: Answer
    until_s: float
    num_times: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarLimits:
    """What compiling may cost.

    Args:
        deadline_s: for one grammar, from when a worker begins with it.
        num_workers: grammars that are compiled at once; a tenant has all but one of them at most.
        max_waiting: grammars of one tenant that may wait for a worker.
        max_wait_s: longest time to wait for one.
        max_known: grammars whose outcome is remembered, good or bad.
    Raises:
        ConfigurationError: a value is out of range.
    """

    deadline_s: float = 3.0
    num_workers: int = 3
    max_waiting: int = 128
    max_wait_s: float = 10.0
    max_known: int = 128

    def __post_init__(self) -> None:
        require_above_zero(self, "deadline_s", "max_wait_s")
        require_at_least(1, self, "num_workers", "max_waiting", "max_known")


class Grammars:
    """Compiles grammars for the model in a folder; lives on the gateway's event loop.

    Workers start when they are first needed. Leave it as an async context manager: no worker is left behind then.

    Args:
        count: told the outcome of each compilation: "compiled", "refused", "late" or "crashed".
    """

    def __init__(
        self, folder: Path, limits: GrammarLimits | None = None, *, count: Callable[[str], None] = lambda _: None
    ) -> None:
        self._folder = folder
        self._limits = limits or GrammarLimits()
        self._count = count
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._late: OrderedDict[bytes, _Late] = OrderedDict()
        self._under_way: dict[bytes, asyncio.Task[Answer]] = {}
        self._num_under_way: Counter[str] = Counter()
        self._turns = Turns(self._limits.num_workers, max_wait_s=self._limits.max_wait_s)
        self._idle: list[_Worker] = []
        self._workers: set[_Worker] = set()

    async def __aenter__(self) -> Grammars:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = tuple(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for worker in tuple(self._workers):
            await self._end(worker)

    async def compile(self, spec: GrammarSpec, tenant: str = "") -> Grammar:
        """Return the grammar, once a worker has compiled it. Who gives up waiting does not stop it for others.

        Args:
            tenant: who wants it, and whose turn it takes.
        Raises:
            ApiError: 400, it is wrong, too large, or did not compile in time.
            CapacityError: too many of the tenant's wait or took too long, or no worker can be started.
        """
        if len(spec.text.encode()) > MAX_GRAMMAR_BYTES:
            raise bad_request(f"{spec.param} exceeds {MAX_GRAMMAR_BYTES} bytes", spec.param)
        answer = self._remembered(spec.key)
        if answer is None:
            answer = await asyncio.shield(self._task(spec.key, Question(spec.kind, spec.text), tenant))
        if answer.error:
            raise bad_request(f"{spec.param}: {answer.error}", spec.param)
        return Grammar(answer.text)

    def _remembered(self, key: bytes) -> Answer | None:
        """Return the outcome of a grammar that is known."""
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
            return known.answer
        late = self._late.get(key)
        return late.answer if late is not None and asyncio.get_running_loop().time() < late.until_s else None

    def _task(self, key: bytes, question: Question, tenant: str) -> asyncio.Task[Answer]:
        """Return the compilation of a grammar, one for all who want it."""
        task = self._under_way.get(key)
        if task is None:
            self._turns.check(tenant)
            if self._num_under_way[tenant] >= self._turns.max_running + self._limits.max_waiting:
                raise CapacityError("too many grammars wait to be compiled")
            self._num_under_way[tenant] += 1
            task = self._under_way[key] = asyncio.create_task(self._ask(question, tenant))
            task.add_done_callback(lambda done: self._settle(key, tenant, done))
        return task

    def _settle(self, key: bytes, tenant: str, task: asyncio.Task[Answer]) -> None:
        del self._under_way[key]
        self._num_under_way[tenant] -= 1
        if task.cancelled() or task.exception() is not None:
            return
        answer = task.result()
        if answer.is_late:  # once it may only have met a busy machine
            before = self._late.pop(key, None)
            num_times = 1 if before is None else before.num_times + 1
            kept_s = min(_MAX_LATE_KEPT_S, _LATE_KEPT_S * 2.0 ** (num_times - 1))
            self._late[key] = _Late(answer, asyncio.get_running_loop().time() + kept_s, num_times)
            if len(self._late) > _MAX_LATE:
                self._late.popitem(last=False)
            return
        self._late.pop(key, None)
        self._known[key] = _Known(answer, tenant)
        if len(self._known) > self._limits.max_known:
            # Whoever has most of what is remembered gives: nobody forgets another's by sending many of its own.
            counts = Counter(known.tenant for known in self._known.values())
            most = max(counts, key=counts.__getitem__)
            del self._known[next(key for key, known in self._known.items() if known.tenant == most)]

    async def _ask(self, question: Question, tenant: str) -> Answer:
        async with self._worker(tenant) as worker:
            answer = await self._outcome(worker, question)
            self._turns.ended(tenant, in_time=worker.is_free)  # before the next one's turn
            return answer

    async def _outcome(self, worker: _Worker, question: Question) -> Answer:
        deadline_s = self._limits.deadline_s
        try:
            answer = await asyncio.wait_for(worker.ask(question), deadline_s)
            self._count("refused" if answer.error else "compiled")
            return answer
        except TimeoutError:
            logger.warning("a grammar did not compile in %g s; its worker is killed", deadline_s)
            self._count("late")
            return Answer(error=f"the grammar did not compile within {deadline_s:g} s", is_late=True)
        except (EOFError, OSError):
            logger.warning("a grammar ended the worker that compiled it")
            self._count("crashed")
            return Answer(error="the grammar is too complex")

    @contextlib.asynccontextmanager
    async def _worker(self, tenant: str) -> AsyncIterator[_Worker]:
        """Have a worker for oneself; one whose answer is still to come afterwards is killed."""
        async with self._turns.turn(tenant):
            worker = self._idle.pop() if self._idle else await self._start()
            try:
                yield worker
            finally:
                if worker.is_free:
                    self._idle.append(worker)
                else:
                    await self._end(worker)

    async def _start(self) -> _Worker:
        """Return a new worker that is ready."""
        worker = await _Worker.start(self._folder)
        self._workers.add(worker)
        try:
            answer = await asyncio.wait_for(worker.read(), _START_S)
        except BaseException as error:
            await self._end(worker)
            if isinstance(error, TimeoutError | EOFError | OSError):
                logger.exception("a grammar worker does not start")
                raise CapacityError("structured output is not available now") from error
            raise
        if answer.error:
            await self._end(worker)
            raise bad_request(answer.error)
        return worker

    async def _end(self, worker: _Worker) -> None:
        await to_its_end(worker.end())
        self._workers.discard(worker)


class _Worker:
    """One process of `grammar_worker`.

    Attributes:
        is_free: whether it waits for a question; it cannot be used while it does not.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._writer = process.stdin
        self._reader = process.stdout
        self.is_free = False

    @classmethod
    async def start(cls, folder: Path) -> _Worker:
        return cls(
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "expediter.gateway.grammar_worker", str(folder), str(os.getpid())),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,  # a terminal's Ctrl-C is for the gateway
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # it reserves address space for each
            )
        )

    async def ask(self, question: Question) -> Answer:
        """Return the answer.

        Raises:
            EOFError, OSError: the process died over it.
        """
        self.is_free = False
        body = msgspec.msgpack.encode(question)
        self._writer.write(LENGTH.pack(len(body)) + body)
        return await self.read()

    async def read(self) -> Answer:
        """Return the next answer; raises as `ask`."""
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        answer = _ANSWER.decode(await self._reader.readexactly(length))
        self.is_free = True
        return answer

    async def end(self) -> None:
        """Kill the process and wait until it is gone."""
        self._writer.close()
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
