"""`fordstone edge`: the agent of a gateway. It runs the edge half of each pipeline as a child process, and restarts it after failures.

The agent loads neither pipelines nor Polars: a pipeline that breaks its process affects neither the others nor the agent.
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import Any, Final

import click

from fordstone.cli.errors import FAILED, WRONG_USAGE, UsageError
from fordstone.cli.loading import split_target
from fordstone.cli.logs import configure_logging, write_line
from fordstone.cli.options import (
    EXIT_CODES,
    HelpCommand,
    address_of,
    given_options,
    hub_options,
    node_of,
    outbox_options,
    pipeline_options,
    size_of,
    verbose_option,
)
from fordstone.cli.tiers import command, forwarded, spawning

LOOK_EVERY_S: Final = 0.1
_OURS: Final = frozenset({"files", "state", "node", "verbose"})


@click.command(
    cls=HelpCommand,
    epilog=EXIT_CODES,
    examples=[
        "fordstone edge cold_chain.py --hub https://hub.example:7411 --token-file /etc/fordstone/token",
        "fordstone edge cold_chain.py traffic.py --hub http://127.0.0.1:7411 --node gateway-7 --state /var/lib/fordstone",
    ],
)
@click.argument("files", metavar="FILE[:NAME]...", nargs=-1, required=True)
@hub_options
@click.option(
    "--node", metavar="ID", default=None, help="Name of this node at the hub.  [default: this machine's name]"
)
@click.option(
    "--state",
    metavar="DIR",
    default="state",
    help="Directory for checkpoints and for epochs that the hub does not have yet, with one folder per FILE.",
)
@outbox_options
@pipeline_options
@verbose_option
@click.pass_context
def edge(context: click.Context, /, files: tuple[str, ...], *, state: str, verbose: int, **options: Any) -> None:
    """Run pipelines on a gateway, and keep them running.

    Each FILE runs in its own process: `fordstone run FILE --part edge`. A process that fails is restarted after a wait that grows to a
    minute, unless its command was wrong or another process with this node's name has taken its pipeline over. While the hub is away the pipelines keep
    running; their epochs wait on the disk.

    Log lines are JSON, on stderr. SIGTERM and SIGINT finish the epochs and end with code 0 when all processes have ended.
    """
    # The start and end of a process are always logged.
    configure_logging(verbose + 1, as_json=True)
    node = node_of(options["node"])
    address_of(options["hub_url"], options["token_file"], options["ca"], why="`fordstone edge`")
    size_of(options["outbox_max"], "--outbox-max")
    labels = labels_of(files)
    names = frozenset(option.name or "" for option in context.command.params) - _OURS
    words = [*given_options(context, names), "--node", node, "--logs", "json", *(["-v"] * verbose)]
    from fordstone.edge.agent.supervisor import Job, Supervisor
    from fordstone.runtime.clock import SystemClock
    from fordstone.runtime.signals import Signals

    supervisor = Supervisor(spawn=spawning(_print, catch_out=False), monotonic_us=SystemClock().monotonic_us)
    for label, file in labels.items():
        first = command("run", file, "--part", "edge", "--state", str(Path(state) / label), *words)
        # --take-over is repeated until it has succeeded, since it cannot while the hub is away. A restart after that omits it:
        # otherwise a restarted process would fence the node that has taken over in the meantime.
        again = tuple(word for word in first if word != "--take-over")
        supervisor.add(Job(name=label, command=first, again=again))
    try:
        with Signals() as signals:
            while not supervisor.over:
                supervisor.step()
                if signals.stop_requested:
                    supervisor.stop()
                time.sleep(LOOK_EVERY_S)
    finally:
        supervisor.kill()
    codes = [supervisor.code_of(label) for label in supervisor.given_up]
    if codes:
        sys.exit(WRONG_USAGE if set(codes) == {WRONG_USAGE} else FAILED)


def labels_of(files: tuple[str, ...]) -> dict[str, str]:
    """The name of each file's folder in the state directory; rejects two files with the same name."""
    labels: dict[str, str] = {}
    for file in files:
        path, name = split_target(file)
        label = path.stem if name is None else f"{path.stem}.{name}"
        if label in labels:
            raise UsageError(
                f"{labels[label]} and {file} would share the folder {label} of the state directory. Rename one."
            )
        labels[label] = file
    return labels


def _print(name: str, _stream: str, text: str) -> None:
    # A closed standard error does not stop a pipeline.
    with contextlib.suppress(OSError):
        write_line(forwarded(name, text))
