"""`fordstone nodes`, `streams` and `epochs`: lists of what a hub has, as tables or as JSON."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from fordstone.cli import format as fmt
from fordstone.cli.errors import UserError
from fordstone.cli.help import HelpCommand
from fordstone.cli.logs import configure_logging
from fordstone.cli.options import address_of, json_option, reader_options
from fordstone.cli.table import Table, safe
from fordstone.cli.view.view import TIME_END_US, outbox_text

if TYPE_CHECKING:
    from fordstone.hub.client.client import HubClient
    from fordstone.hub.messages import EpochInfo, Health, NodeInfo, StreamInfo

ASK_TIMEOUT_S: Final = 10.0
SILENT_US: Final = 30_000_000
"""A node is shown as silent after this time, in which it should have reported three times."""
WATCH_EVERY_S: Final = 2.0
TIME_BEGIN_US: Final = -(2**62)
_F = TypeVar("_F", bound=Callable[..., Any])


def _reading(command: _F) -> _F:
    watch = click.option("--watch", is_flag=True, help="Refresh the table every two seconds, until Ctrl-C.")
    return reader_options(json_option(watch(command)))


@click.command(
    cls=HelpCommand,
    examples=[
        "fordstone nodes",
        "fordstone nodes --hub https://hub.example:7411 --token-file token --watch",
        "fordstone nodes --json | jq '.nodes[] | select(.health.problem != \"\")'",
    ],
)
@_reading
def nodes(hub_url: str, token_file: str | None, ca: str | None, **how: Any) -> None:
    """List nodes: their progress, outbox and problems.

    Lag is the time since the hub received the newest epoch of the node. The outbox is what waits on the node for the hub, as the node
    reports it.
    """
    _answer(
        hub_url,
        token_file,
        ca,
        ask=lambda hub: hub.nodes(),
        table=lambda found: nodes_table(found.nodes, _now_us()),
        **how,
    )


@click.command(
    cls=HelpCommand,
    examples=["fordstone streams", "fordstone streams --hub https://hub.example:7411 --token-file token --json"],
)
@_reading
def streams(hub_url: str, token_file: str | None, ca: str | None, **how: Any) -> None:
    """List streams: nodes, size, and unread epochs."""
    _answer(
        hub_url,
        token_file,
        ca,
        ask=lambda hub: hub.streams(),
        table=lambda found: streams_table(found.streams, _now_us()),
        **how,
    )


@click.command(
    cls=HelpCommand,
    examples=["fordstone epochs", "fordstone epochs --pipeline cold-chain --node gateway-7 --limit 100"],
)
@click.option("--pipeline", metavar="P", default=None, help="Only epochs of this pipeline.")
@click.option("--node", metavar="ID", default=None, help="Only epochs of this node.")
@click.option(
    "--limit",
    metavar="N",
    type=click.IntRange(1, 10_000),
    default=20,
    show_default=True,
    help="Maximum number of epochs.",
)
@_reading
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
    """List the epochs that a hub has received, newest first.

    Delay is the time from sealing an epoch to receiving it, which grows while a node is offline.
    """
    _answer(
        hub_url,
        token_file,
        ca,
        ask=lambda hub: hub.epochs(pipeline=pipeline, node=node, limit=limit),
        table=lambda found: epochs_table(found.epochs, _now_us()),
        **how,
    )


def nodes_table(found: Sequence[NodeInfo], now_us: int) -> Table:
    """One row per pipeline and node."""
    rows, styles = [], []
    for one in sorted(found, key=lambda info: (info.node, info.pipeline)):
        health = one.health
        silent = now_us - one.seen_us > SILENT_US and (health is None or health.state not in {"stopped", "failed"})
        rows.append(
            (
                one.node,
                one.pipeline,
                "silent" if silent else "" if health is None else health.state,
                fmt.count(one.head),
                _age(one.seen_us, now_us),
                "" if one.committed_us is None else fmt.span(max(0, now_us - one.committed_us)),
                *_reported(health),
            )
        )
        styles.append(
            "red" if health is not None and health.state == "failed" else "yellow" if silent or rows[-1][-1] else ""
        )
    return Table(
        head=("node", "pipeline", "state", "epoch", "seen", "lag", "rows in", "outbox", "problem"),
        rows=rows,
        right=(3, 4, 5, 6),
        styles=styles,
        empty="No node has reported to this hub yet. Start one: fordstone edge FILE --hub URL.",
    )


def streams_table(found: Sequence[StreamInfo], now_us: int) -> Table:
    """One row per stream."""
    rows, styles = [], []
    for one in sorted(found, key=lambda info: (info.pipeline, info.stream)):
        unread = ", ".join(f"{name}: {fmt.count(left, 'epoch')}" for name, left in sorted(one.consumers.items()))
        rows.append(
            (
                one.pipeline,
                one.stream,
                fmt.count(one.nodes),
                fmt.count(one.epochs),
                fmt.count(one.rows),
                fmt.size(one.size_bytes),
                _time(one.watermark_us, now_us),
                unread or "no consumer",
            )
        )
        styles.append("" if one.consumers else "yellow")
    return Table(
        head=("pipeline", "stream", "nodes", "epochs", "rows", "size", "watermark", "unread"),
        rows=rows,
        right=(2, 3, 4, 5),
        styles=styles,
        empty="This hub has no stream yet.",
    )


def epochs_table(found: Sequence[EpochInfo], now_us: int) -> Table:
    """One row per epoch."""
    rows = [
        (
            one.pipeline,
            one.node,
            fmt.count(one.epoch),
            str(one.first) if one.first == one.last else f"{one.first}-{one.last}",
            fmt.count(one.rows),
            fmt.size(one.size_bytes),
            _age(one.received_us, now_us),
            fmt.span(max(0, one.received_us - one.created_us)),
            f"{one.generation.hub}.{one.generation.local}",
        )
        for one in found
    ]
    return Table(
        head=("pipeline", "node", "epoch", "commit", "rows", "size", "received", "delay", "generation"),
        rows=rows,
        right=(2, 4, 5, 6, 7),
        empty="This hub has no such epoch.",
    )


def _answer(
    hub_url: str,
    token_file: str | None,
    ca: str | None,
    *,
    ask: Callable[[HubClient], Any],
    table: Callable[[Any], Table],
    as_json: bool,
    watch: bool,
) -> None:
    configure_logging(0)
    address = address_of(hub_url, token_file, ca)
    from fordstone.hub.client.client import HubClient

    client = HubClient(address, timeout_s=ASK_TIMEOUT_S)
    try:
        if watch and not as_json:
            _watch(lambda: table(_asked(client, ask, address.url)))
            return
        found = _asked(client, ask, address.url)
        if as_json:
            fmt.print_json(found)
        elif sys.stdout.isatty():
            from rich.console import Console

            Console(highlight=False).print(table(found).styled(), soft_wrap=True)
        else:
            click.echo(table(found).text())
    finally:
        client.close()


def _asked(client: HubClient, ask: Callable[[HubClient], Any], url: str) -> Any:
    """The hub's response; an error says what to do."""
    from fordstone.errors import HubAwayError, HubRefusedError

    try:
        return ask(client)
    except HubAwayError as error:
        raise UserError(
            f"{error}\nIs a hub running at {url}? `fordstone hub` starts one; --hub sets the address."
        ) from error
    except HubRefusedError as error:
        hint = {
            "unauthorised": "\nGive a valid token with --token-file. On the hub: fordstone hub token add NAME --admin.",
            "forbidden": "\nThe token has another role. On the hub: fordstone hub token add NAME --admin.",
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


def _reported(health: Health | None) -> tuple[str, str, str]:
    if health is None:
        return "", "", ""
    return fmt.count(health.progress.rows_in), outbox_text(health.progress), safe(health.problem)


def _age(then_us: int, now_us: int) -> str:
    return f"{fmt.span(max(0, now_us - then_us))} ago"


def _time(watermark_us: int, now_us: int) -> str:
    if watermark_us >= TIME_END_US:
        return "ended"
    if watermark_us <= TIME_BEGIN_US:
        return ""
    return f"{fmt.instant(watermark_us)}, {fmt.span(now_us - watermark_us)} ago"


def _now_us() -> int:
    return time.time_ns() // 1_000
