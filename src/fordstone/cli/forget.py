"""`fordstone hub forget`: remove nodes, streams and consumers that are gone for good."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from fordstone.cli import format as fmt
from fordstone.cli.ask import connected, request
from fordstone.cli.errors import UsageError, UserError
from fordstone.cli.options import HelpCommand, HelpGroup, json_option, options_of, reader_options
from fordstone.cli.quarantine import one_node, pipeline_option

if TYPE_CHECKING:
    from fordstone.hub.client.client import HubClient
    from fordstone.hub.messages import Forgotten

_forgetting = options_of(
    click.option("--discard-unread", is_flag=True, help="Discard also epochs that consumers have still to read."),
    reader_options,
    json_option,
)


@click.group(
    "forget",
    cls=HelpGroup,
    examples=[
        "fordstone hub forget node truck-7",
        "fordstone hub forget stream old_readings --pipeline cold-chain",
        "fordstone hub forget consumer trial --pipeline cold-chain",
    ],
)
def forget() -> None:
    """Remove nodes, streams or consumers that are gone for good."""


@forget.command(
    "node",
    cls=HelpCommand,
    examples=[
        "fordstone hub forget node truck-7",
        "fordstone hub forget node truck-7 --pipeline cold-chain --discard-unread",
    ],
)
@click.argument("node")
@pipeline_option
@_forgetting
def forget_node(*, node: str, pipeline: str | None, discard_unread: bool, as_json: bool, **hub: Any) -> None:
    """Remove a node from a hub, with its epochs and its checkpoints.

    The node must not be running. Readers treat the node as finished. Its name is not used again: a node that comes back under it
    gets an error that says so. To replace a machine, do not forget its node: start the new machine with the same name and --take-over.
    """
    from fordstone.hub.messages import ForgetRequest

    with connected(**hub) as client:
        # A node that was forgotten is not listed; the hub says what became of it.
        chosen = pipeline or one_node(client, node, None).pipeline
        body = ForgetRequest(discard_unread=discard_unread)
        found = request(client, lambda client: client.forget_node(chosen, node, body))
    _print(found, f"{node} ({chosen})", as_json=as_json)


@forget.command(
    "stream",
    cls=HelpCommand,
    examples=[
        "fordstone hub forget stream old_readings",
        "fordstone hub forget stream old_readings --pipeline cold-chain --discard-unread",
    ],
)
@click.argument("stream")
@click.option("--pipeline", metavar="P", default=None, help="The pipeline, if several have such a stream.")
@_forgetting
def forget_stream(*, stream: str, pipeline: str | None, discard_unread: bool, as_json: bool, **hub: Any) -> None:
    """Remove a stream from a hub, with the epochs of all nodes.

    No running node may still write to it. Its nodes stay, with their other streams. If a node writes to it again, it is there again, with the
    new epochs only.
    """
    from fordstone.hub.messages import ForgetRequest

    with connected(**hub) as client:
        chosen = pipeline or _pipeline_of(client, stream)
        body = ForgetRequest(discard_unread=discard_unread)
        found = request(client, lambda client: client.forget_stream(chosen, stream, body))
    _print(found, f"stream {stream} ({chosen})", as_json=as_json)


@forget.command("consumer", cls=HelpCommand, examples=["fordstone hub forget consumer trial --pipeline cold-chain"])
@click.argument("consumer")
@click.option("--pipeline", metavar="P", required=True, help="The pipeline that it reads.")
@reader_options
def forget_consumer(*, consumer: str, pipeline: str, **hub: Any) -> None:
    """Remove a consumer: the hub no longer keeps epochs for it.

    If it reads again, it is registered again, and gets what the hub then still has.
    """
    with connected(**hub) as client:
        request(client, lambda client: client.forget_consumer(pipeline, consumer))
    click.echo(f"nothing is kept for consumer {consumer} ({pipeline}) any more.")


def _pipeline_of(client: HubClient, stream: str) -> str:
    found = [one.pipeline for one in request(client, lambda client: client.streams()).streams if one.stream == stream]
    if len(found) > 1:
        raise UsageError(f"several pipelines have a stream {stream}: give --pipeline, one of {', '.join(found)}.")
    if not found:
        raise UserError(f"the hub has no stream {stream}. `fordstone streams` lists them.")
    return found[0]


def _print(found: Forgotten, what: str, *, as_json: bool) -> None:
    if as_json:
        fmt.print_json(found)
    elif not found.changed:
        click.echo(f"{what} was forgotten before; nothing has changed.")
    else:
        lost = (
            f"{fmt.count(found.epochs, 'epoch')} with {fmt.count(found.rows, 'row')}" if found.epochs else "nothing was"
        )
        name = " The name is not used again." if found.retired else ""
        click.echo(f"{what} is forgotten; {lost} discarded unread.{name}")
