"""ReadPlan a hub by the options of a data source, and be patient with it.

The options are read on the driver's machine: tasks get the address with the token in it, not the file that the token was in.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Final, TypeVar

from fordstone.errors import ConfigError, HubAwayError
from fordstone.hub.client.address import HubAddress
from fordstone.hub.client.client import HubClient
from fordstone.plan.ids import checked_name

PATIENCE_SECONDS: Final = 60.0
"""So long a hub may be away where something was promised already: a planned batch, a commit."""
PAUSE_SECONDS: Final = 0.1
PAUSE_SECONDS_MAX: Final = 5.0
CLIENTS_MAX: Final = 16
"""So many hubs (and tokens) a Python process keeps connections to."""
TOKEN_VARIABLE: Final = "FORDSTONE_HUB_TOKEN"  # noqa: S105 - the name of it, not a secret
HUB_VARIABLE: Final = "FORDSTONE_HUB"
_TRUE: Final = frozenset({"true", "yes", "1", "on"})
_FALSE: Final = frozenset({"false", "no", "0", "off"})

Options = Mapping[str, str]
"""As Spark hands them to a data source: names without regard to case."""
_T = TypeVar("_T")


def address_of(options: Options) -> HubAddress:
    """The hub that the options name, with the token from wherever they say.

    Raises:
        ConfigError: There is none, it makes no sense, or the token cannot be read.
    """
    url = options.get("hub") or os.environ.get(HUB_VARIABLE)
    if not url:
        raise ConfigError(
            f"which hub? Set option 'hub' (https://hub.example:7411), or {HUB_VARIABLE} in the driver's environment."
        )
    return HubAddress(url=url, token=_token(options), ca=options.get("ca"))


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
    """An option that is a name and has to be there."""
    value = options.get(name)
    if not value:
        raise ConfigError(f'option {name!r} is not set: .option("{name}", "{example}").')
    return checked_name(value, name)


def flag(options: Options, name: str, *, default: bool) -> bool:
    """An option that is true or false."""
    value = options.get(name)
    if value is None:
        return default
    if value.lower() not in _TRUE | _FALSE:
        raise ConfigError(f"option {name!r} is {value!r}; it is true or false.")
    return value.lower() in _TRUE


def count(options: Options, name: str) -> int | None:
    """An option that is a number from 1 on; None: not set."""
    value = options.get(name)
    if value is None:
        return None
    if not (value.isascii() and value.isdigit()) or int(value) < 1:
        raise ConfigError(f"option {name!r} is {value!r}; it is a whole number from 1 on.")
    return int(value)


@lru_cache(maxsize=CLIENTS_MAX)
def client_of(address: HubAddress) -> HubClient:
    """The client of this Python process, which is reused from task to task with its connections."""
    return HubClient(address)


def patiently(
    call: Callable[[], _T],
    *,
    seconds: float = PATIENCE_SECONDS,
    sleep: Callable[[float], None] = time.sleep,
    clock_s: Callable[[], float] = time.monotonic,
) -> _T:
    """What the call gives, tried again while the hub is away and time is left; then its `HubAwayError`."""
    end, pause = clock_s() + seconds, PAUSE_SECONDS
    while True:
        try:
            return call()
        except HubAwayError as error:
            asked_s = getattr(error, "retry_after_s", None) or 0.0
            wait = max(asked_s, pause * (0.5 + random.random() / 2))  # noqa: S311 - so that tasks do not come all at once
            if clock_s() + wait > end:
                raise
        sleep(wait)
        pause = min(2 * pause, PAUSE_SECONDS_MAX)
