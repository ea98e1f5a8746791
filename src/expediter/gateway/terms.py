"""What a request asks to be judged by, from its body, its headers and the class that it names."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Protocol

from expediter.core.slo import NO_SLO, Slo, SloClass
from expediter.gateway.errors import bad_request
from expediter.gateway.tenants import Tenant

MAX_SESSION_CHARS: Final = 256
MAX_TARGET_MS: Final = 1e9

_NUMBER: Final = re.compile(rb"[0-9]{1,12}(\.[0-9]{1,12})?")
_SESSION_HEADERS: Final = (b"x-session-id", b"x-session-affinity", b"session_id")
_TITLES: Final = {
    b"x-slo-class": "X-SLO-Class",
    b"x-slo-ttft-ms": "X-SLO-TTFT-Ms",
    b"x-slo-tpot-ms": "X-SLO-TPOT-Ms",
    b"x-deadline-ms": "X-Deadline-Ms",
    b"x-session-id": "X-Session-Id",
    b"x-session-affinity": "X-Session-Affinity",
    b"session_id": "session_id",
}
TERM_HEADERS: Final = frozenset(_TITLES)
"""Names of the headers that `terms_of` looks at."""
_FIELDS: Final = {b"x-slo-ttft-ms": "ttft_ms", b"x-slo-tpot-ms": "tpot_ms", b"x-deadline-ms": "deadline_ms"}
_Given = dict[bytes, bytes]


class Asked(Protocol):
    """The fields of a body that matter here."""

    @property
    def slo_class(self) -> str | None: ...
    @property
    def ttft_ms(self) -> float | None: ...
    @property
    def tpot_ms(self) -> float | None: ...
    @property
    def deadline_ms(self) -> float | None: ...
    @property
    def refuse_late(self) -> bool | None: ...
    @property
    def prompt_cache_key(self) -> str | None: ...
    @property
    def priority(self) -> int | None: ...
    @property
    def cache_salt(self) -> str | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Whose request it is and what it is judged by; fields as in `core.Request`.

    Attributes:
        cache_salt: derived from tenant and request; two tenants never have the same.
        deadline_s: after its arrival, when it stops making sense: the request's own. The target of a class for the end
            is one to be judged by.
        arrived_s: when it came in, by the monotonic clock; None for when somebody begins to work for it.
    """

    tenant: str = ""
    priority: int = 0
    cache_salt: str = ""
    session: str = ""
    slo: Slo = NO_SLO
    slo_class: str = ""
    value: float = 1.0
    refuse_late: bool = False
    deadline_s: float | None = None
    arrived_s: float | None = None


_PLAIN: Final = SloClass()


def terms_of(body: Asked, headers: Iterable[tuple[bytes, bytes]], tenant: Tenant) -> Terms:
    """Return the terms; each target comes from the body, else from its header, else from the class.

    The class is the one that body or header name, else the tenant's.

    Args:
        headers: as they came; names in lower case.
        tenant: as the API key says; neither body nor headers may set it.
    Raises:
        ApiError: 400, naming the field or header: a value is malformed, or there is no such class.
    """
    given = _given(headers)
    if not given and not tenant.slo_class and _asks_nothing(body):
        return _plain_terms(tenant)
    name, base = _class(body.slo_class, given.get(b"x-slo-class"), tenant)
    deadline_s = _seconds(body.deadline_ms, given, b"x-deadline-ms")
    own = Slo(
        ttft_s=_seconds(body.ttft_ms, given, b"x-slo-ttft-ms"),
        tpot_s=_seconds(body.tpot_ms, given, b"x-slo-tpot-ms"),
        e2e_s=deadline_s,
    )
    return Terms(
        tenant=tenant.name,
        priority=tenant.priority_of(body.priority),
        cache_salt=tenant.cache_salt(body.cache_salt),
        session=_session(body.prompt_cache_key, given),
        slo=base.with_targets(own),
        slo_class=name,
        value=base.value,
        refuse_late=base.refuse_late if body.refuse_late is None else body.refuse_late,
        deadline_s=deadline_s,
    )


def _given(headers: Iterable[tuple[bytes, bytes]]) -> _Given:
    """Return the headers that are terms."""
    given: _Given = {}
    for name, value in headers:
        if name in _TITLES:
            if name in given:
                raise bad_request(f"{_TITLES[name]} is given more than once", _TITLES[name])
            given[name] = value.strip()
    return given


@lru_cache(4096)
def _plain_terms(tenant: Tenant) -> Terms:
    """Return the terms of a request that says nothing about them, as most do: one object for all of a tenant's."""
    return Terms(tenant=tenant.name, priority=tenant.priority_of(None), cache_salt=tenant.cache_salt(None))


def _asks_nothing(body: Asked) -> bool:
    return (
        body.slo_class is None
        and body.ttft_ms is None
        and body.tpot_ms is None
        and body.deadline_ms is None
        and body.priority is None
        and not body.refuse_late
        and not body.prompt_cache_key
        and not body.cache_salt
    )


def _class(in_body: str | None, in_header: bytes | None, tenant: Tenant) -> tuple[str, SloClass]:
    """Return the name and the class that counts; "" and one without targets if there is none."""
    if in_body is not None:
        name, where = in_body, "slo_class"
    elif in_header is not None:
        name, where = in_header.decode("latin-1"), "X-SLO-Class"
    elif tenant.slo_class:
        name, where = tenant.slo_class, ""
    else:
        return "", _PLAIN
    found = tenant.slo_classes.get(name)
    if found is None:
        names = ", ".join(sorted(tenant.slo_classes))
        known = f"there are: {names}" if names else "the server has none configured"
        raise bad_request(f"no such SLO class; {known}", where)
    return name, found


def _seconds(in_body: float | None, given: _Given, header: bytes) -> float | None:
    text = given.get(header)  # looked at in any case: a malformed one is a mistake even where it loses
    if text is not None:
        in_header = _in_range(float(text) if _NUMBER.fullmatch(text) else math.nan, _TITLES[header])
        if in_body is None:
            return in_header / 1000
    return None if in_body is None else _in_range(in_body, _FIELDS[header]) / 1000


def _in_range(milliseconds: float, where: str) -> float:
    if not (milliseconds / 1000 > 0 and milliseconds <= MAX_TARGET_MS):  # the smallest floats are no time at all
        raise bad_request(f"{where} must be a number of milliseconds above 0, at most {MAX_TARGET_MS:.0f}", where)
    return milliseconds


def _session(in_body: str | None, given: _Given) -> str:
    """Return the session that the body or a header names; different clients call it differently."""
    session, where = in_body or "", "prompt_cache_key"
    for name in _SESSION_HEADERS:
        if not session and name in given:
            session, where = given[name].decode("latin-1"), _TITLES[name]
    if len(session) > MAX_SESSION_CHARS:
        raise bad_request(f"{where} must have at most {MAX_SESSION_CHARS} characters", where)
    return session
