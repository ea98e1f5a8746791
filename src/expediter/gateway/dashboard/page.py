"""The live page as one document: style and scripts are inside, and nothing else may be loaded or run."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib import resources
from typing import Final

from expediter.pages.assets import plotting_script, plotting_style

_PLACES: Final = ("/*STYLE*/", "/*UPLOT*/", "/*SCRIPT*/")


@cache
def dashboard_page() -> tuple[bytes, dict[str, str]]:
    """Return the document and the headers that it is sent with.

    The content policy names what is inside by its hash: a name that a client chose could not become a script even if
    the page put it into its text as HTML, which it never does.
    """
    parts = (f"{plotting_style()}{_asset('dashboard.css')}", plotting_script(), _asset("dashboard.js"))
    html = _asset("dashboard.html")
    for place, part in zip(_PLACES, parts, strict=True):
        html = html.replace(place, part)
    style, *scripts = map(_hash, parts)
    policy = (
        f"default-src 'none'; style-src {style}; script-src {' '.join(scripts)}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }
    return html.encode(), headers


def _hash(part: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()}'"


def _asset(name: str) -> str:
    return (resources.files("expediter.gateway.dashboard") / "assets" / name).read_text("utf-8")
