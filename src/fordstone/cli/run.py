"""`fordstone run`: run a pipeline on this machine until its input ends or the process is told to stop."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fordstone.cli.loading import load_pipeline
from fordstone.cli.logs import configure_logging
from fordstone.cli.memory import give_back, limit_polars
from fordstone.cli.mistakes import Misuse
from fordstone.cli.teaching import TaughtCommand
from fordstone.cli.view import JsonView, LineView, View
from fordstone.errors import FordstoneError

if TYPE_CHECKING:
    from fordstone.edge.config import RunConfig
    from fordstone.model.plan import Plan


@click.command(
    cls=TaughtCommand,
    examples=[
        "fordstone run cold_chain.py --bounded",
        "fordstone run cold_chain.py --state /var/lib/cold-chain --interval auto --recovery-goal 10s",
        "fordstone run pipelines.py:cold_chain --parallelism 4 --json",
    ],
)
@click.argument("file", metavar="FILE[:NAME]")
@click.option("--bounded", is_flag=True, help="Stop when everything that is there now has been read.")
@click.option("--state", metavar="DIR", default="state", show_default=True, help="Where checkpoints are kept.")
@click.option(
    "--node", metavar="ID", default="node", show_default=True, help="The name of this machine in the state directory."
)
@click.option(
    "--parallelism",
    metavar="N",
    type=int,
    default=1,
    show_default=True,
    help="Subtasks a keyed step and source; may change between runs.",
)
@click.option(
    "--interval",
    metavar="SPAN",
    default="1s",
    show_default=True,
    help="Between two checkpoints; 'auto' chooses it by their cost.",
)
@click.option(
    "--failure-every",
    metavar="SPAN",
    default="1d",
    show_default=True,
    help="For 'auto': the mean time between failures.",
)
@click.option(
    "--recovery-goal",
    metavar="SPAN",
    default=None,
    help="For 'auto': in what time after a failure all should be as before.",
)
@click.option(
    "--checkpoint-timeout",
    metavar="SPAN",
    default="10m",
    show_default=True,
    help="After this a checkpoint is given up and tried anew.",
)
@click.option("--keep", metavar="N", type=int, default=3, show_default=True, help="How many checkpoints are kept.")
@click.option(
    "--compression",
    type=click.Choice(["lz4", "zstd", "none"]),
    default="lz4",
    show_default=True,
    help="Of what is stored.",
)
@click.option(
    "--remote", metavar="URL", default=None, help="Copy checkpoints there in the background (any fsspec URL)."
)
@click.option(
    "--allow-new-state", is_flag=True, help="Go on although stateful steps changed; the state of those is dropped."
)
@click.option("--batch-rows", metavar="N", type=int, default=65_536, show_default=True, help="Rows read at a time.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON lines to stdout: progress once a second, a report at the end."
)
@click.option("-v", "--verbose", count=True, help="Log more; twice for everything.")
def run(file: str, *, as_json: bool, verbose: int, **options: Any) -> None:
    """Run a pipeline on this machine.

    FILE is a Python file that declares a pipeline; NAME the variable, if there are several. Checkpoints go to the state
    directory: after a stop, a crash or a power cut, the same command goes on where the last checkpoint stands.

    SIGINT (Ctrl-C) and SIGTERM finish the epoch and stop cleanly; the second one stops at once. Progress goes to stderr,
    so that sinks may print to stdout.
    """
    configure_logging(verbose)
    limit_polars(options["parallelism"])
    pipeline = load_pipeline(file)
    plan = pipeline.plan()
    config = _config(options)
    from fordstone.edge.run import run as run_plan

    view = _view(plan, config, as_json=as_json)
    give_back()
    try:
        with view:
            report = run_plan(plan, pipeline.functions, config, on_progress=view.show)
    except Exception as error:
        view.failed(error)
        raise
    view.report(report)


def _config(options: dict[str, Any]) -> RunConfig:
    from fordstone.edge.config import RunConfig

    try:
        return RunConfig(**options)
    except FordstoneError as error:
        raise Misuse(str(error)) from error


def _view(plan: Plan, config: RunConfig, *, as_json: bool) -> View:
    if as_json:
        _check_stdout(plan)
        return JsonView(monotonic_us=_monotonic_us)
    dead_letters = Path(config.state) / plan.pipeline / config.node / "dead-letters"
    plain = LineView(bounded=config.bounded, dead_letters=dead_letters, monotonic_us=_monotonic_us, wall_us=_wall_us)
    if not sys.stderr.isatty():
        return plain
    from fordstone.cli.live import LiveView

    return LiveView(plain)


def _check_stdout(plan: Plan) -> None:
    """With --json, standard output is for the machine that reads it."""
    from fordstone.connectors.live_spec import live_of
    from fordstone.model import plan as p

    printing = [
        step.name
        for step in plan.steps
        if isinstance(step, p.Sink) and step.connector.kind == "stdout" and live_of(step.connector) is None
    ]
    if printing:
        raise Misuse(
            f"--json needs stdout for itself, and sink {', '.join(printing)} prints there. Let the sink write files, or leave --json out."
        )


def _monotonic_us() -> int:
    return time.monotonic_ns() // 1_000


def _wall_us() -> int:
    return time.time_ns() // 1_000
