"""Requests whose grammar the executor has to get ready for wait here, and the loop goes on meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, Protocol

from expediter.core.errors import RequestError
from expediter.core.plan import SequenceFailure
from expediter.core.request import Grammar, Request
from expediter.runtime.loop import Abort, Command, Drain, Explain, Resume

_NUM_THREADS: Final = 2

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Held:
    """What waits for a grammar: the command that brings the request, then those that concern it, in order."""

    requests: tuple[Request, ...]
    commands: list[Command] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A thread is done with the grammar of a held request; `error` says why it cannot be used, "" if it can."""

    held: _Held
    error: str


Arrival = Command | Prepared


class Mailbox(Protocol):
    """An inbox that threads of ours may put something into."""

    def take(self) -> Iterable[Arrival]: ...

    def put(self, arrival: Prepared) -> None: ...


class PreparingInbox:
    """The loop's inbox: commands in order, but for those that wait for a grammar and what comes after them.

    Threads prepare, as many as the gateway checks grammars at once. All else happens in the loop's own thread.

    Args:
        mailbox: where commands arrive.
        prepare: the executor's.
    """

    def __init__(self, mailbox: Mailbox, prepare: Callable[[Grammar], None]) -> None:
        self._mailbox = mailbox
        self._prepare = prepare
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "grammar")
        self._held: dict[str, _Held] = {}
        self._drains: list[Drain] = []

    def take(self) -> Sequence[Command]:
        return [command for arrival in self._mailbox.take() for command in self._pass_on(arrival)]

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _pass_on(self, arrival: Arrival) -> list[Command]:
        """Return what may go to the loop now."""
        match arrival:
            case Prepared():
                return self._let_go(arrival)
            case tuple():
                return self._hold(arrival, arrival)
            case Resume():
                return self._hold(arrival, (arrival.request,))
            case Abort() | Explain() if arrival.request_id in self._held:
                self._held[arrival.request_id].commands.append(arrival)
                return []
            case Drain() if self._held:  # they came before it, so they are still taken
                self._drains.append(arrival)
                return []
        return [arrival]

    def _hold(self, command: Command, requests: tuple[Request, ...]) -> list[Command]:
        grammar = requests[0].grammar
        if grammar is None:
            return [command]
        held = _Held(requests, [command])
        self._held.update((request.request_id, held) for request in requests)
        self._threads.submit(self._work, held, grammar)
        return []

    def _work(self, held: _Held, grammar: Grammar) -> None:
        error = ""
        try:
            self._prepare(grammar)
        except RequestError as refusal:
            error = str(refusal)
        except BaseException:  # a panic of the grammar engine is no Exception
            logger.exception("a grammar cannot be prepared")
            error = "the grammar cannot be used"
        self._mailbox.put(Prepared(held, error))

    def _let_go(self, prepared: Prepared) -> list[Command]:
        held = prepared.held
        for request in held.requests:
            del self._held[request.request_id]
        commands = held.commands
        if prepared.error:
            commands[1:1] = [SequenceFailure(request.request_id, prepared.error) for request in held.requests]
        if not self._held:
            commands += self._drains
            self._drains = []
        return commands
