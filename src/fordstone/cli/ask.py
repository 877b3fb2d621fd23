"""Ask a hub for something and show it: as a table, as a table that is refreshed, or as JSON."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from fordstone.cli import format as fmt
from fordstone.cli.errors import UserError
from fordstone.cli.format import Table
from fordstone.cli.logs import configure_logging
from fordstone.cli.options import address_of

if TYPE_CHECKING:
    from fordstone.hub.client.client import HubClient

T = TypeVar("T")
ASK_TIMEOUT_S: Final = 10.0
WATCH_EVERY_S: Final = 2.0
ROLES_ADVICE: Final = "On the hub: fordstone hub token add NAME --center, to read; --admin, to release, skip or forget."


def show(
    ask: Callable[[HubClient], Any], table: Callable[[Any], Table], *, as_json: bool, watch: bool, **hub: Any
) -> None:
    """Ask once, or until Ctrl-C, and print what comes. `hub`: the options of `reader_options`."""
    with connected(**hub) as client:
        if watch and not as_json:
            _watch(lambda: table(request(client, ask)))
            return
        found = request(client, ask)
    if as_json:
        fmt.print_json(found)
    elif sys.stdout.isatty():
        from rich.console import Console

        Console(highlight=False).print(table(found).styled(), soft_wrap=True)
    else:
        click.echo(table(found).text())


@contextmanager
def connected(*, timeout_s: float = ASK_TIMEOUT_S, **hub: Any) -> Iterator[HubClient]:
    """Give a client of the hub that the options name."""
    configure_logging(0)
    from fordstone.hub.client.client import HubClient

    with closing(HubClient(address_of(**hub), timeout_s=timeout_s)) as client:
        yield client


def request(client: HubClient, ask: Callable[[HubClient], T]) -> T:
    """Return the hub's response. An error says what to do."""
    from fordstone.errors import HubAwayError, HubRefusedError

    try:
        return ask(client)
    except HubAwayError as error:
        raise UserError(
            f"{error}\nIs a hub running at {client.address.url}? `fordstone hub` starts one; --hub sets the address."
        ) from error
    except HubRefusedError as error:
        hint = {
            "unauthorised": f"\nGive a valid token with --token-file. {ROLES_ADVICE}",
            "forbidden": f"\nThe token has another role. {ROLES_ADVICE}",
        }.get(error.code, "")
        raise UserError(f"{error}{hint}") from error


def _watch(look: Callable[[], Table]) -> None:
    """Refresh until Ctrl-C. If the hub goes away, the command ends with its error."""
    from rich.console import Console

    from fordstone.cli.view.live import Drawing

    with Drawing(Console(file=sys.stdout, highlight=False), transient=False) as drawing:
        try:
            while True:
                drawing.update(look().styled())
                time.sleep(WATCH_EVERY_S)
        except KeyboardInterrupt:
            return
