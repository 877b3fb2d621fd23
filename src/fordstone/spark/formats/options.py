"""The options of Fordstone's data sources.

The options are read on the driver's machine: tasks get the address with the token in it, and not the file of the token.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from fordstone.errors import ConfigError
from fordstone.hub.client.address import HubAddress
from fordstone.plan.ids import checked_name

TOKEN_VARIABLE: Final = "FORDSTONE_HUB_TOKEN"  # noqa: S105 - the name of it, not a secret
HUB_VARIABLE: Final = "FORDSTONE_HUB"
_TRUE: Final = frozenset({"true", "yes", "1", "on"})
_FALSE: Final = frozenset({"false", "no", "0", "off"})

Options = Mapping[str, str]
"""As Spark passes them to a data source: names are case-insensitive."""


def address_of(options: Options) -> HubAddress:
    """The hub and the token that the options name.

    Raises:
        ConfigError: There is none, it is malformed, or the token cannot be read.
    """
    url = options.get("hub") or os.environ.get(HUB_VARIABLE)
    if not url:
        raise ConfigError(
            f"which hub? Set option 'hub' (https://hub.example:7411), or {HUB_VARIABLE} in the driver's environment."
        )
    direct = flag(options, "directBlobs", default=True)
    return HubAddress(url=url, token=_token(options), ca=options.get("ca"), direct=direct)


def _token(options: Options) -> str | None:
    given, file = options.get("token"), options.get("tokenFile")
    if given is not None and file is not None:
        raise ConfigError(
            "options 'token' and 'tokenFile' are both set. Set one of them; the file keeps it out of code."
        )
    if file is not None:
        try:
            return Path(file).expanduser().read_text(encoding="ascii").strip()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the token cannot be read from {file}: {error}. The file has to be on the driver's machine."
            ) from error
    return given if given is not None else os.environ.get(TOKEN_VARIABLE) or None


def named(options: Options, name: str, *, example: str) -> str:
    """A required option that is a name."""
    value = options.get(name)
    if not value:
        raise ConfigError(f'option {name!r} is not set: .option("{name}", "{example}").')
    return checked_name(value, name)


def columns(options: Options, name: str) -> tuple[str, ...]:
    """An option that names columns, separated by commas."""
    return tuple(part.strip() for part in options.get(name, "").split(",") if part.strip())


def flag(options: Options, name: str, *, default: bool) -> bool:
    """An option that is true or false."""
    value = options.get(name)
    if value is None:
        return default
    if value.lower() not in _TRUE | _FALSE:
        raise ConfigError(f"option {name!r} is {value!r}; it must be true or false.")
    return value.lower() in _TRUE


def count(options: Options, name: str) -> int | None:
    """An option that is a number of at least 1; None: not set."""
    value = options.get(name)
    if value is None:
        return None
    if not (value.isascii() and value.isdigit()) or int(value) < 1:
        raise ConfigError(f"option {name!r} is {value!r}; it has to be a whole number of at least 1.")
    return int(value)
