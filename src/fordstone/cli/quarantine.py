"""`fordstone hub quarantine`, `release` and `skip`: what to do with a node that is not read on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from fordstone.cli import format as fmt
from fordstone.cli.ask import connected, request, show
from fordstone.cli.errors import UsageError, UserError
from fordstone.cli.format import Table, safe
from fordstone.cli.options import HelpCommand, json_option, reader_options
from fordstone.protocol.quarantine import open_gaps
from fordstone.storage.clock import wall_clock_us

if TYPE_CHECKING:
    from fordstone.hub.client.client import HubClient
    from fordstone.hub.messages import NodeInfo

REASON: Final = "set by the operator"

pipeline_option = click.option("--pipeline", metavar="P", default=None, help="The pipeline, if the node runs several.")


@click.command(
    "quarantine",
    cls=HelpCommand,
    examples=[
        "fordstone hub quarantine                                list nodes in quarantine, and skipped epochs",
        "fordstone hub quarantine truck-7 --reason 'sensor swapped'",
        "fordstone hub quarantine truck-7 --pipeline cold-chain --epoch 4711",
    ],
)
@click.argument("node", required=False)
@pipeline_option
@click.option(
    "--epoch",
    metavar="E",
    type=click.IntRange(min=1),
    default=None,
    help="The first epoch that is not read.  [default: the next one]",
)
@click.option("--reason", metavar="TEXT", default=REASON, help="Shown wherever the node is listed.")
@reader_options
@json_option
def quarantine(
    *, node: str | None, pipeline: str | None, epoch: int | None, reason: str, as_json: bool, **hub: Any
) -> None:
    """Put a node into quarantine, or list those that are.

    A center puts a node into quarantine by itself if it cannot take an epoch of it: the rows cannot be decoded, have other columns than the
    pipeline, or are too large. The epochs before that are read, the center does not wait for the node, and other nodes are not affected. The
    node goes on sending, and the hub keeps what it sends.
    """
    if node is None:
        if epoch is not None or reason != REASON:
            raise UsageError("name the node: fordstone hub quarantine NODE --epoch E.")
        show(
            lambda client: [one for one in client.nodes().nodes if one.quarantine is not None or one.skips],
            lambda found: quarantine_table(found, wall_clock_us()),
            as_json=as_json,
            watch=False,
            **hub,
        )
        return
    from fordstone.hub.messages import OPERATOR, REASON_CHARS_MAX, QuarantineRequest

    if len(reason) > REASON_CHARS_MAX:
        raise UsageError(f"--reason has {len(reason)} characters; {REASON_CHARS_MAX} are allowed.")
    with connected(**hub) as client:
        info = one_node(client, node, pipeline)
        body = QuarantineRequest(epoch=epoch or info.head + 1, reason=reason, by=OPERATOR)
        change = request(client, lambda client: client.quarantine(info.pipeline, node, body))
    if as_json:
        fmt.print_json(change)
    elif change.quarantine is None:
        click.echo(f"epoch {body.epoch} of node {node} is skipped already; nothing has changed.")
    else:
        said = "is in quarantine from now on" if change.changed else "was in quarantine already"
        click.echo(f"{node} ({info.pipeline}) {said}: it is read up to epoch {change.quarantine.epoch - 1}.")


@click.command(
    "release",
    cls=HelpCommand,
    examples=["fordstone hub release truck-7", "fordstone hub release --all"],
)
@click.argument("node", required=False)
@pipeline_option
@click.option(
    "--all", "every", is_flag=True, help="Release all nodes in quarantine; with --pipeline, those of this pipeline."
)
@reader_options
def release(*, node: str | None, pipeline: str | None, every: bool, **hub: Any) -> None:
    """Release a node from quarantine: readers try the epoch again at which they stopped.

    If it still cannot be taken, the node is in quarantine again at once. Rows that are read now may be late: see `offline`.
    """
    if (node is None) != every:
        raise UsageError("name one node, or give --all.")
    with connected(**hub) as client:
        if node is not None:
            chosen = [one_node(client, node, pipeline)]
        else:
            found = request(client, lambda client: client.nodes()).nodes
            chosen = [one for one in found if one.quarantine is not None and pipeline in {None, one.pipeline}]
        for info in chosen:
            change = request(client, lambda client, info=info: client.release(info.pipeline, info.node))  # type: ignore[misc]
            said = "is released" if change.changed else "is not in quarantine"
            click.echo(f"{info.node} ({info.pipeline}) {said}.")
        if not chosen:
            click.echo("no node is in quarantine.")


@click.command(
    "skip",
    cls=HelpCommand,
    examples=[
        "fordstone hub skip truck-7 --until 4711",
        "fordstone hub skip truck-7 --pipeline cold-chain --until 4711",
    ],
)
@click.argument("node")
@pipeline_option
@click.option(
    "--until", metavar="E", type=click.IntRange(min=0), required=True, help="The last epoch that readers pass over."
)
@reader_options
def skip(*, node: str, pipeline: str | None, until: int, **hub: Any) -> None:
    """Let readers pass over epochs of a node that they cannot read, or that were lost when the hub was restored.

    The rows of these epochs are never read. The node is released; what was skipped stays listed.
    """
    from fordstone.hub.messages import SkipRequest

    with connected(**hub) as client:
        info = one_node(client, node, pipeline)
        skipped = request(client, lambda client: client.skip(info.pipeline, node, SkipRequest(until=until)))
    click.echo(
        f"readers pass over {epochs_text(skipped.first, skipped.last)} of {node} ({info.pipeline}), with "
        f"{fmt.count(skipped.rows, 'row')} that the hub has."
    )


def describe_reading(one: NodeInfo) -> str:
    """Return in a few words why a node is not read on, and what was skipped; empty if there is nothing."""
    found = []
    if one.quarantine is not None:
        found.append(f"not read from epoch {one.quarantine.epoch} on: {safe(one.quarantine.reason)}")
    if one.resync:
        found.append("not in contact since the hub was restored")
    found += [
        f"{epochs_text(first, last)} lost" for first, last in open_gaps(one.lost, [skip.span for skip in one.skips])
    ]
    return "; ".join(found)


def quarantine_table(found: Sequence[NodeInfo], now_us: int) -> Table:
    """One row per node in quarantine, and per range of skipped epochs."""
    rows: list[tuple[str, ...]] = []
    for one in sorted(found, key=lambda info: (info.node, info.pipeline)):
        if one.quarantine is not None:
            at = one.quarantine
            rows.append(
                (
                    one.node,
                    one.pipeline,
                    f"quarantine from epoch {at.epoch}",
                    fmt.age(at.since_us, now_us),
                    at.by,
                    safe(at.reason),
                )
            )
        rows += [
            (
                one.node,
                one.pipeline,
                f"{epochs_text(skip.first, skip.last)} skipped",
                fmt.age(skip.at_us, now_us),
                "operator",
                fmt.count(skip.rows, "row"),
            )
            for skip in one.skips
        ]
    return Table(
        head=("node", "pipeline", "what", "since", "by", "reason"),
        rows=rows,
        empty="No node is in quarantine, and no epoch was skipped.",
    )


def epochs_text(first: int, last: int) -> str:
    """Return a range of epochs in words."""
    return "no epoch" if last < first else f"epoch {first}" if first == last else f"epochs {first} to {last}"


def one_node(client: HubClient, node: str, pipeline: str | None) -> NodeInfo:
    """Return the one pipeline on this node; an error if there are several, or none."""
    found = [one for one in request(client, lambda client: client.nodes()).nodes if one.node == node]
    chosen = [one for one in found if pipeline in {None, one.pipeline}]
    if len(chosen) == 1:
        return chosen[0]
    if len(chosen) > 1:
        raise UsageError(
            f"node {node} runs several pipelines: give --pipeline, one of {', '.join(one.pipeline for one in chosen)}."
        )
    what = f"node {node}" if pipeline is None or not found else f"pipeline {pipeline} on node {node}"
    raise UserError(f"the hub has no {what}. `fordstone nodes` lists them.")
