"""The parts of a page as text, to be put into it: a page loads nothing from elsewhere."""

from __future__ import annotations

from importlib import resources


def plotting_style() -> str:
    """Return the style sheet that plots need, and the colours."""
    return f"{_asset('uPlot.min.css')}\n{_asset('colours.css')}"


def plotting_script() -> str:
    """Return the script that defines `uPlot`, behind its licence."""
    return f"/*\n{_asset('uPlot-LICENSE')}*/\n{_asset('uPlot.iife.min.js')}"


def _asset(name: str) -> str:
    return (resources.files("expediter.pages") / "assets" / name).read_text("utf-8")
