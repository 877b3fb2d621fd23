"""`fordstone hub`: run the service between nodes and center, and manage its tokens."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any, Final

import click

from fordstone.cli import format as fmt
from fordstone.cli.errors import UsageError, UserError
from fordstone.cli.help import HelpGroup
from fordstone.cli.logs import configure_logging
from fordstone.cli.options import json_option
from fordstone.cli.table import Table
from fordstone.errors import FordstoneError

DATA: Final = "hub"
_VERBOSITY: Final = {"warning": 0, "info": 1, "debug": 2}
_FILE = click.Path(path_type=Path)


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
    show_default=True,
    help="Address to listen at; port 0 means any free port. Beyond this machine, TLS and tokens are required.",
)
@click.option("--data", metavar="DIR", default=DATA, show_default=True, help="Directory for the log, blobs and tokens.")
@click.option(
    "--blobs", metavar="URL", default=None, help="Location of blobs: any fsspec URL.  [default: below --data]"
)
@click.option(
    "--blobs-direct/--no-blobs-direct",
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
    help="Delete epochs after this time even if no consumer has read them.  [default: never]",
)
@click.option(
    "--rate",
    metavar="N",
    type=float,
    default=500.0,
    show_default=True,
    help="Maximum requests per second with one node's token; the center may make twenty times as many.",
)
@click.option(
    "--blob-max",
    metavar="BYTES",
    type=int,
    default=256 << 20,
    show_default=True,
    help="Maximum size of a blob.",
)
@click.option(
    "--body-max",
    metavar="BYTES",
    type=int,
    default=16 << 20,
    show_default=True,
    help="Maximum size of any other request body.",
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
    show_default=True,
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
        "fordstone hub token add center --center > center.token",
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
    data: str | None,
) -> None:
    """Make a token and print it.

    It is shown only once: the hub stores its hash. Give it to the node in a file (--token-file) that only the node's user can read, or
    as FORDSTONE_HUB_TOKEN.
    """
    if [node is not None, center, admin].count(True) != 1:
        raise UsageError("give exactly one of --node ID, --center and --admin.")
    if admin and pipelines:
        raise UsageError("--pipeline goes with --node and --center; an admin token is for everything.")
    from fordstone.hub.server.auth import TokenFile

    file = TokenFile(data or parent)
    try:
        text = file.add(
            name,
            role="node" if node is not None else "center" if center else "admin",
            node=node,
            pipelines=pipelines,
            now_us=time.time_ns() // 1_000,
        )
    except FordstoneError as error:
        raise UsageError(str(error)) from error
    click.echo(text)
    click.echo(f"Store it now: {file.path} has only its hash.", err=True)


@token.command("revoke", examples=["fordstone hub token revoke truck-7 --data /var/lib/hub"])
@click.argument("name")
@_data_option
@click.pass_obj
def revoke_token(parent: str, /, *, name: str, data: str | None) -> None:
    """Revoke a token, at once and forever."""
    from fordstone.hub.server.auth import TokenFile

    try:
        TokenFile(data or parent).revoke(name, now_us=time.time_ns() // 1_000)
    except FordstoneError as error:
        raise UsageError(str(error)) from error
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
        for one in tokens:
            body = {
                "name": one.name, "role": one.role, "node": one.node, "pipelines": one.pipelines,
                "created_us": one.created_us, "revoked_us": one.revoked_us, "used_us": used_us.get(one.name),
            }  # fmt: skip
            click.echo(json.dumps(body))
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
    except ModuleNotFoundError as error:
        raise UserError(
            f"the hub needs {error.name}, which is not installed here. Install it with: pip install 'fordstone[hub]'"
        ) from error

    def ready(url: str) -> None:
        click.echo(json.dumps({"url": url, "data": data}) if as_json else f"hub listens at {url}, data in {data}")

    try:
        limits = Limits(
            rate_per_s=options.pop("rate"),
            blob_bytes_max=options.pop("blob_max"),
            body_bytes_max=options.pop("body_max"),
        )
        keep_unread_us = None if keep_unread is None else positive_us(keep_unread, what="--keep-unread")
        serve(HubOptions(data=Path(data), keep_unread_us=keep_unread_us, limits=limits, **options), on_ready=ready)
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
