"""The options by which commands find a hub, and those of the edge half of two tiers.

The token is never given on the command line, where every user of the machine could read it: it is in a file or in a variable.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
from click.core import ParameterSource

from fordstone.cli.errors import Misuse
from fordstone.cli.help import TierOption
from fordstone.errors import FordstoneError

if TYPE_CHECKING:
    from fordstone.hub.client.address import HubAddress

HUB_VARIABLE: Final = "FORDSTONE_HUB"
TOKEN_VARIABLE: Final = "FORDSTONE_HUB_TOKEN"  # noqa: S105 - the name of a variable
TOKEN_FILE_VARIABLE: Final = "FORDSTONE_HUB_TOKEN_FILE"  # noqa: S105 - likewise
HERE: Final = "http://127.0.0.1:7411"
"""Where a hub listens unless told otherwise."""
TOKEN_BYTES_MAX: Final = 4096
GIVEN: Final = frozenset({ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT, ParameterSource.PROMPT})
_UNITS: Final = {"": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("kMGT", start=1)
    for unit, base in (("B", 1000), ("iB", 1024))
}
_F = TypeVar("_F", bound=Callable[..., Any])


def hub_options(command: _F, *, default: str | None = None, kind: type[click.Option] = click.Option) -> _F:
    """`--hub`, `--token-file` and `--ca`; together `address_of` makes an address of them."""
    place = f"  [default: {default}]" if default is not None else ""
    for option in (
        click.option("--ca", cls=kind, metavar="FILE", default=None, help="Whose certificates the hub may have, if not a known authority's."),
        click.option(
            "--token-file", cls=kind, metavar="FILE", envvar=TOKEN_FILE_VARIABLE, default=None,
            help=f"A file with the hub's token, as 'fordstone hub token add' printed it; or the variable {TOKEN_VARIABLE}.",
        ),
        click.option(
            "--hub", "hub_url", cls=kind, metavar="URL", envvar=HUB_VARIABLE, default=default,
            help=f"Where the hub is, as in https://hub.example:7411; or the variable {HUB_VARIABLE}.{place}",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


def reader_options(command: _F) -> _F:
    """For commands that only ask: the hub of this machine unless told otherwise."""
    return hub_options(command, default=HERE)


def tier_hub_options(command: _F) -> _F:
    """For commands that also run pipelines without a hub."""
    return hub_options(command, kind=TierOption)


def outbox_options(command: _F) -> _F:
    """What the edge half keeps for the hub while it is away."""
    for option in (
        click.option(
            "--take-over", cls=TierOption, is_flag=True,
            help="Shut out whoever has run this pipeline as this node before, and go on where it was: for a new machine in its place.",
        ),
        click.option(
            "--hub-state/--no-hub-state", cls=TierOption, default=True, show_default=True,
            help="Keep a copy of the newest checkpoint at the hub.",
        ),
        click.option(
            "--outbox-full", cls=TierOption, type=click.Choice(["block", "drop-oldest"]), default="block", show_default=True,
            help="Then wait for the hub, or drop what is oldest, which at_most_once allows.",
        ),
        click.option(
            "--outbox-max", cls=TierOption, metavar="SIZE", default="10GiB", show_default=True,
            help="How much may wait for the hub on this disk: 500MB, 10GiB.",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


def address_of(hub_url: str | None, token_file: str | None, ca: str | None, *, why: str = "") -> HubAddress:
    """Where the hub is. `why`: who needs one, for the person who gave none."""
    if hub_url is None:
        raise Misuse(f"{why or 'this'} needs a hub: give --hub URL, or set {HUB_VARIABLE}. `fordstone hub` runs one.")
    from fordstone.hub.client.address import HubAddress

    if ca is not None and not Path(ca).is_file():
        raise Misuse(f"--ca {ca}: there is no such file.")
    try:
        return HubAddress(url=hub_url, token=_token(token_file), ca=ca)
    except FordstoneError as error:
        raise Misuse(str(error)) from error


def outbox_of(options: dict[str, Any]) -> dict[str, Any]:
    """Take the options of the outbox out of all options; as `RunConfig` has them."""
    return {
        "outbox_bytes_max": size_of(options.pop("outbox_max"), "--outbox-max"),
        "outbox_full": options.pop("outbox_full").replace("-", "_"),
        "hub_state": options.pop("hub_state"),
        "take_over": options.pop("take_over"),
    }


def size_of(text: str, what: str) -> int:
    """Bytes, from `500MB` or `10GiB`."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKMGT]?i?B?)\s*", text)
    unit = "" if found is None else found[2].replace("K", "k")
    unit = unit if not unit or unit.endswith("B") else f"{unit}B"
    unit = "" if unit == "B" else unit
    if found is None or unit not in _UNITS or float(found[1]) <= 0:
        raise Misuse(f"{what} {text}: that is not a size. Write it with a unit, such as 500MB or 10GiB.")
    return int(float(found[1]) * _UNITS[unit])


def node_of(given: str | None) -> str:
    """The node's name: as given, or this machine's."""
    from fordstone.plan.ids import checked_name

    name = given if given is not None else socket.gethostname()
    try:
        return checked_name(name, "node")
    except FordstoneError as error:
        more = "" if given is not None else " That is this machine's name; give it another with --node."
        raise Misuse(f"{error}{more}") from error


def given_options(context: click.Context, names: frozenset[str]) -> list[str]:
    """Those of the named options that were given, as words for a command of our own."""
    words: list[str] = []
    for option in context.command.params:
        if not isinstance(option, click.Option) or option.name not in names:
            continue
        if context.get_parameter_source(option.name) not in GIVEN:
            continue
        value = context.params[option.name]
        if option.is_flag:
            words += [option.opts[0] if value else option.secondary_opts[0]]
        elif option.count:
            words += [option.opts[0]] * value
        elif option.multiple:
            words += [word for one in value for word in (option.opts[0], str(one))]
        elif value is not None:
            words += [option.opts[0], str(value)]
    return words


def _token(token_file: str | None) -> str | None:
    if token_file is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    try:
        with Path(token_file).open("rb") as file:
            text = file.read(TOKEN_BYTES_MAX).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Misuse(f"--token-file {token_file}: it cannot be read ({error}).") from error
    if not text:
        raise Misuse(f"--token-file {token_file}: it is empty. It holds what `fordstone hub token add` printed.")
    return text
