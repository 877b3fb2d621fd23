"""`fordstone edge`: the agent of a gateway. It runs the edge half of each pipeline as a child process, and restarts it after failures.

The agent loads neither pipelines nor Polars: a pipeline that breaks its process affects neither the others nor the agent.
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from fordstone.cli.errors import FAILED, WRONG_USAGE, UsageError, wrong_usage
from fordstone.cli.loading import split_target
from fordstone.cli.logs import configure_logging, write_line
from fordstone.cli.options import (
    EXIT_CODES,
    HelpCommand,
    address_of,
    given_options,
    health_option,
    hub_options,
    node_of,
    outbox_options,
    pipeline_options,
    size_of,
    verbose_option,
)
from fordstone.cli.tiers import command, event_of, forwarded, spawning
from fordstone.cli.view.view import PROGRESS
from fordstone.storage.clock import monotonic_clock_us

if TYPE_CHECKING:
    from collections.abc import Callable

    from fordstone.edge.agent.supervisor import Supervisor
    from fordstone.runtime.health import PipelineWatch

LOOK_EVERY_S: Final = 0.1
HEALTH_EVERY: Final = "5s"
"""How often a child reports progress to an agent that serves its health."""
PROGRESS_EVERY_S: Final = 60.0
"""How often the agent prints the progress of a child, however often that reports it."""
_OURS: Final = frozenset({"files", "state", "node", "verbose", "health"})


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
@health_option
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
    health: str | None = options["health"]
    names = frozenset(option.name or "" for option in context.command.params) - _OURS
    words = [*given_options(context, names), "--node", node, "--logs", "json", *(["-v"] * verbose)]
    words += ["--progress-every", HEALTH_EVERY] if health is not None else []
    from fordstone.edge.agent.supervisor import Job, Supervisor
    from fordstone.runtime.signals import Signals

    watches: dict[str, PipelineWatch] = {}
    serving: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if health is not None:
        from fordstone.runtime.health import HealthServer, PipelineWatch

        watches = {label: PipelineWatch(label) for label in labels}
        with wrong_usage():
            serving = HealthServer(health, tuple(watches.values()))
    lines = ChildLines(watches)
    supervisor = Supervisor(spawn=spawning(lines.on_line, catch_out=False), monotonic_us=monotonic_clock_us)
    for label, file in labels.items():
        first = command("run", file, "--part", "edge", "--state", str(Path(state) / label), *words)
        # --take-over is repeated until it has succeeded, since it cannot while the hub is away. A restart after that omits it:
        # otherwise a restarted process would fence the node that has taken over in the meantime.
        again = tuple(word for word in first if word != "--take-over")
        supervisor.add(Job(name=label, command=first, again=again))
    try:
        with serving, Signals() as signals:
            while not supervisor.over:
                supervisor.step()
                lines.look(supervisor)
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


class ChildLines:
    """Prints the lines of children as lines of the agent's log, and takes the health of their pipelines from their progress.

    Called from the children's threads, except for `look`.
    """

    def __init__(self, watches: dict[str, PipelineWatch], *, clock_s: Callable[[], float] = time.monotonic) -> None:
        """`watches`: by the name of the job; empty: health is not served."""
        self._watches = watches
        self._clock_s = clock_s
        self._printed_s: dict[str, float] = {}
        self._starts: dict[str, int] = {}

    def on_line(self, name: str, _stream: str, text: str) -> None:
        if name in self._watches and (event := event_of(text)) is not None and event.get("event") == PROGRESS:
            self._show(name, event)
            now_s = self._clock_s()
            if now_s - self._printed_s.get(name, float("-inf")) < PROGRESS_EVERY_S:
                return
            self._printed_s[name] = now_s
        # A closed standard error does not stop a pipeline.
        with contextlib.suppress(OSError):
            write_line(forwarded(name, text))

    def look(self, supervisor: Supervisor) -> None:
        """Take from the supervisor which processes were started again, and which have ended."""
        for name, watch in self._watches.items():
            starts = supervisor.starts_of(name)
            if starts > self._starts.get(name, 1):
                watch.restarting()
            self._starts[name] = max(starts, 1)
            if name in supervisor.given_up:
                watch.give_up()
            elif supervisor.has_ended(name):
                watch.end()

    def _show(self, name: str, event: dict[str, Any]) -> None:
        import msgspec

        from fordstone.protocol.progress import Progress

        # Otherwise it is not ours: the code of the pipeline printed a line that looks like it.
        with contextlib.suppress(msgspec.ValidationError):
            self._watches[name].show(msgspec.convert(event, Progress))
