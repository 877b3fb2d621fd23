"""`fordstone hub`: run the service between nodes and center, and make the tokens by which they are known."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any, Final

import click

from fordstone.cli import format as wording
from fordstone.cli.errors import Mistake, Misuse
from fordstone.cli.help import TaughtGroup
from fordstone.cli.logs import StderrHandler, configure_logging
from fordstone.errors import FordstoneError

DATA: Final = "hub"
_VERBOSITY: Final = {"warning": 0, "info": 1, "debug": 2}
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_FILE = click.Path(path_type=Path)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, event, then the fields of the event."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, whatever is in it."""
        body: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        body |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            body["traceback"] = self.formatException(record.exc_info)
        return json.dumps(body, default=str, ensure_ascii=False)


@click.group(
    cls=TaughtGroup,
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
    help="Where to listen; port 0 takes a free one. Beyond this machine, TLS and tokens are needed.",
)
@click.option("--data", metavar="DIR", default=DATA, show_default=True, help="Where log, blobs and tokens are kept.")
@click.option("--blobs", metavar="URL", default=None, help="Where blobs go: any fsspec URL.  [default: below --data]")
@click.option(
    "--blobs-direct/--no-blobs-direct",
    default=None,
    help="Whether readers are told where blobs lie, to read them there if they can.  [default: unless the URL has a password]",
)
@click.option(
    "--tls-cert", metavar="FILE", type=_FILE, default=None, help="The certificate and its chain, in PEM form."
)
@click.option("--tls-key", metavar="FILE", type=_FILE, default=None, help="Its key, without a password.")
@click.option(
    "--keep-unread",
    metavar="SPAN",
    default=None,
    help="Let go of epochs after this time even if nobody has read them.  [default: never]",
)
@click.option(
    "--rate",
    metavar="N",
    type=float,
    default=500.0,
    show_default=True,
    help="Requests a second that one node's token may make; the center may make twenty times as many.",
)
@click.option(
    "--blob-max",
    metavar="BYTES",
    type=int,
    default=256 << 20,
    show_default=True,
    help="The largest blob that is taken.",
)
@click.option(
    "--body-max",
    metavar="BYTES",
    type=int,
    default=16 << 20,
    show_default=True,
    help="The largest body of any other request.",
)
@click.option(
    "--ready-file", metavar="FILE", type=_FILE, default=None, help="Write the URL here once requests are answered."
)
@click.option(
    "--log-level",
    type=click.Choice(list(_VERBOSITY)),
    default="warning",
    show_default=True,
    help="What is logged to stderr: refused requests are 'info', all others 'debug'.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the URL, and log, as JSON lines.")
@click.pass_context
def hub(context: click.Context, /, *, data: str, log_level: str, as_json: bool, **options: Any) -> None:
    """Run the hub: the service between nodes and center.

    Nodes send it their epochs; it keeps them until the center has read them, and hands control tables back. It says that
    it has an epoch once that is on disk: after a crash or a power cut, the same command goes on where it was.

    SIGINT (Ctrl-C) and SIGTERM end it cleanly; the second one ends it at once.
    """
    context.obj = data
    if context.invoked_subcommand is not None:
        return
    configure_logging(_VERBOSITY[log_level])
    _share_handlers(as_json=as_json)
    _serve(data, as_json=as_json, **options)


@hub.group(
    cls=TaughtGroup,
    examples=[
        "fordstone hub token add truck-7 --node truck-7 --pipeline cold-chain --data /var/lib/hub",
        "fordstone hub token add center --center",
        "fordstone hub token ls",
        "fordstone hub token revoke truck-7",
    ],
)
def token() -> None:
    """Make, revoke and list the tokens by which the hub knows who asks.

    A running hub notices within a second. As soon as there is a token, nobody gets in without one.
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
@click.option("--node", metavar="ID", default=None, help="For this node, and for what a node does.")
@click.option("--center", is_flag=True, help="For the center: reads streams and state, publishes control tables.")
@click.option("--admin", is_flag=True, help="For everything.")
@click.option(
    "--pipeline", "pipelines", metavar="P", multiple=True, help="For this pipeline only; may be given several times."
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

    It is shown this once: only its hash is stored. Give it to the node in a file (--token-file) that only the node's user
    can read, or as FORDSTONE_HUB_TOKEN.
    """
    if [node is not None, center, admin].count(True) != 1:
        raise Misuse("say for whom the token is, with one of --node ID, --center and --admin.")
    if admin and pipelines:
        raise Misuse("an admin may do everything: --pipeline goes with --node and --center.")
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
        raise Misuse(str(error)) from error
    click.echo(text)
    click.echo(f"Keep it: only its hash is in {file.path}.", err=True)


@token.command("revoke", examples=["fordstone hub token revoke truck-7 --data /var/lib/hub"])
@click.argument("name")
@_data_option
@click.pass_obj
def revoke_token(parent: str, /, *, name: str, data: str | None) -> None:
    """Make a token worthless, at once and for good."""
    from fordstone.hub.server.auth import TokenFile

    try:
        TokenFile(data or parent).revoke(name, now_us=time.time_ns() // 1_000)
    except FordstoneError as error:
        raise Misuse(str(error)) from error
    click.echo(f"revoked {name}.")


@token.command("ls", examples=["fordstone hub token ls", "fordstone hub token ls --data /var/lib/hub --json"])
@_data_option
@click.option("--json", "as_json", is_flag=True, help="For machines.")
@click.pass_obj
def list_tokens(parent: str, /, *, data: str | None, as_json: bool) -> None:
    """List the tokens: for whom they are, and when they were last used."""
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
        click.echo(f"{file.path} has no tokens: the hub is open, and listens on this machine only.")
        return
    rows = [
        [
            one.name,
            f"node {one.node}" if one.role == "node" else one.role,
            ", ".join(one.pipelines) if one.pipelines is not None else "all",
            wording.instant(one.created_us),
            wording.instant(used_us[one.name]) if one.name in used_us else "never",
            "yes" if one.revoked_us is None else f"revoked {wording.instant(one.revoked_us)}",
        ]
        for one in tokens
    ]
    click.echo(wording.table(["name", "for", "pipelines", "made", "last used", "holds"], rows))


def _serve(data: str, *, as_json: bool, keep_unread: str | None, **options: Any) -> None:
    from fordstone.errors import ConfigError
    from fordstone.lang.duration import positive_us

    try:
        from fordstone.hub.server.limits import Limits
        from fordstone.hub.server.serve import HubOptions, serve
    except ModuleNotFoundError as error:
        raise Mistake(
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
        raise Misuse(str(error)) from error


def _share_handlers(*, as_json: bool) -> None:
    """What the web server has to say goes where our log goes."""
    ours = logging.getLogger("fordstone")
    if as_json:
        handler = StderrHandler()
        handler.setFormatter(JsonFormatter())
        ours.handlers[:] = [handler]
    for name, level in (("uvicorn", logging.ERROR), ("asyncio", logging.ERROR)):
        theirs = logging.getLogger(name)
        theirs.handlers[:] = ours.handlers
        theirs.propagate = False
        theirs.setLevel(level)
