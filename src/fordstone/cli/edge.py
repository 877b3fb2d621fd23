"""`fordstone edge`: the agent of a gateway. It runs the edge half of each pipeline as a process of its own, and keeps it running.

The agent loads neither pipelines nor Polars: what a pipeline does to its process does not touch the others, or the agent.
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import Any, Final

import click

from fordstone.cli.errors import FAILED, MISUSED, Misuse
from fordstone.cli.help import EXIT_CODES, TaughtCommand
from fordstone.cli.hub_options import address_of, given_options, hub_options, node_of, outbox_options, size_of
from fordstone.cli.loading import split_target
from fordstone.cli.logs import configure_logging
from fordstone.cli.options import pipeline_options
from fordstone.cli.tiers import command, passed_on, spawning

LOOK_EVERY_S: Final = 0.1
_OURS: Final = frozenset({"files", "state", "node", "verbose"})


@click.command(
    cls=TaughtCommand,
    epilog=EXIT_CODES,
    examples=[
        "fordstone edge cold_chain.py --hub https://hub.example:7411 --token-file /etc/fordstone/token",
        "fordstone edge cold_chain.py traffic.py --hub http://127.0.0.1:7411 --node gateway-7 --state /var/lib/fordstone",
    ],
)
@click.argument("files", metavar="FILE[:NAME]...", nargs=-1, required=True)
@hub_options
@click.option("--node", metavar="ID", default=None, help="The name of this node at the hub.  [default: this machine's]")
@click.option(
    "--state",
    metavar="DIR",
    default="state",
    show_default=True,
    help="Where checkpoints, and what the hub does not have yet, are kept: a folder in it for each FILE.",
)
@outbox_options
@pipeline_options
@click.option("-v", "--verbose", count=True, help="Log more; twice for everything.")
@click.pass_context
def edge(context: click.Context, /, files: tuple[str, ...], *, state: str, verbose: int, **options: Any) -> None:
    """Run pipelines on a gateway, and keep them running.

    Each FILE is a process of its own: `fordstone run FILE --part edge`. One that fails is started again, after waits that grow
    to a minute; one whose command was misused, or whose pipeline another node has taken over, is not. Without the hub the
    pipelines run on; what it does not have waits on the disk.

    Log lines are JSON, on stderr. SIGTERM and SIGINT finish the epochs and end with code 0 when all processes have ended.
    """
    # That a process was started or has ended is always told.
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

    supervisor = Supervisor(spawn=spawning(_say, catch_out=False), monotonic_us=SystemClock().monotonic_us)
    for label, file in labels.items():
        first = command("run", file, "--part", "edge", "--state", str(Path(state) / label), *words)
        # Said until it is done: while the hub is away, nothing can be taken over. But not for ever, lest whoever takes over from
        # us next is shut out by a process of ours that is started again.
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
        sys.exit(MISUSED if set(codes) == {MISUSED} else FAILED)


def labels_of(files: tuple[str, ...]) -> dict[str, str]:
    """A name for each file, by which its folder in the state directory is called; refuses what cannot be told apart."""
    labels: dict[str, str] = {}
    for file in files:
        path, name = split_target(file)
        label = path.stem if name is None else f"{path.stem}.{name}"
        if label in labels:
            raise Misuse(
                f"{labels[label]} and {file} would share the folder {label} of the state directory. Rename one."
            )
        labels[label] = file
    return labels


def _say(name: str, _stream: str, text: str) -> None:
    # Nobody who reads the log is no reason to stop a pipeline.
    with contextlib.suppress(OSError):
        print(passed_on(name, text), file=sys.stderr, flush=True)
