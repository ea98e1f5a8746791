"""A study's report as one HTML file that needs nothing beside it: tables, plots by uPlot, and what draws them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from typing import Any, Final, Literal

import msgspec

from expediter.pages.assets import plotting_script, plotting_style

Unit = Literal["s", "share", "number"]
_NUM_SERIES_COLOURS: Final = 12
_NUM_PART_COLOURS: Final = 8
_CONTENT_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


class Markup(str):
    """Text that is HTML already; all other text is escaped."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """An axis of a plot.

    Args:
        label: what it shows, with the unit.
        name: the same in a word or two, for the legend.
        unit: how values are written.
        min, max: where it ends; None for where the values do.
    """

    label: str
    name: str = ""
    unit: Unit = "number"
    log: bool = False
    min: float | None = None
    max: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A line of a plot; `dash` None is for lines that are there for orientation only."""

    name: str
    colour: str
    dash: int | None = None


def lines(names: Sequence[str]) -> list[Series]:
    """Return a line per name; a place among them gives the same colour in every plot."""
    return [
        Series(name=name, colour=f"series-{place % _NUM_SERIES_COLOURS}", dash=place)
        for place, name in enumerate(names)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A vertical line with a word beside it."""

    x: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a plot shows.

    Args:
        x: ascending.
        y: for each series a value, or None for a gap, at each x.
        ranges: for each series the lowest and highest value at each x, or None.
        marks: vertical lines.
    """

    x: Sequence[float]
    y: Sequence[Sequence[float | None]]
    ranges: Sequence[Sequence[tuple[float, float]] | None] = ()
    marks: Sequence[Mark] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A plot.

    Args:
        name: unique on the page; letters, digits and dashes.
        caption: how to read it.
        views: by the page's choice, or one under "" that does not depend on it.
        points: whether the values are marked.
        wide: whether it takes the page's whole width.
    """

    name: str
    title: str
    caption: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    views: Mapping[str, View]
    points: bool = False
    wide: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A bar of parts that add up.

    Args:
        parts: by name; what is not there is 0.
        total: what is written beside it.
    """

    name: str
    parts: Mapping[str, float]
    total: str


@dataclass(slots=True)
class Page:
    """A page as it is put together.

    Args:
        title: of the document.
        choices: what the reader may choose between, as (value, what is said beside it); plots and `choice_views`
            follow it.
        chosen: the first choice.
        chosen_what: what is chosen, such as "Load".
    """

    title: str
    choices: Sequence[tuple[str, str]] = ()
    chosen: str = ""
    chosen_what: str = ""
    _parts: list[str] = field(default_factory=list)
    _figures: list[Figure] = field(default_factory=list)

    def add(self, *parts: str) -> None:
        """Append text; plain text becomes a paragraph."""
        self._parts += [part if isinstance(part, Markup) else f"<p>{words(part)}</p>" for part in parts]

    def figure(self, figure: Figure) -> Markup:
        """Return a plot for `add` or `grid`."""
        self._figures.append(figure)
        return _framed(figure.title, f'<div class="plot" id="{figure.name}"></div>', figure.caption, figure.wide)

    def choice(self) -> Markup:
        """Return the buttons to choose with."""
        buttons = []
        for value, beside in self.choices:
            checked = " checked" if value == self.chosen else ""
            text = f"{escape(value)} <small>{escape(beside)}</small>"
            radio = f'<input type="radio" name="view" value="{escape(value)}"{checked}>'
            buttons.append(f"<label>{radio}<span>{text}</span></label>")
        legend = f"<legend>{escape(self.chosen_what)}</legend>"
        return Markup(f'<fieldset class="choice">{legend}{"".join(buttons)}</fieldset>')

    def choice_views(self, views: Mapping[str, str]) -> Markup:
        """Return something of which only what belongs to the choice is shown."""
        beside = dict(self.choices)
        parts = []
        for value, content in views.items():
            at = escape(f"{self.chosen_what} {value}, {beside[value]}")
            parts.append(f'<div data-view="{escape(value)}"><p class="at">{at}</p>{content}</div>')
        return Markup("".join(parts))

    def html(self) -> str:
        """Return the whole document; it loads nothing, and may not either."""
        data = {"view": self.chosen, "figures": {figure.name: _data_of(figure) for figure in self._figures}}
        # What ends a script must not stand inside one.
        json = msgspec.json.encode(data).decode().replace("<", "\\u003c")
        return "\n".join(
            (
                "<!doctype html>",
                '<html lang="en">',
                "<head>",
                '<meta charset="utf-8">',
                f'<meta http-equiv="Content-Security-Policy" content="{_CONTENT_POLICY}">',
                '<meta name="viewport" content="width=device-width, initial-scale=1">',
                '<meta name="color-scheme" content="light dark">',
                f"<title>{escape(self.title)}</title>",
                f"<style>\n{plotting_style()}{_asset('report.css')}</style>",
                "</head>",
                "<body>",
                *self._parts,
                "<noscript><p>The plots need JavaScript; the tables hold the same figures.</p></noscript>",
                f'<script type="application/json" id="data">{json}</script>',
                f"<script>\n{plotting_script()}\n</script>",
                f"<script>\n{_asset('report.js')}</script>",
                "</body>",
                "</html>\n",
            )
        )


def heading(text: str) -> Markup:
    """Return a section's heading."""
    return Markup(f"<h2>{escape(text)}</h2>")


def subheading(text: str) -> Markup:
    """Return a heading below a section's."""
    return Markup(f"<h3>{escape(text)}</h3>")


def section(*parts: Markup) -> Markup:
    """Return parts as one; a choice in it stays in sight while the reader is in it."""
    return Markup(f"<section>{''.join(parts)}</section>")


def items(texts: Iterable[str]) -> Markup:
    """Return a list."""
    return Markup(f"<ul>{''.join(f'<li>{_text(text)}</li>' for text in texts)}</ul>")


def grid(*figures: Markup) -> Markup:
    """Return figures side by side, where there is room."""
    return Markup(f'<div class="figures">{"".join(figures)}</div>')


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, is_text: bool = False) -> Markup:
    """Return a table of figures, or of words; the first column names the rows.

    A cell may be `Markup`, its <td> included.
    """
    cells = "".join(f'<th scope="col">{_text(name)}</th>' for name in head)
    body = "".join(f"<tr>{''.join(_cell(cell, place) for place, cell in enumerate(row))}</tr>" for row in rows)
    kind = ' class="left"' if is_text else ""
    return Markup(
        f'<div class="scroll"><table{kind}><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def facts(rows: Iterable[tuple[str, str]]) -> Markup:
    """Return a table of names and what is said of them."""
    body = "".join(f'<tr><th scope="row">{escape(name)}</th><td>{_text(text)}</td></tr>' for name, text in rows)
    return Markup(f'<div class="scroll"><table class="words"><tbody>{body}</tbody></table></div>')


def bars(bars_: Sequence[Bar], parts: Mapping[str, str]) -> Markup:
    """Return bars to one scale, below a key of their parts.

    Args:
        parts: label of each part, by name, in order.
    """
    used = [name for name in parts if any(bar.parts.get(name) for bar in bars_)]
    colours = {name: f"var(--part-{place % _NUM_PART_COLOURS})" for place, name in enumerate(parts)}
    longest = max((sum(bar.parts.values()) for bar in bars_), default=0.0)
    key = "".join(f'<li><i style="background:{colours[name]}"></i>{escape(parts[name])}</li>' for name in used)
    rows = []
    for bar in bars_:
        segments = "".join(
            f'<i style="width:{bar.parts[name] / longest * 100:.2f}%;background:{colours[name]}"'
            f' title="{escape(parts[name])}"></i>'
            for name in used
            if bar.parts.get(name)
        )
        track = f'<span class="track">{segments}</span>'
        rows.append(f'<b>{escape(bar.name)}</b>{track}<span class="total">{escape(bar.total)}</span>')
    return Markup(f'<ul class="key">{key}</ul><div class="bars">{"".join(rows)}</div>')


def framed(title: str, content: Markup, caption: str) -> Markup:
    """Return something under a title with a caption, as wide as the page."""
    return _framed(title, content, caption, wide=True)


def _framed(title: str, content: str, caption: str, wide: bool) -> Markup:
    kind = ' class="wide"' if wide else ""
    return Markup(f"<figure{kind}><h3>{escape(title)}</h3>{content}<figcaption>{words(caption)}</figcaption></figure>")


def words(text: str) -> Markup:
    """Return text as HTML, a number and its unit on one line."""
    return Markup(re.sub(r"(?<=\d) (?=%|s\b|ms\b)", "\u00a0", escape(text)))


def _text(text: str) -> str:
    return text if isinstance(text, Markup) else words(text)


def _cell(cell: str, place: int) -> str:
    if isinstance(cell, Markup):
        return cell
    return f"<td>{escape(cell)}</td>" if place else f'<th scope="row">{escape(cell)}</th>'


def _asset(name: str) -> str:
    return (resources.files("expediter.studies") / "assets" / name).read_text("utf-8")


def _data_of(figure: Figure) -> dict[str, Any]:
    return {
        "x": msgspec.to_builtins(figure.x),
        "y": msgspec.to_builtins(figure.y),
        "series": msgspec.to_builtins(figure.series),
        "points": figure.points,
        "views": {
            choice: {
                "x": _shortened(view.x),
                "y": [_shortened(row) for row in view.y],
                "ranges": [None if row is None else [_shortened(pair) for pair in row] for row in view.ranges],
                "marks": msgspec.to_builtins(view.marks),
            }
            for choice, view in figure.views.items()
        },
    }


def _shortened(values: Iterable[float | None]) -> list[float | None]:
    """Return the values with as many digits as can be seen."""
    return [None if value is None else float(f"{value:.5g}") for value in values]
