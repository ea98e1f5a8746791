"""The configuration file that `serve` and `simulate` share.

[slo_classes.interactive]
ttft_s = 0.5
tpot_s = 0.05
value = 2.0          # weight in goodput, 1 by default
refuse_late = true   # rather refused than late, false by default

[tenants.alice]      # of a server: who may come in, see docs/tenants.md
key_hashes = ["..."] # SHA-256 of its keys; `expediter key` makes one
key_env = ["ALICE_KEY"]           # environment variables that hold keys of it as they are
weight = 2.0
priority = -1
models = ["small"]
slo_class = "interactive"
max_requests_per_minute = 600
max_tokens_per_minute = 100_000
max_concurrent_requests = 16

[anonymous]          # who comes without a key: the same, without keys

[queue]              # of a server: where requests wait while all replicas are at their limit
ordering = "fair_share"
max_requests = 1024
max_tokens = 4_194_304

[door]               # of a server: patience and limits of its main listener, see docs/backends.md
min_progress_s = 10.0
max_body_bytes = 16_777_216

[[backends]]         # of a server: whom it stands in front of, see docs/backends.md
url = "http://10.0.0.1:8000"

[routing]            # of a server: how a backend is chosen; the fields of `control.routing.build.RoutingConfig`
name = "predicted_ttft"
index_max_bytes = 268_435_456

[health]             # of a server: when a backend is left out; the fields of `control.health.HealthConfig`
max_failures_in_a_row = 3

[failures]           # of a simulation: the fields of `sim.failures.FailureConfig`
crash_every_s = 600.0
crashes = [{replica = 0, at_s = 10.0, down_s = 30.0}]
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from expediter.assembly.file_sections import PlacedError, Section, Table, TomlLines, sections
from expediter.control.health import HealthConfig
from expediter.control.limits import Limits
from expediter.control.patience import PatienceConfig
from expediter.control.retry import RetryConfig
from expediter.control.routing.build import RoutingConfig
from expediter.control.waiting import QueueConfig
from expediter.core.errors import ConfigurationError
from expediter.core.slo import SloClass
from expediter.gateway.backends.config import BackendConfig
from expediter.gateway.backends.registry import DEFAULT_ROUTING
from expediter.gateway.http.wire import HttpLimits
from expediter.gateway.tenants import TenantBook, TenantConfig
from expediter.sim.failures import NO_FAILURES, Crash, FailureConfig, Slowdown

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NOT_OF_THE_DOOR: Final = ("factor", "share", "min_per_s", "max_saved", "backoff_s", "max_backoff_s")
"""Fields of patience and retries that nobody but a test sets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorLimits:
    """What a door bears: of clients, of silent backends, and in retries."""

    http: HttpLimits = field(default_factory=HttpLimits)
    patience: PatienceConfig = field(default_factory=PatienceConfig)
    retry: RetryConfig = field(default_factory=RetryConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileConfig:
    """What a configuration file says.

    Args:
        slo_classes: by name.
        tenants: by name; of them a simulation uses the weights.
        anonymous, queue, door, backends, routing, health: of a server; a simulation has no use for them.
        failures: what goes wrong in a simulation; a server has no use for them.
        path: of the file; None if there is none.
    Raises:
        ConfigurationError: a name cannot stand in a header or a label.
    """

    slo_classes: Mapping[str, SloClass] = field(default_factory=dict)
    tenants: Mapping[str, TenantConfig] = field(default_factory=dict)
    anonymous: TenantConfig | None = None
    queue: QueueConfig = field(default_factory=QueueConfig)
    door: DoorLimits = field(default_factory=DoorLimits)
    backends: tuple[BackendConfig, ...] = ()
    routing: RoutingConfig = DEFAULT_ROUTING
    health: HealthConfig = field(default_factory=HealthConfig)
    failures: FailureConfig = NO_FAILURES
    path: Path | None = None

    def __post_init__(self) -> None:
        for name in (*self.slo_classes, *self.tenants):
            if not _NAME.fullmatch(name):
                raise ConfigurationError(f"{name!r} is no name: up to 64 of the characters A-Z a-z 0-9 _ . -")

    @property
    def weights(self) -> dict[str, float]:
        """Share of each tenant, by name; "" for who comes without a key."""
        tenants = self.tenants if self.anonymous is None else {**self.tenants, "": self.anonymous}
        return {name: tenant.weight for name, tenant in tenants.items()}

    def tenant_book(self, api_keys: Iterable[str], environment: Mapping[str, str]) -> TenantBook:
        """Return who may come in.

        Args:
            api_keys: keys that were given without a name.
            environment: where the file's `key_env` looks.
        Raises:
            ConfigurationError: a key, a class or a weight is wrong; names the tenant.
        """
        return TenantBook(
            self.tenants, self.anonymous, slo_classes=self.slo_classes, keys=api_keys, environment=environment
        )


_TENANT_KEYS: Final = ("key_hashes", "key_env")
_SECTIONS: Final = ("slo_classes", "tenants", "anonymous", "queue", "door", "backends", "routing", "health", "failures")


def _file(document: Table, lines: TomlLines, path: Path) -> FileConfig:
    """Return what a file says.

    Raises:
        PlacedError: something in it is unknown or out of range.
    """
    for name in document:
        if name not in _SECTIONS:
            raise PlacedError(f"there is no [{name}]; there are: {', '.join(_SECTIONS)}", lines.find((name,), 0, None))

    def table(name: str) -> Section:
        return Section(document.get(name, {}), lines, (name,))

    def named(name: str) -> dict[str, Section]:
        return {key: Section(row, lines, (name, key)) for key, row in table(name).table.items()}

    return FileConfig(
        slo_classes={name: section.only(SloClass) for name, section in named("slo_classes").items()},
        tenants={name: _tenant(section) for name, section in named("tenants").items()},
        anonymous=_tenant(table("anonymous"), _TENANT_KEYS) if "anonymous" in document else None,
        queue=table("queue").only(QueueConfig),
        door=_door(table("door")),
        backends=tuple(
            section.only(BackendConfig)
            for section in sections(document.get("backends", []), lines, ("backends",), "url")
        ),
        routing=table("routing").only(RoutingConfig, DEFAULT_ROUTING),
        health=table("health").only(HealthConfig),
        failures=_failures(table("failures")),
        path=path,
    )


def _tenant(section: Section, but: Sequence[str] = ()) -> TenantConfig:
    section.allow(TenantConfig, Limits, but=("limits", *but))
    return section.make(TenantConfig, limits=section.make(Limits))


def _door(section: Section) -> DoorLimits:
    """Return what `[door]` says: the fields of `HttpLimits`, and some about backends."""
    section.allow(HttpLimits, PatienceConfig, RetryConfig, but=_NOT_OF_THE_DOOR)
    return DoorLimits(
        http=section.make(HttpLimits), patience=section.make(PatienceConfig), retry=section.make(RetryConfig)
    )


def _failures(section: Section) -> FailureConfig:
    section.allow(FailureConfig)
    crashes = tuple(part.only(Crash) for part in section.parts("crashes"))
    slowdowns = tuple(part.only(Slowdown) for part in section.parts("slowdowns"))
    return section.make(FailureConfig, crashes=crashes, slowdowns=slowdowns)


def load_file_config(path: str | Path | None) -> FileConfig:
    """Read a configuration file; without one everything is as if it were empty.

    Raises:
        ConfigurationError: the file cannot be read, or something in it is unknown or out of range.
    """
    if path is None:
        return FileConfig()
    try:
        text = Path(path).read_text("utf-8")
        return _file(tomllib.loads(text), TomlLines(text), Path(path))
    except OSError as error:
        raise ConfigurationError(f"cannot read {str(path)!r}: {error.strerror}") from error
    except PlacedError as error:
        place = path if error.line is None else f"{path}:{error.line}"
        raise ConfigurationError(f"{place}: {error}") from error
    except (ValueError, ConfigurationError) as error:  # of TOML and its encoding; of names
        raise ConfigurationError(f"{path}: {error}") from error
