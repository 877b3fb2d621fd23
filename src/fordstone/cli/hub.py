"""`fordstone hub`: run the service between nodes and center, and manage its tokens. `nodes`, `streams`, `epochs`: what a hub has."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from fordstone.cli import format as fmt
from fordstone.cli.ask import show
from fordstone.cli.errors import UsageError, UserError, wrong_usage
from fordstone.cli.forget import forget
from fordstone.cli.format import Table, safe
from fordstone.cli.logs import configure_logging
from fordstone.cli.options import HelpCommand, HelpGroup, json_option, options_of, reader_options
from fordstone.cli.quarantine import describe_reading, quarantine, release, skip
from fordstone.cli.restore import restore
from fordstone.cli.scrub import scrub
from fordstone.cli.view.view import TIME_END_US, outbox_text
from fordstone.storage.clock import wall_clock_us

if TYPE_CHECKING:
    from fordstone.hub.messages import EpochInfo, NodeInfo, StreamInfo

DATA: Final = "hub"
LIMIT_OPTIONS: Final = ("rate_per_s", "blob_bytes_max", "body_bytes_max", "bytes_per_hour")
"""The options that set fields of `Limits`."""
LOG_LIMIT_OPTIONS: Final = ("nodes_per_pipeline", "streams_per_pipeline", "pipelines_per_node")
"""The options that set fields of `LogLimits`."""
_VERBOSITY: Final = {"warning": 0, "info": 1, "debug": 2}
_FILE = click.Path(path_type=Path)
SILENT_US: Final = 30_000_000
"""A node is shown as silent after this time, in which it should have reported three times."""
TIME_BEGIN_US: Final = -(2**62)


@click.group(
    cls=HelpGroup,
    invoke_without_command=True,
    examples=[
        "fordstone hub                                           on this machine only: 127.0.0.1:7411",
        "fordstone hub token add truck-7 --node truck-7          a token for a node, shown once",
        "fordstone hub --listen 0.0.0.0:7411 --tls-cert hub.crt --tls-key hub.key --data /var/lib/hub",
        "fordstone hub --blobs s3://bucket/hub --data /var/lib/hub",
        "fordstone hub --listen 127.0.0.1:0 --ready-file hub.url --json",
    ],
)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    default="127.0.0.1:7411",
    help="Address to listen at; port 0 means any free port. Beyond this machine, TLS and tokens are required.",
)
@click.option("--data", metavar="DIR", default=DATA, help="Directory for the log, blobs and tokens.")
@click.option(
    "--blobs", metavar="URL", default=None, help="Location of blobs: any fsspec URL.  [default: below --data]"
)
@click.option(
    "--direct-blobs/--no-direct-blobs",
    default=None,
    help="Whether readers get the location of blobs, to read them there if they can.  [default: yes, unless the URL has a password]",
)
@click.option("--tls-cert", metavar="FILE", type=_FILE, default=None, help="Certificate and its chain, as PEM.")
@click.option(
    "--tls-key", metavar="FILE", type=_FILE, default=None, help="Private key of the certificate, without a password."
)
@click.option(
    "--keep-unread",
    metavar="SPAN",
    default=None,
    help="Delete epochs after this time even if no consumer has read them; only time in which the hub runs counts.  [default: never]",
)
@click.option(
    "--rate",
    "rate_per_s",
    metavar="N",
    type=float,
    default=500.0,
    help="Maximum requests per second with one node's token; the center may make twenty times as many.",
)
@click.option(
    "--blob-max",
    "blob_bytes_max",
    metavar="BYTES",
    type=int,
    default=256 << 20,
    help="Maximum size of a blob.",
)
@click.option(
    "--body-max",
    "body_bytes_max",
    metavar="BYTES",
    type=int,
    default=16 << 20,
    help="Maximum size of any other request body.",
)
@click.option(
    "--bytes-per-hour",
    metavar="BYTES",
    type=int,
    default=32 << 30,
    help="Maximum bytes per hour with one node's token, sent and received; for the center twenty times as many.",
)
@click.option(
    "--scrub-rate",
    "scrub_bytes_per_s",
    metavar="BYTES",
    type=click.IntRange(min=0, max=1 << 40),
    default=None,
    help="Bytes of stored blobs per second that the hub reads in the background, to find damaged ones; 0 turns it off.  "
    "[default: 4194304; blobs at --blobs URL are left out unless it is given]",
)
@click.option(
    "--nodes-max",
    "nodes_per_pipeline",
    metavar="N",
    type=click.IntRange(min=1),
    default=10_000,
    help="Maximum number of nodes of one pipeline.",
)
@click.option(
    "--streams-max",
    "streams_per_pipeline",
    metavar="N",
    type=click.IntRange(min=1),
    default=1_000,
    help="Maximum number of streams of one pipeline; one node may write to a fifth of them.",
)
@click.option(
    "--pipelines-max",
    "pipelines_per_node",
    metavar="N",
    type=click.IntRange(min=1),
    default=100,
    help="Maximum number of pipelines of one node.",
)
@click.option(
    "--ready-file",
    metavar="FILE",
    type=_FILE,
    default=None,
    help="Write the URL to this file once the hub answers requests.",
)
@click.option(
    "--log-level",
    type=click.Choice(list(_VERBOSITY)),
    default="warning",
    help="Level of log lines on stderr: rejected requests are 'info', all others 'debug'.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the URL and the log as JSON lines.")
@click.pass_context
def hub(context: click.Context, /, *, data: str, log_level: str, as_json: bool, **options: Any) -> None:
    """Run the hub: the service between nodes and center.

    Nodes send their epochs to it. It retains them until the center has read them, and serves control tables to the nodes. It
    acknowledges an epoch when that is on disk: after a crash or a power failure, the same command resumes.

    SIGINT (Ctrl-C) and SIGTERM stop it cleanly; a second signal stops it at once.
    """
    context.obj = data
    if context.invoked_subcommand is not None:
        return
    configure_logging(_VERBOSITY[log_level], as_json=as_json)
    _share_handlers()
    _serve(data, as_json=as_json, **options)


@hub.group(
    cls=HelpGroup,
    examples=[
        "fordstone hub token add truck-7 --node truck-7 --pipeline cold-chain --data /var/lib/hub",
        "fordstone hub token add center --center",
        "fordstone hub token ls",
        "fordstone hub token revoke truck-7",
    ],
)
def token() -> None:
    """Make, revoke and list tokens.

    A running hub notices changes within a second. As soon as there is a token, every request needs one.
    """


_data_option = click.option("--data", metavar="DIR", default=None, help=f"The hub's data directory.  [default: {DATA}]")


@token.command(
    "add",
    examples=[
        "fordstone hub token add truck-7 --node truck-7",
        "fordstone hub token add truck-7 --node truck-7 --pipeline cold-chain --pipeline doors",
        "fordstone hub token add center --center --out center.token",
        "fordstone hub token add ops --admin",
    ],
)
@click.argument("name")
@click.option("--node", metavar="ID", default=None, help="A token for this node.")
@click.option(
    "--center", is_flag=True, help="A token for the center: reads streams and state, publishes control tables."
)
@click.option("--admin", is_flag=True, help="A token for everything.")
@click.option(
    "--pipeline", "pipelines", metavar="P", multiple=True, help="Only for this pipeline; may be given several times."
)
@click.option(
    "--out",
    metavar="FILE",
    type=_FILE,
    default=None,
    help="Write the token to this new file, which only you can read, instead of printing it.",
)
@_data_option
@click.pass_obj
def add_token(
    parent: str,
    /,
    *,
    name: str,
    node: str | None,
    center: bool,
    admin: bool,
    pipelines: tuple[str, ...],
    out: Path | None,
    data: str | None,
) -> None:
    """Make a token and print it, or write it to a file.

    It is shown only once: the hub stores its hash. Give it to the node in a file (--token-file) that only the node's user can read, or
    as FORDSTONE_HUB_TOKEN.
    """
    if [node is not None, center, admin].count(True) != 1:
        raise UsageError("give exactly one of --node ID, --center and --admin.")
    if admin and pipelines:
        raise UsageError("--pipeline goes with --node and --center; an admin token is for everything.")
    from fordstone.hub.server.auth import TokenFile

    file = TokenFile(data or parent)
    with wrong_usage(), _new_file(out) as write:
        text = file.add(
            name,
            role="node" if node is not None else "center" if center else "admin",
            node=node,
            pipelines=pipelines,
            now_us=wall_clock_us(),
        )
        write(text)
    if out is None:
        click.echo(f"Store it now: {file.path} has only its hash.", err=True)
    else:
        click.echo(f"wrote the token to {out}; {file.path} has only its hash.")


@contextmanager
def _new_file(path: Path | None) -> Iterator[Callable[[str], None]]:
    """Give a function that writes a secret: to a new file that only its owner can read, or to standard output if `path` is None.

    If anything fails, the file is removed.
    """
    if path is None:
        yield click.echo
        return
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise UsageError(
            f"--out {path}: the file exists, and is not overwritten. Remove it, or choose another."
        ) from None
    except OSError as error:
        raise UsageError(f"--out {path}: {error.strerror}.") from error
    try:
        with os.fdopen(fd, "w", encoding="ascii") as file:

            def write(text: str) -> None:
                try:
                    file.write(f"{text}\n")
                    file.flush()
                    os.fsync(file.fileno())
                except OSError as error:
                    raise UserError(
                        f"--out {path}: {error.strerror}. The token is lost: revoke it, and make it again."
                    ) from error

            yield write
    except BaseException:
        path.unlink(missing_ok=True)
        raise


@token.command("revoke", examples=["fordstone hub token revoke truck-7 --data /var/lib/hub"])
@click.argument("name")
@_data_option
@click.pass_obj
def revoke_token(parent: str, /, *, name: str, data: str | None) -> None:
    """Revoke a token, at once and forever."""
    from fordstone.hub.server.auth import TokenFile

    with wrong_usage():
        TokenFile(data or parent).revoke(name, now_us=wall_clock_us())
    click.echo(f"revoked {name}.")


@token.command("ls", examples=["fordstone hub token ls", "fordstone hub token ls --data /var/lib/hub --json"])
@_data_option
@json_option
@click.pass_obj
def list_tokens(parent: str, /, *, data: str | None, as_json: bool) -> None:
    """List tokens: their role, and when they were last used."""
    from fordstone.hub.server.auth import TokenFile

    file = TokenFile(data or parent)
    tokens, used_us = file.read(), file.used_us()
    if as_json:
        import msgspec

        for one in tokens:
            body = msgspec.to_builtins(one) | {"used_us": used_us.get(one.name)}
            fmt.print_json({name: value for name, value in body.items() if name != "sha256"})
        return
    if not tokens:
        click.echo(f"{file.path} has no tokens: the hub accepts every request, and listens on this machine only.")
        return
    rows = [
        [
            one.name,
            f"node {one.node}" if one.role == "node" else one.role,
            ", ".join(one.pipelines) if one.pipelines is not None else "all",
            fmt.instant(one.created_us),
            fmt.instant(used_us[one.name]) if one.name in used_us else "never",
            "valid" if one.revoked_us is None else f"revoked {fmt.instant(one.revoked_us)}",
        ]
        for one in tokens
    ]
    click.echo(Table(head=["name", "role", "pipelines", "created", "last used", "status"], rows=rows).text())


def _serve(data: str, *, as_json: bool, keep_unread: str | None, **options: Any) -> None:
    from fordstone.errors import ConfigError
    from fordstone.lang.duration import positive_us

    try:
        from fordstone.hub.server.limits import Limits
        from fordstone.hub.server.serve import HubOptions, serve
        from fordstone.hub.store.log import LogLimits
    except ModuleNotFoundError as error:
        raise UserError(
            f"the hub needs {error.name}, which is not installed here. Install it with: pip install 'fordstone[hub]'"
        ) from error

    def ready(url: str) -> None:
        click.echo(json.dumps({"url": url, "data": data}) if as_json else f"hub listens at {url}, data in {data}")

    log_limits = LogLimits(**{name: options.pop(name) for name in LOG_LIMIT_OPTIONS})
    try:
        limits = Limits(**{name: options.pop(name) for name in LIMIT_OPTIONS})
        keep_unread_us = None if keep_unread is None else positive_us(keep_unread, what="--keep-unread")
        kept = HubOptions(
            data=Path(data), keep_unread_us=keep_unread_us, limits=limits, log_limits=log_limits, **options
        )
        serve(kept, on_ready=ready)
    except ConfigError as error:
        raise UsageError(str(error)) from error


def _share_handlers() -> None:
    """Send the web server's log lines to our handlers."""
    ours = logging.getLogger("fordstone")
    for name in ("uvicorn", "asyncio"):
        theirs = logging.getLogger(name)
        theirs.handlers[:] = ours.handlers
        theirs.propagate = False
        theirs.setLevel(logging.ERROR)


_reading = options_of(
    reader_options,
    json_option,
    click.option("--watch", is_flag=True, help="Refresh the table every two seconds, until Ctrl-C."),
)


@click.command(
    cls=HelpCommand,
    examples=[
        "fordstone nodes",
        "fordstone nodes --hub https://hub.example:7411 --token-file token --watch",
        "fordstone nodes --json | jq '.nodes[] | select(.health.problem != \"\")'",
    ],
)
@_reading
def nodes(**how: Any) -> None:
    """List nodes: their progress, outbox and problems.

    Lag is the time since the hub received the newest epoch of the node. The outbox is what waits on the node for the hub, as the node
    reports it.
    """
    show(lambda hub: hub.nodes(), lambda found: nodes_table(found.nodes, wall_clock_us()), **how)


@click.command(
    cls=HelpCommand,
    examples=["fordstone streams", "fordstone streams --hub https://hub.example:7411 --token-file token --json"],
)
@_reading
def streams(**how: Any) -> None:
    """List streams: nodes, size, and unread epochs."""
    show(lambda hub: hub.streams(), lambda found: streams_table(found.streams, wall_clock_us()), **how)


@click.command(
    cls=HelpCommand,
    examples=["fordstone epochs", "fordstone epochs --pipeline cold-chain --node gateway-7 --limit 100"],
)
@click.option("--pipeline", metavar="P", default=None, help="Only epochs of this pipeline.")
@click.option("--node", metavar="ID", default=None, help="Only epochs of this node.")
@click.option(
    "--limit",
    metavar="N",
    type=click.IntRange(1, 1_000_000),
    default=20,
    help="Maximum number of epochs.",
)
@_reading
def epochs(*, pipeline: str | None, node: str | None, limit: int, **how: Any) -> None:
    """List the epochs that a hub has received, newest first.

    Delay is the time from sealing an epoch to receiving it, which grows while a node is offline.
    """
    show(
        lambda hub: hub.epochs(pipeline=pipeline, node=node, limit=limit),
        lambda found: epochs_table(found.epochs, wall_clock_us()),
        **how,
    )


hub.add_command(scrub)
hub.add_command(restore)
hub.add_command(quarantine)
hub.add_command(release)
hub.add_command(skip)
hub.add_command(forget)


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
                "quarantine"
                if one.quarantine is not None
                else "silent"
                if silent
                else ""
                if health is None
                else health.state,
                fmt.count(one.head),
                fmt.age(one.seen_us, now_us),
                "" if one.committed_us is None else fmt.span(max(0, now_us - one.committed_us)),
                *_reported(one),
            )
        )
        failed = one.quarantine is not None or (health is not None and health.state == "failed")
        styles.append("red" if failed else "yellow" if silent or rows[-1][-1] else "")
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
            fmt.age(one.received_us, now_us),
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


def _reported(one: NodeInfo) -> tuple[str, str, str]:
    health, problems = one.health, describe_reading(one)
    if health is None:
        return "", "", problems
    problems = "; ".join(filter(None, (problems, safe(health.problem))))
    return fmt.count(health.progress.rows_in), outbox_text(health.progress), problems


def _time(watermark_us: int, now_us: int) -> str:
    if watermark_us >= TIME_END_US:
        return "ended"
    if watermark_us <= TIME_BEGIN_US:
        return ""
    return f"{fmt.instant(watermark_us)}, {fmt.span(now_us - watermark_us)} ago"
