"""Figures in words, as reports write them."""

from __future__ import annotations

from collections.abc import Iterable


def number(value: float) -> str:
    """Return a number with three digits; whole numbers as they are."""
    if value == round(value) or abs(value) >= 999.5:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".")


def seconds(value: float | None) -> str:
    """Return a time in seconds or milliseconds; a dash if there is none."""
    if value is None:
        return "-"
    return f"{number(value * 1000)} ms" if 0 < value < 0.9995 else f"{number(value)} s"


def percent(share: float) -> str:
    """Return a share in percent with two or three digits, never rounded to all or nothing."""
    value = share * 100
    if 0 < value < 0.1:
        return "under 0.1 %"
    if 99.9 < value < 100:
        return "over 99.9 %"
    digits = 0 if value >= 99.95 or 10 <= value < 99 else 1
    return f"{f'{value:.{digits}f}'.removesuffix('.0')} %"


def listed(names: Iterable[str]) -> str:
    """Return names as a list in a sentence; there must be one."""
    *rest, last = names
    return f"{', '.join(rest)} and {last}" if rest else last
