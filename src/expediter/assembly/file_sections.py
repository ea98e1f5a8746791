"""Tables of a TOML file, and errors that say in which of them something is wrong, and on which line."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from expediter.core.errors import ConfigurationError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_AT_FIELD: Final = re.compile(r"(?P<what>.*) - at `\$\.(?P<field>\w+)(?P<rest>.*)`", re.DOTALL)
_WORD: Final = re.compile(r"\w+")

_Made = TypeVar("_Made", bound="DataclassInstance")
Table = Mapping[str, Any]


class PlacedError(ConfigurationError):
    """Something in a file cannot be used.

    Attributes:
        line: where it stands, from 1; None if that is not known.
    """

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line


@dataclass(frozen=True, slots=True)
class _Header:
    """One that opens a table: which one, of an array the how manyth from 0, and the lines up to the next one."""

    path: tuple[str, ...]
    number: int
    first: int
    end: int


class TomlLines:
    """Where in a text things stand, looked for line by line; what is not found has no line.

    Args:
        text: of a file that tomllib has read.
    """

    def __init__(self, text: str) -> None:
        self._lines = text.splitlines()
        found = [(row, path) for row, line in enumerate(self._lines) if (path := _opened(line))]
        ends = [row for row, _ in found][1:] + [len(self._lines)] * bool(found)
        counts: dict[tuple[str, ...], int] = {}
        self._headers: list[_Header] = []
        for (row, path), end in zip(found, ends, strict=True):
            number = counts[path] = counts.get(path, -1) + 1
            self._headers.append(_Header(path, number, row, end))

    def find(self, path: tuple[str, ...], number: int, field: str | None) -> int | None:
        """Return the line of a table's field, or else of the table, from 1; None if it is not found."""
        header = next((each for each in self._headers if (each.path, each.number) == (path, number)), None)
        if header is None:
            return None
        if field is not None:
            key = re.compile(rf"\s*[\"']?{re.escape(field)}[\"']?\s*[.=]")
            for row in range(header.first + 1, header.end):
                if key.match(self._lines[row]):
                    return row + 1
        return header.first + 1


def _opened(line: str) -> tuple[str, ...]:
    """Return which table a line opens; () if none."""
    if not line.lstrip().startswith("["):
        return ()
    try:
        value: object = tomllib.loads(line)
    except tomllib.TOMLDecodeError:
        return ()
    path: list[str] = []
    while isinstance(value, dict) and len(value) == 1:
        key, value = next(iter(value.items()))
        path.append(key)
        value = value[0] if isinstance(value, list) else value
    return tuple(path)


class Section:
    """One table.

    Args:
        path: names that lead to it. `number`: from 0, of one in an array.
        name: that it gives itself, for errors.
    """

    def __init__(
        self, table: object, lines: TomlLines, path: tuple[str, ...], number: int | None = None, name: str = ""
    ) -> None:
        joined = ".".join(path)
        self.title = f"[{joined}]" if number is None else f"[[{joined}]] number {number + 1}"
        self.title += f" ({name})" if name else ""
        self._lines = lines
        self._path = path
        self._number = number or 0
        if not isinstance(table, dict):
            raise self.error("is no table")
        self.table: Table = table

    def error(self, message: str, field: str | None = None) -> PlacedError:
        """Return the error for something in it."""
        return PlacedError(f"{self.title} {message}", self._lines.find(self._path, self._number, field))

    def allow(self, *kinds: type[DataclassInstance], but: Collection[str] = ()) -> None:
        """Refuse what is a field of none of these configurations, or one of those that do not count."""
        known = {field.name for kind in kinds for field in fields(kind)} - set(but)
        for field in self.table:
            if field not in known:
                raise self.error(f"has no {field!r}; there are: {', '.join(sorted(known))}", field)

    def make(self, kind: type[_Made], base: _Made | None = None, **more: object) -> _Made:
        """Return a configuration with those of its fields that the table has, strictly typed.

        Args:
            base: has the others; None for the usual ones.
            more: fields that do not come from the table.
        Raises:
            PlacedError: a field is of another type or out of range.
        """
        names = [field.name for field in fields(kind) if field.name in self.table and field.name not in more]
        try:
            given = msgspec.convert({name: self.table[name] for name in names}, kind)
            if base is not None:
                given = replace(base, **{name: getattr(given, name) for name in names})
            return replace(given, **more) if more else given
        except msgspec.ValidationError as error:
            at = _AT_FIELD.fullmatch(str(error))
            if at is None:
                raise self.error(str(error)) from error
            raise self.error(f"{at['field']}{at['rest']}: {at['what']}", at["field"]) from error
        except ConfigurationError as error:
            field = next((word for word in _WORD.findall(str(error)) if word in self.table), None)
            raise self.error(str(error), field) from error

    def only(self, kind: type[_Made], base: _Made | None = None) -> _Made:
        """Return the configuration that the table is."""
        self.allow(kind)
        return self.make(kind, base)

    def parts(self, field: str, title_field: str = "") -> list[Section]:
        """Return the tables of an array that is one of its fields."""
        return sections(self.table.get(field, []), self._lines, (*self._path, field), title_field)


def sections(array: object, lines: TomlLines, path: tuple[str, ...], title_field: str = "") -> list[Section]:
    """Return the tables of an array, each named by one of its own fields."""
    if not isinstance(array, list):
        raise PlacedError(f"[{'.'.join(path)}] is no array of tables: begin each with [[{'.'.join(path)}]]")
    return [
        Section(table, lines, path, number, str(table.get(title_field, "")) if isinstance(table, dict) else "")
        for number, table in enumerate(array)
    ]
