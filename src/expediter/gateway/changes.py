"""What the admin API has changed since the gateway's start, so that a process that is started later knows it, too."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote

import msgspec

logger = logging.getLogger(__name__)

BACKENDS: Final = "/backends"
DRAIN: Final = "/drain"


class Call(NamedTuple):
    """A request to the admin API that changes something. `path` is percent-encoded."""

    method: str
    path: str
    body: bytes


class _Change(msgspec.Struct):
    """How one name differs from what flags and file say.

    Attributes:
        is_removed: the backend of that name that they know is gone.
        body: with which another was added; "" if none was.
        is_drained: the one that is there now.
    """

    is_removed: bool = False
    body: str = ""
    is_drained: bool = False


_STATE: Final = msgspec.json.Decoder(dict[str, _Change])


class Changes:
    """One record for each name, in a file that is replaced as a whole: it has what is different, however it came about.

    It is there for processes that die, not for machines: the file lies in the gateway's own folder and ends with it. So
    it is renamed into its place, which no death of a process leaves half done, and not forced to the disk.

    Args:
        path: of the file. One process writes it; what it finds there at the start is its predecessor's.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._changes = self._read()

    def calls(self) -> Iterator[Call]:
        """Return what has to be asked of an admin API that has seen none of it. Asked again, nothing changes."""
        for name, change in self._changes.items():
            one = f"{BACKENDS}/{quote(name, safe='')}"
            if change.is_removed:
                yield Call("DELETE", one, b"")
            if change.body:
                yield Call("POST", BACKENDS, change.body.encode())
            if change.is_drained:
                yield Call("POST", one + DRAIN, b"{}")

    def note(self, call: Call, name: str) -> None:
        """Take in a call that has been answered.

        Args:
            name: of the backend, as the answer says.
        """
        change = self._changes.get(name)
        if call.method == "DELETE":
            was_added = change is not None and bool(change.body)
            if change is not None and was_added and not change.is_removed:
                del self._changes[name]  # as if it had never been
            else:
                self._changes[name] = _Change(is_removed=True)
        elif call.path == BACKENDS:
            is_removed = change is not None and change.is_removed
            self._changes[name] = _Change(is_removed=is_removed, body=call.body.decode())
        else:
            self._changes.setdefault(name, _Change()).is_drained = True
        self._write()

    def settled(self, names: Iterable[str]) -> None:
        """Say that the file's backends of these names have come or gone: what was changed of theirs is over."""
        for name in names:
            change = self._changes.get(name)
            if change is not None and change.body:
                change.is_removed = False
            elif change is not None:
                del self._changes[name]
        self._write()

    def _read(self) -> dict[str, _Change]:
        try:
            return _STATE.decode(self._path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.DecodeError):
            logger.exception("what was changed before cannot be read; flags and file count alone")
            return {}

    def _write(self) -> None:
        new = self._path.with_suffix(".new")
        try:
            new.write_bytes(msgspec.json.encode(self._changes))
            os.replace(new, self._path)
        except OSError:  # the change is made; who is started later will not know of it
            logger.exception("a change cannot be noted")
