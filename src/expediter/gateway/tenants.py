"""Who may come in, and on which terms: tenants, known by their API keys.

Keys are kept as SHA-256 hashes only. They are long random texts, so that a plain hash is enough: nobody can try them.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from expediter.control.limits import NO_LIMITS, Limits
from expediter.core.errors import ConfigurationError
from expediter.core.slo import SloClass

DEFAULT_TENANT: Final = "default"
"""Whose the keys are that were given without a name."""
KEY_PREFIX: Final = "sk-exp-"
_KEY_BYTES: Final = 32
_SCHEME: Final = b"bearer "
_HASH: Final = re.compile(r"[0-9a-f]{64}")


def new_key() -> str:
    """Return a new random key."""
    return KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def hash_of(key: str) -> str:
    """Return what a configuration file may hold of a key: its SHA-256, in hexadecimal."""
    return hashlib.sha256(key.encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tenant:
    """Somebody who shares the server with others; one object per tenant and book.

    Args:
        name: "" for whoever comes without a key.
        weight: share relative to others under the fair orderings.
        priority: of its requests, lower first. A request may ask for a higher number, never for a lower one; None if
            each request may say what it likes.
        models: names that it may ask for; None for all.
        slo_class: of requests that name none; "" for none.
        limits: what it may use.
        slo_classes: those that its requests may name.
    Raises:
        ConfigurationError: the weight is out of range, or there is no such class.
    """

    name: str = ""
    weight: float = 1.0
    priority: int | None = None
    models: frozenset[str] | None = None
    slo_class: str = ""
    limits: Limits = NO_LIMITS
    slo_classes: Mapping[str, SloClass] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ConfigurationError(f"{self.title}: weight must be a number above 0, not {self.weight}")
        if self.slo_class and self.slo_class not in self.slo_classes:
            raise ConfigurationError(f"{self.title}: there is no SLO class {self.slo_class!r}")

    @property
    def title(self) -> str:
        """What to call it in a message."""
        return f"tenant {self.name!r}" if self.name else "[anonymous]"

    def may_use(self, model: str) -> bool:
        """Return whether its requests may ask for a model."""
        return self.models is None or model in self.models

    def priority_of(self, asked: int | None) -> int:
        """Return the priority of a request that asks for one, or for none."""
        if self.priority is None:
            return asked or 0
        return self.priority if asked is None else max(self.priority, asked)

    def cache_salt(self, asked: str | None) -> str:
        """Return the root of the prefix cache for a request: two tenants never share one, whatever they ask for.

        Names hold no slash, so what stands before the first one is the tenant.
        """
        return f"{self.name}/{asked or ''}" if self.name or asked else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantConfig:
    """A tenant as an operator describes it; fields as in `Tenant`.

    Args:
        key_hashes: SHA-256 of its keys, hexadecimal.
        key_env: environment variables that hold keys of it as they are.
    """

    key_hashes: tuple[str, ...] = ()
    key_env: tuple[str, ...] = ()
    weight: float = 1.0
    priority: int | None = None
    models: tuple[str, ...] | None = None
    slo_class: str = ""
    limits: Limits = NO_LIMITS

    def tenant(self, name: str, slo_classes: Mapping[str, SloClass]) -> Tenant:
        """Return the tenant that is described."""
        return Tenant(
            name=name,
            weight=self.weight,
            priority=self.priority,
            models=None if self.models is None else frozenset(self.models),
            slo_class=self.slo_class,
            limits=self.limits,
            slo_classes=slo_classes,
        )

    def hashes(self, title: str, environment: Mapping[str, str]) -> list[str]:
        """Return the hashes of all its keys.

        Raises:
            ConfigurationError: one is no hash, a variable is not set, or there is none at all.
        """
        for number, text in enumerate(self.key_hashes, 1):
            if not _HASH.fullmatch(text):
                raise ConfigurationError(f"{title}: key_hashes number {number} is not 64 hexadecimal digits")
        for variable in self.key_env:
            if not environment.get(variable):
                raise ConfigurationError(f"{title}: the environment variable {variable} is not set")
        found = [*self.key_hashes, *(hash_of(environment[variable]) for variable in self.key_env)]
        if not found:
            raise ConfigurationError(f"{title} has no key: give it key_hashes or key_env")
        return found


class TenantBook:
    """All tenants of a server at one time; it does not change.

    Args:
        tenants: by name.
        anonymous: who comes without a key; None if nobody may, unless nobody has a key.
        slo_classes: by name.
        keys: of the tenant `DEFAULT_TENANT`, as they are.
        environment: where `key_env` looks.
    Attributes:
        tenants: by name, the anonymous one among them if it may come in.
        slo_classes: as given.
    Raises:
        ConfigurationError: something in it cannot be; the message names the tenant and never a key.
    """

    def __init__(
        self,
        tenants: Mapping[str, TenantConfig] | None = None,
        anonymous: TenantConfig | None = None,
        *,
        slo_classes: Mapping[str, SloClass] | None = None,
        keys: Iterable[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.slo_classes = classes = slo_classes or {}
        described = {name: config.tenant(name, classes) for name, config in (tenants or {}).items()}
        self._by_hash: dict[bytes, tuple[bytes, Tenant]] = {}
        for name, config in (tenants or {}).items():
            self._give(described[name], config.hashes(described[name].title, environment or {}))
        given = list(keys)
        if not all(given):
            raise ConfigurationError("an API key must not be empty")
        if given:
            default = described.setdefault(DEFAULT_TENANT, Tenant(name=DEFAULT_TENANT, slo_classes=classes))
            self._give(default, map(hash_of, given))
        if anonymous is None and not self._by_hash:
            anonymous = TenantConfig()
        self.anonymous = None if anonymous is None else anonymous.tenant("", classes)
        if self.anonymous is not None:
            described[""] = self.anonymous
        self.tenants: Mapping[str, Tenant] = described

    def _give(self, tenant: Tenant, hashes: Iterable[str]) -> None:
        for text in hashes:
            digest = bytes.fromhex(text)
            _, owner = self._by_hash.setdefault(digest, (digest, tenant))
            if owner is not tenant:
                raise ConfigurationError(f"{owner.title} and {tenant.title} have the same API key")

    @property
    def has_keys(self) -> bool:
        """Whether anybody has a key."""
        return bool(self._by_hash)

    def of_key(self, key: bytes) -> Tenant | None:
        """Return whose key this is, if anybody's.

        How long it takes says nothing of the keys: what is looked up is a hash, which a caller cannot choose, in a
        table whose order it cannot know, and what is found is compared in constant time.
        """
        given = hashlib.sha256(key).digest()
        entry = self._by_hash.get(given)
        return entry[1] if entry is not None and hmac.compare_digest(given, entry[0]) else None


class Tenants:
    """The tenants of a running server, which everybody shares who asks for them.

    Attributes:
        book: in force now; another may be put in its place at any time, for requests that come from then on.
    """

    def __init__(self, book: TenantBook) -> None:
        self.book = book

    @property
    def limits(self) -> dict[str, Limits]:
        """What each may use, by name."""
        return {name: tenant.limits for name, tenant in self.book.tenants.items()}

    @property
    def weights(self) -> dict[str, float]:
        """Share of each, by name."""
        return {name: tenant.weight for name, tenant in self.book.tenants.items()}

    def of(self, authorization: bytes | None, x_api_key: bytes | None = None) -> Tenant | None:
        """Return who a request is from, by its headers `Authorization: Bearer KEY` or `X-Api-Key: KEY`; None: nobody.

        Where nobody has a key, any is taken: many clients cannot do without. Where somebody has, a wrong one is
        nobody's, even beside an anonymous tenant: its owner would take that one's limits for its own. So are two keys
        of different tenants.
        """
        book = self.book
        if not book.has_keys or (authorization is None and x_api_key is None):
            return book.anonymous
        if authorization is None:
            assert x_api_key is not None
            return book.of_key(x_api_key.strip())
        if authorization[: len(_SCHEME)].lower() != _SCHEME:
            return None
        tenant = book.of_key(authorization[len(_SCHEME) :].strip())
        if x_api_key is not None and book.of_key(x_api_key.strip()) is not tenant:
            return None
        return tenant
