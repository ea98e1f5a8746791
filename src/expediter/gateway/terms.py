"""What a request asks to be judged by, from its body, its headers and the class that it names."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from starlette.datastructures import Headers

from expediter.core.slo import NO_SLO, Slo, SloClass
from expediter.gateway.bodies import MAX_SESSION_CHARS, MAX_TARGET_MS, GenerationBody
from expediter.gateway.errors import bad_request

_NUMBER: Final = re.compile(r"[0-9]{1,12}(\.[0-9]{1,12})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Whose request it is and what it is judged by; fields as in `core.Request`."""

    tenant: str = ""
    session: str = ""
    slo: Slo = NO_SLO
    slo_class: str = ""
    value: float = 1.0
    refuse_late: bool = False


def terms_of(body: GenerationBody, headers: Headers, classes: Mapping[str, SloClass], tenant: str) -> Terms:
    """Return the terms; each target comes from the body, else from its header, else from the class.

    Args:
        tenant: as the API key says; neither body nor headers may set it.
    Raises:
        ApiError: 400, naming the field or header: a value is malformed, or there is no such class.
    """
    name, where = body.slo_class, "slo_class"
    if name is None:
        name, where = _header(headers, "X-SLO-Class"), "X-SLO-Class"
    if name is not None and name not in classes:
        known = f"there are: {', '.join(sorted(classes))}" if classes else "the server has none configured"
        raise bad_request(f"no such SLO class; {known}", where)
    own = Slo(
        ttft_s=_seconds(body.ttft_ms, headers, "X-SLO-TTFT-Ms"),
        tpot_s=_seconds(body.tpot_ms, headers, "X-SLO-TPOT-Ms"),
        e2e_s=_seconds(body.deadline_ms, headers, "X-Deadline-Ms"),
    )
    base = SloClass() if name is None else classes[name]
    return Terms(
        tenant=tenant,
        session=body.prompt_cache_key or _session(headers),
        slo=base.with_targets(own),
        slo_class=name or "",
        value=base.value,
        refuse_late=base.refuse_late if body.refuse_late is None else body.refuse_late,
    )


def _seconds(in_body: float | None, headers: Headers, header: str) -> float | None:
    given = _header(headers, header)  # looked at in any case: a malformed one is a mistake even where it loses
    if given is not None:
        in_header = float(given) if _NUMBER.fullmatch(given) else math.nan
        if not 0 < in_header <= MAX_TARGET_MS:
            raise bad_request(f"{header} must be a number of milliseconds above 0, at most {MAX_TARGET_MS:.0f}", header)
        return (in_header if in_body is None else in_body) / 1000
    return None if in_body is None else in_body / 1000


def _session(headers: Headers) -> str:
    session = _header(headers, "X-Session-Id") or ""
    if len(session) > MAX_SESSION_CHARS:
        raise bad_request(f"X-Session-Id must have at most {MAX_SESSION_CHARS} characters", "X-Session-Id")
    return session


def _header(headers: Headers, name: str) -> str | None:
    values = headers.getlist(name)
    if len(values) > 1:
        raise bad_request(f"{name} is given more than once", name)
    return values[0].strip() if values else None
