"""`fordstone nodes`, `streams` and `epochs`: what the hub knows, as tables for people and lines for machines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from fordstone.cli import format as wording
from fordstone.cli.errors import Mistake
from fordstone.cli.help import TaughtCommand
from fordstone.cli.hub_options import address_of, reader_options
from fordstone.cli.logs import configure_logging
from fordstone.cli.view.showing import print_json
from fordstone.cli.view.view import TIME_END_US

if TYPE_CHECKING:
    from fordstone.hub.client.client import HubClient
    from fordstone.hub.messages import EpochInfo, Health, NodeInfo, StreamInfo

ASK_TIMEOUT_S: Final = 10.0
SILENT_US: Final = 30_000_000
"""A node that has said nothing for so long is shown as silent: it should have spoken three times."""
WATCH_EVERY_S: Final = 2.0
TIME_BEGIN_US: Final = -(2**62)
_F = TypeVar("_F", bound=Callable[..., Any])
Style = str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """A table, before it is drawn."""

    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    right: tuple[int, ...]
    styles: Sequence[Style]
    """How each row is drawn on a terminal: empty for plain."""
    empty: str
    """What to say if there is no row."""

    def text(self) -> str:
        """For anything but a terminal."""
        return wording.table(self.head, self.rows, right=self.right) if self.rows else self.empty


def _asking(command: _F) -> _F:
    """The options that all three have."""
    for option in (
        click.option("--watch", is_flag=True, help="Draw the table anew every two seconds, until Ctrl-C."),
        click.option("--json", "as_json", is_flag=True, help="For machines."),
    ):
        command = option(command)
    return reader_options(command)


@click.command(
    cls=TaughtCommand,
    examples=[
        "fordstone nodes",
        "fordstone nodes --hub https://hub.example:7411 --token-file token --watch",
        "fordstone nodes --json | jq '.nodes[] | select(.health.problem != \"\")'",
    ],
)
@_asking
def nodes(hub_url: str, token_file: str | None, ca: str | None, **how: Any) -> None:
    """List the nodes that a hub knows: how far they are, what waits on them, and what troubles them.

    Lag is the time since the hub's newest epoch of the node; the outbox is what waits on the node, by its own word.
    """
    _answer(
        hub_url,
        token_file,
        ca,
        ask=lambda hub: hub.nodes(),
        sheet=lambda found: nodes_sheet(found.nodes, _now_us()),
        **how,
    )


@click.command(
    cls=TaughtCommand,
    examples=["fordstone streams", "fordstone streams --hub https://hub.example:7411 --token-file token --json"],
)
@_asking
def streams(hub_url: str, token_file: str | None, ca: str | None, **how: Any) -> None:
    """List the streams that a hub keeps: from how many nodes, how much, and who has still to read it."""
    _answer(
        hub_url,
        token_file,
        ca,
        ask=lambda hub: hub.streams(),
        sheet=lambda found: streams_sheet(found.streams, _now_us()),
        **how,
    )


@click.command(
    cls=TaughtCommand,
    examples=["fordstone epochs", "fordstone epochs --pipeline cold-chain --node gateway-7 --limit 100"],
)
@click.option("--pipeline", metavar="P", default=None, help="Only of this pipeline.")
@click.option("--node", metavar="ID", default=None, help="Only of this node.")
@click.option(
    "--limit", metavar="N", type=click.IntRange(1, 10_000), default=20, show_default=True, help="At most so many."
)
@_asking
def epochs(
    hub_url: str,
    token_file: str | None,
    ca: str | None,
    *,
    pipeline: str | None,
    node: str | None,
    limit: int,
    **how: Any,
) -> None:
    """List the epochs that a hub has taken in, the newest first.

    Behind is how much later than its sealing the hub had it; a node that was away shows here.
    """
    _answer(
        hub_url,
        token_file,
        ca,
        ask=lambda hub: hub.epochs(pipeline=pipeline, node=node, limit=limit),
        sheet=lambda found: epochs_sheet(found.epochs, _now_us()),
        **how,
    )


def nodes_sheet(found: Sequence[NodeInfo], now_us: int) -> Sheet:
    """One row a pipeline and node."""
    rows, styles = [], []
    for one in sorted(found, key=lambda info: (info.node, info.pipeline)):
        health = one.health
        silent = now_us - one.seen_us > SILENT_US and (health is None or health.state not in {"stopped", "failed"})
        rows.append(
            (
                one.node,
                one.pipeline,
                "silent" if silent else "" if health is None else health.state,
                wording.count(one.head),
                _age(one.seen_us, now_us),
                "" if one.committed_us is None else wording.span(max(0, now_us - one.committed_us)),
                *_own_words(health),
            )
        )
        styles.append(
            "red" if health is not None and health.state == "failed" else "yellow" if silent or rows[-1][-1] else ""
        )
    return Sheet(
        head=("node", "pipeline", "state", "epoch", "seen", "lag", "rows in", "outbox", "problem"),
        rows=rows,
        right=(3, 4, 5, 6),
        styles=styles,
        empty="No node has spoken to this hub yet. Start one: fordstone edge FILE --hub URL.",
    )


def streams_sheet(found: Sequence[StreamInfo], now_us: int) -> Sheet:
    """One row a stream."""
    rows, styles = [], []
    for one in sorted(found, key=lambda info: (info.pipeline, info.stream)):
        behind = ", ".join(
            f"{name}: {'nothing' if not left else wording.count(left, 'epoch')}"
            for name, left in sorted(one.consumers.items())
        )
        rows.append(
            (
                one.pipeline,
                one.stream,
                wording.count(one.nodes),
                wording.count(one.epochs),
                wording.count(one.rows),
                wording.size(one.size_bytes),
                _time(one.watermark_us, now_us),
                behind or "nobody reads it",
            )
        )
        styles.append("" if one.consumers else "yellow")
    return Sheet(
        head=("pipeline", "stream", "nodes", "epochs", "rows", "size", "time", "to read"),
        rows=rows,
        right=(2, 3, 4, 5),
        styles=styles,
        empty="This hub has no stream yet.",
    )


def epochs_sheet(found: Sequence[EpochInfo], now_us: int) -> Sheet:
    """One row an epoch."""
    rows = [
        (
            one.pipeline,
            one.node,
            wording.count(one.epoch),
            "alone" if one.first == one.last else f"{one.first}-{one.last}",
            wording.count(one.rows),
            wording.size(one.size_bytes),
            _age(one.received_us, now_us),
            wording.span(max(0, one.received_us - one.created_us)),
            f"{one.generation.hub}.{one.generation.local}",
        )
        for one in found
    ]
    return Sheet(
        head=("pipeline", "node", "epoch", "came with", "rows", "size", "received", "behind", "generation"),
        rows=rows,
        right=(2, 4, 5, 6, 7),
        styles=[""] * len(rows),
        empty="No such epoch is at this hub.",
    )


def _answer(
    hub_url: str,
    token_file: str | None,
    ca: str | None,
    *,
    ask: Callable[[HubClient], Any],
    sheet: Callable[[Any], Sheet],
    as_json: bool,
    watch: bool,
) -> None:
    configure_logging(0)
    address = address_of(hub_url, token_file, ca)
    from fordstone.hub.client.client import HubClient

    client = HubClient(address, timeout_s=ASK_TIMEOUT_S)
    try:
        if watch and not as_json:
            _watch(lambda: sheet(_asked(client, ask, address.url)))
        else:
            found = _asked(client, ask, address.url)
            if as_json:
                print_json(found)
            elif sys.stdout.isatty():
                _draw(sheet(found))
            else:
                click.echo(sheet(found).text())
    finally:
        client.close()


def _asked(client: HubClient, ask: Callable[[HubClient], Any], url: str) -> Any:
    """The hub's answer; what stands in its way, with what to do about it."""
    from fordstone.errors import HubAwayError, HubRefusedError

    try:
        return ask(client)
    except HubAwayError as error:
        raise Mistake(
            f"{error}\nIs a hub running at {url}? `fordstone hub` starts one; --hub says where to look."
        ) from error
    except HubRefusedError as error:
        hint = {
            "unauthorised": "\nGive a token that the hub knows, with --token-file. On the hub: fordstone hub token add NAME --admin.",
            "forbidden": "\nThe token is for something else. On the hub: fordstone hub token add NAME --admin.",
        }.get(error.code, "")
        raise Mistake(f"{error}{hint}") from error


def _watch(look: Callable[[], Sheet]) -> None:
    """Draw until Ctrl-C. A hub that goes away is told once, and the command ends."""
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(highlight=False), auto_refresh=False, screen=False) as live:
        try:
            while True:
                live.update(_table(look()), refresh=True)
                time.sleep(WATCH_EVERY_S)
        except KeyboardInterrupt:
            return


def _draw(sheet: Sheet) -> None:
    from rich.console import Console

    Console(highlight=False).print(_table(sheet))


def _table(sheet: Sheet) -> Any:
    from rich.table import Table
    from rich.text import Text

    if not sheet.rows:
        return Text(sheet.empty)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for place, name in enumerate(sheet.head):
        table.add_column(name, justify="right" if place in sheet.right else "left", overflow="fold")
    for row, style in zip(sheet.rows, sheet.styles, strict=True):
        # As text: a name with brackets in it is no markup.
        table.add_row(*(Text(cell) for cell in row), style=style or None)
    return table


def _own_words(health: Health | None) -> tuple[str, str, str]:
    if health is None:
        return "", "", ""
    outbox = (
        f"{wording.count(health.outbox_epochs, 'epoch')}, {wording.size(health.outbox_bytes)}"
        if health.outbox_epochs
        else "empty"
    )
    return wording.count(health.rows_in), outbox, health.problem


def _age(then_us: int, now_us: int) -> str:
    return f"{wording.span(max(0, now_us - then_us))} ago"


def _time(watermark_us: int, now_us: int) -> str:
    """How far event time has come."""
    if watermark_us >= TIME_END_US:
        return "ended"
    if watermark_us <= TIME_BEGIN_US:
        return ""
    return f"{wording.instant(watermark_us)}, {wording.span(now_us - watermark_us)} behind"


def _now_us() -> int:
    return time.time_ns() // 1_000
