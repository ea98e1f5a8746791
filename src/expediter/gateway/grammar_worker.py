"""A process that compiles clients' grammars: `python -m expediter.gateway.grammar_worker FOLDER PARENT`.

It answers one question after the other on its standard streams, and is killed when an answer takes too long. It ends
when its standard input does, and when the gateway is gone, whose process id it is told. What survives here survives in
a replica, which compiles the same text with the same limits.
"""

from __future__ import annotations

import resource
import struct
import sys
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from expediter.core.errors import ConfigurationError, RequestError
from expediter.core.request import Grammar
from expediter.engine.structured import GrammarCompiler, GrammarKind, grammar_text
from expediter.runtime.parent import die_with_parent

LENGTH: Final = struct.Struct(">I")
_ADDRESS_SPACE_BYTES: Final = 2 << 30


class Question(msgspec.Struct, frozen=True):
    """A grammar as a client wrote it."""

    kind: GrammarKind
    text: str


class Answer(msgspec.Struct, frozen=True):
    """The grammar as replicas take it, or why there is none. The first answer, to no question, says "ready".

    Attributes:
        is_late: there was no answer in time; the gateway's own, no worker says this.
    """

    text: str = ""
    error: str = ""
    is_late: bool = False


def main(folder: Path, parent_pid: int) -> int:
    """Answer until standard input ends; return the exit code."""
    die_with_parent(parent_pid)
    # Where memory runs out first, only this process dies.
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE_BYTES, _ADDRESS_SPACE_BYTES))
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    try:
        compiler = GrammarCompiler.of_folder(folder)
    except ConfigurationError as error:
        _send(answers, Answer(error=str(error)))
        return 2
    _send(answers, Answer(text="ready"))
    decoder = msgspec.msgpack.Decoder(Question)
    while (raw := _receive(questions)) is not None:
        _send(answers, _answer(compiler, decoder.decode(raw)))
    return 0


def _answer(compiler: GrammarCompiler, question: Question) -> Answer:
    try:
        grammar = Grammar(grammar_text(question.kind, question.text))
        compiler.compile(grammar.text)
    except RequestError as error:
        return Answer(error=str(error))
    return Answer(text=grammar.text)


def _send(stream: BinaryIO, answer: Answer) -> None:
    body = msgspec.msgpack.encode(answer)
    stream.write(LENGTH.pack(len(body)) + body)
    stream.flush()


def _receive(stream: BinaryIO) -> bytes | None:
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    return stream.read(length)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
