"""`fordstone run`: run a pipeline until its input ends or the process is told to stop. On the edge, that is this process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fordstone.cli.loading import load_pipeline
from fordstone.cli.logs import configure_logging
from fordstone.cli.memory import give_back, limit_polars
from fordstone.cli.mistakes import Misuse
from fordstone.cli.run_options import bounded_option, edge_options, refuse_others, shared_options, spark_options
from fordstone.cli.showing import make_view, shown
from fordstone.cli.spark import run_on_spark
from fordstone.cli.teaching import EngineOption, TaughtCommand
from fordstone.errors import FordstoneError

if TYPE_CHECKING:
    from fordstone.edge.config import RunConfig


@click.command(
    cls=TaughtCommand,
    examples=[
        "fordstone run cold_chain.py --bounded",
        "fordstone run cold_chain.py --state /var/lib/cold-chain --interval auto --recovery-goal 10s",
        "fordstone run pipelines.py:cold_chain --parallelism 4 --json",
        "fordstone run cold_chain.py --on spark --bounded",
        "fordstone run cold_chain.py --on spark --state /srv/center --from-checkpoint /var/lib/cold-chain",
    ],
)
@click.argument("file", metavar="FILE[:NAME]")
@click.option(
    "--on",
    "engine",
    type=click.Choice(["edge", "spark"]),
    default="edge",
    show_default=True,
    help="Which engine: this process alone, or Spark. The results are the same.",
)
@bounded_option
@shared_options
@edge_options
@spark_options
@click.pass_context
def run(context: click.Context, /, file: str, *, engine: str, verbose: int, as_json: bool, **options: Any) -> None:
    """Run a pipeline, on this machine or on Spark.

    FILE is a Python file that declares a pipeline; NAME the variable, if there are several. Checkpoints go to the state
    directory: after a stop, a crash or a power cut, the same command goes on where the last checkpoint stands.

    SIGINT (Ctrl-C) and SIGTERM finish the epoch and stop cleanly; the second one stops at once. Progress goes to stderr,
    so that sinks may print to stdout.
    """
    refuse_others(context, engine)
    configure_logging(verbose)
    strange = {one.name for one in context.command.params if isinstance(one, EngineOption) and one.engine != engine}
    options = {name: value for name, value in options.items() if name not in strange}
    if engine == "spark":
        run_on_spark(file, options, as_json=as_json, verbose=verbose)
    else:
        _run_on_edge(file, options, as_json=as_json)


def _run_on_edge(file: str, options: dict[str, Any], *, as_json: bool) -> None:
    limit_polars(options["parallelism"])
    pipeline = load_pipeline(file)
    plan = pipeline.plan()
    config = _config(options)
    from fordstone.edge.run import run as run_plan

    dead_letters = Path(config.state) / plan.pipeline / config.node / "dead-letters"
    view = make_view(plan, bounded=config.bounded, dead_letters=dead_letters, as_json=as_json)
    give_back()
    shown(view, lambda: run_plan(plan, pipeline.functions, config, on_progress=view.show))


def _config(options: dict[str, Any]) -> RunConfig:
    from fordstone.edge.config import RunConfig

    try:
        return RunConfig(**options)
    except FordstoneError as error:
        raise Misuse(str(error)) from error
