"""What a server's front door is told, and what it says when it is ready."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace

from expediter.assembly.file_config import FileConfig
from expediter.assembly.observing import ObservingConfig
from expediter.control.routing.build import RoutingConfig
from expediter.core.errors import ConfigurationError
from expediter.core.ranges import require_not_negative
from expediter.gateway.admin import ADMIN_KEY_VARIABLE, check_admin_address
from expediter.gateway.backends.config import BackendConfig
from expediter.gateway.salts import SALT_VARIABLE, salt_secret
from expediter.gateway.tenants import TenantBook


def _salt_secret() -> bytes:
    return salt_secret(os.environ.get(SALT_VARIABLE, ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorConfig:
    """A server's front door.

    Args:
        backends: beside those in `file`; none in either: only our own replicas.
        routing: name of the policy among backends; None for the file's.
        api_keys: keys of the default tenant; none here and none in `file`: everybody may come in.
        file: SLO classes, backends, limits, and tenants, which are read again when they change.
        shutdown_timeout_s: for requests in flight at the first signal.
        observing: what is written of requests.
        admin_host, admin_port: of the admin listener; no port for none.
        num_processes: that share the port; more than one only without replicas of our own.
        salt_secret: what salts of prefix caches are made with that backends are told; a random one by default.
    Raises:
        ConfigurationError: a value is out of range.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    backends: tuple[BackendConfig, ...] = ()
    routing: str | None = None
    api_keys: tuple[str, ...] = ()
    file: FileConfig = field(default_factory=FileConfig)
    shutdown_timeout_s: float = 30.0
    observing: ObservingConfig = field(default_factory=ObservingConfig)
    admin_host: str = "127.0.0.1"
    admin_port: int | None = None
    num_processes: int = 1
    salt_secret: bytes = field(default_factory=_salt_secret, repr=False)

    def __post_init__(self) -> None:
        for port in (self.port, self.admin_port or 0):
            if not 0 <= port < 1 << 16:
                raise ConfigurationError(f"port must lie in [0, 65535], not {port}")
        require_not_negative(self, "shutdown_timeout_s")
        if not all(self.api_keys):
            raise ConfigurationError("an API key must not be empty")
        if self.num_processes < 1:
            raise ConfigurationError(f"gateway processes must be at least 1, not {self.num_processes}")
        _ = self.routing_config  # raises if there is no policy of that name
        if self.admin_port is not None:
            check_admin_address(self.admin_host, self.admin_key)

    @property
    def routing_config(self) -> RoutingConfig:
        """How a backend is chosen."""
        routing = self.file.routing
        return routing if self.routing is None else replace(routing, name=self.routing)

    @property
    def all_backends(self) -> tuple[BackendConfig, ...]:
        return (*self.backends, *self.file.backends)

    @property
    def admin_key(self) -> str:
        """The key that the admin listener asks for, "" for none."""
        return os.environ.get(ADMIN_KEY_VARIABLE, "")

    def taking(self, file: FileConfig) -> tuple[DoorConfig, list[str]]:
        """Return this configuration with what of another file a running server can take, and names of the rest.

        Routing stays: its index of prefixes is made for its blocks, and several processes have to agree about them.
        """
        rest = [] if file.routing == self.file.routing else ["[routing]"]
        return replace(self, file=replace(file, routing=self.file.routing)), rest

    def tenant_book(self) -> TenantBook:
        """Return who may come in."""
        return self.file.tenant_book(self.api_keys, os.environ)


def url_of(host: str, port: int) -> str:
    """Return the address as a URL."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
