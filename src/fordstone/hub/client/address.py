"""Where the hub is, and what opens it."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from fordstone.errors import ConfigError

_SCHEMES: Final = frozenset({"http", "https"})


@dataclass(frozen=True, slots=True, kw_only=True)
class HubAddress:
    """Checked when it is made; the token is never printed."""

    url: str
    """`https://host:port`, perhaps with a path in front of the hub's own."""
    token: str | None = field(default=None, repr=False)
    ca: str | None = None
    """A file with the certificates to trust; None: those of the system."""

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            host, _ = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigError(
                f"hub {self.url!r} is no address: {error}. It looks like https://hub.example:7411."
            ) from error
        if parts.scheme not in _SCHEMES or not host:
            raise ConfigError(f"hub {self.url!r} is no address. It looks like https://hub.example:7411.")
        if parts.username is not None or parts.query or parts.fragment:
            raise ConfigError(
                "the hub's address has a user, a query or a fragment in it. The token is given apart from it."
            )
        if self.token is not None and not (
            self.token and self.token.isascii() and self.token.isprintable() and " " not in self.token
        ):
            raise ConfigError(
                "the hub's token is empty or has characters that no token has. Take it as `fordstone hub token add` printed it."
            )
        if self.token is not None and parts.scheme == "http" and not _is_here(host):
            raise ConfigError(
                f"the hub's token would go to {host} in the clear, for everybody on the way to read. Write https:// instead: a hub "
                "that other machines reach has TLS."
            )
        object.__setattr__(self, "url", self.url.rstrip("/"))

    def at(self) -> dict[str, str]:
        """As it stands in a placed plan's `ConnectorSpec.at`."""
        found = {"url": self.url, "token": self.token, "ca": self.ca}
        return {name: value for name, value in found.items() if value is not None}

    @classmethod
    def from_at(cls, at: dict[str, str]) -> HubAddress:
        return cls(url=at["url"], token=at.get("token"), ca=at.get("ca"))


def _is_here(host: str) -> bool:
    """Whether a host is this machine, by its name alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False
