"""How a schema registry is reached, as it stands in a plan. Apart from its client, which most processes never load."""

from __future__ import annotations

from urllib.parse import urlsplit

import msgspec

from fordstone.connectors.base import Secret
from fordstone.errors import ConfigError


class RegistryOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a registry is reached, as it stands in the plan."""

    url: str
    """With the path that its interface has, if any."""
    user: str | None = None
    password: Secret | None = None
    ca_file: str | None = None
    """The certificates that sign its own, in place of those of the system."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ConfigError(f"schema_registry: url={self.url!r} must be an address such as 'http://localhost:8081'.")
        if parts.username or parts.password:
            raise ConfigError(
                "schema_registry: its url has a user and a password, which would be part of the plan. Give user= and password=, as in "
                "{'url': ..., 'user': 'reader', 'password': {'secret': 'REGISTRY_PASSWORD'}}."
            )
        if (self.user is None) != (self.password is None):
            raise ConfigError("schema_registry: user and password go together.")
        if self.ca_file is not None and parts.scheme != "https":
            raise ConfigError(f"schema_registry: ca_file is for https, and url={self.url!r}.")
