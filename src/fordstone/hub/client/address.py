"""Where the hub is, and what opens it."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from fordstone.errors import ConfigError

CA_BYTES_MAX: Final = 1 << 20
_PEM: Final = "-----BEGIN"
FROM_EARLIEST: Final = "from_earliest"
"""Beside the address in `ConnectorSpec.at`: whether a source of which nothing was read begins with what the hub keeps."""
_SCHEMES: Final = frozenset({"http", "https"})


@dataclass(frozen=True, slots=True, kw_only=True)
class HubAddress:
    """Checked when it is made; the token is never printed."""

    url: str
    """`https://host:port`, perhaps with a path in front of the hub's own."""
    token: str | None = field(default=None, repr=False)
    ca: str | None = field(default=None, repr=False)
    """The certificates to trust, as PEM; None: those of the system. The path of a file is replaced by its content, so that the
    address is whole wherever it is sent, such as to Spark's executors."""
    direct: bool = True
    """Whether blobs may be read where the hub says, if that can be reached from here. False: only through the hub."""

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            host, _ = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigError(
                f"hub {self.url!r} is not an address: {error}. It looks like https://hub.example:7411."
            ) from error
        if parts.scheme not in _SCHEMES or not host:
            raise ConfigError(f"hub {self.url!r} is not an address. It looks like https://hub.example:7411.")
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
        if self.ca is not None and _PEM not in self.ca:
            object.__setattr__(self, "ca", _read_ca(self.ca))

    def at(self) -> dict[str, str]:
        """As it stands in a placed plan's `ConnectorSpec.at`."""
        found = {"url": self.url, "token": self.token, "ca": self.ca, "direct": None if self.direct else "false"}
        return {name: value for name, value in found.items() if value is not None}

    @classmethod
    def from_at(cls, at: dict[str, str]) -> HubAddress:
        return cls(url=at["url"], token=at.get("token"), ca=at.get("ca"), direct=at.get("direct") != "false")


def _read_ca(path: str) -> str:
    try:
        with Path(path).expanduser().open("rb") as file:
            text = file.read(CA_BYTES_MAX).decode("ascii")
    except (OSError, ValueError) as error:
        raise ConfigError(f"the certificates in {path} cannot be read: {error}. Give a PEM file.") from error
    if _PEM not in text:
        raise ConfigError(f"the certificates in {path} cannot be read: there is none in it. Give a PEM file.")
    return text


def _is_here(host: str) -> bool:
    """Whether a host is this machine, by its name alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False
