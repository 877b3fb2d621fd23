"""`fordstone run`: run a pipeline until its input ends or the process is told to stop. On the edge, that is this process.

A pipeline of two tiers runs as several processes (`cli.tiers`), unless `--part` says which of its halves to run here.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fordstone.cli.errors import Misuse
from fordstone.cli.help import EXIT_CODES, FENCED_CODE, EngineOption, TaughtCommand, TierOption
from fordstone.cli.hub_options import node_of, outbox_of, outbox_options, tier_hub_options
from fordstone.cli.loading import load_pipeline
from fordstone.cli.logs import configure_logging, say_always
from fordstone.cli.memory import give_back, limit_polars
from fordstone.cli.options import bounded_option, edge_options, refuse_others, shared_options, spark_options
from fordstone.cli.spark import run_on_spark
from fordstone.cli.tier_options import (
    CENTER_NODE,
    HUB,
    OUTBOX,
    Part,
    given,
    half_of,
    health_told,
    hub_of,
    refuse_tier_options,
)
from fordstone.cli.view.showing import make_view, shown
from fordstone.errors import FordstoneError

if TYPE_CHECKING:
    from fordstone.api.pipeline import Pipeline
    from fordstone.edge.config import RunConfig
    from fordstone.plan.plan import Plan
    from fordstone.runtime.progress import Progress, Report


@click.command(
    cls=TaughtCommand,
    epilog=f"{EXIT_CODES} {FENCED_CODE}",
    examples=[
        "fordstone run cold_chain.py --bounded",
        "fordstone run cold_chain.py --state /var/lib/cold-chain --interval auto --recovery-goal 10s",
        "fordstone run pipelines.py:cold_chain --parallelism 4 --json",
        "fordstone run cold_chain.py --on spark --bounded",
        "fordstone run cold_chain.py --on spark --state /srv/center --from-checkpoint /var/lib/cold-chain",
        "fordstone run cold_chain.py --center local         two tiers, without a JVM",
        "fordstone run cold_chain.py --part edge --hub https://hub.example:7411 --token-file token",
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
@click.option(
    "--center",
    "center_on",
    cls=TierOption,
    type=click.Choice(["spark", "local"]),
    default="spark",
    show_default=True,
    help="With all on this machine: the center on Spark, or on the engine of the edge, without a JVM.",
)
@click.option(
    "--part",
    cls=TierOption,
    type=click.Choice(["edge", "center"]),
    default=None,
    help="Run this half alone, with the hub that --hub names.  [default: all on this machine]",
)
@tier_hub_options
@outbox_options
@click.pass_context
def run(
    context: click.Context,
    /,
    file: str,
    *,
    engine: str,
    part: Part | None,
    verbose: int,
    as_json: bool,
    logs: str,
    progress_every: str,
    **options: Any,
) -> None:
    """Run a pipeline, on this machine or on Spark.

    FILE is a Python file that declares a pipeline; NAME the variable, if there are several. Checkpoints go to the state
    directory: after a stop, a crash or a power cut, the same command goes on where the last checkpoint stands.

    A pipeline of two tiers (one with to_center) runs as three processes: its edge half, a hub, and its center on Spark. They
    start and stop together. With --part one half of it runs here.

    SIGINT (Ctrl-C) and SIGTERM finish the epoch and stop cleanly; the second one stops at once. Progress goes to stderr,
    so that sinks may print to stdout.
    """
    configure_logging(verbose, as_json=logs == "json")
    if part != "edge" and engine == "spark":
        limit_polars(1)
    else:
        limit_polars(options["parallelism"])
    if part is not None:
        _refuse_for_part(context, part, engine)
    pipeline = load_pipeline(file)
    plan = pipeline.plan()
    say_always(pipeline=plan.pipeline)
    if part is None and plan.tiered:
        from fordstone.cli.tiers import run_tiers

        run_tiers(context, file, plan, as_json=as_json)
        return
    if part is None:
        why = f"pipeline {plan.pipeline} has one tier: nothing in it goes to_center(). Leave the option out."
        refuse_tier_options(context, frozenset(), why)
    refuse_others(context, engine)
    strange = {one.name for one in context.command.params if isinstance(one, EngineOption) and one.engine != engine}
    options = {name: value for name, value in options.items() if name not in strange}
    run_part(
        context,
        file,
        pipeline,
        options,
        part=part,
        engine=engine,
        as_json=as_json,
        verbose=verbose,
        logged_every=progress_every if logs == "json" else None,
    )


def run_part(
    context: click.Context,
    file: str,
    pipeline: Pipeline,
    options: dict[str, Any],
    *,
    part: Part | None,
    engine: str,
    as_json: bool,
    verbose: int,
    logged_every: str | None,
) -> None:
    """Run a pipeline of one tier, or one half of a pipeline of two. `options`: those of the engine, and those of two tiers."""
    plan = pipeline.plan()
    hub = hub_of(options, part) if part is not None else None
    if hub is not None and part is not None:
        plan = half_of(plan, part, hub)
        if not given(context, "node"):
            options["node"] = node_of(None) if part == "edge" else CENTER_NODE
    for name in (*HUB, "center_on"):
        options.pop(name, None)
    outbox = outbox_of(options) if options.keys() >= OUTBOX else {}
    if engine == "spark":
        run_on_spark(
            plan, pipeline.functions, options, file=file, as_json=as_json, verbose=verbose, logged_every=logged_every
        )
        return
    config = config_of(options | ({"hub": hub} | outbox if part == "edge" else {}))
    _run_on_edge(plan, pipeline, config, as_json=as_json, logged_every=logged_every)


def _run_on_edge(plan: Plan, pipeline: Pipeline, config: RunConfig, *, as_json: bool, logged_every: str | None) -> None:
    from fordstone.edge.run import run as run_plan

    dead_letters = Path(config.state) / plan.pipeline / config.node / "dead-letters"
    view = make_view(
        plan, bounded=config.bounded, dead_letters=dead_letters, as_json=as_json, logged_every=logged_every
    )
    hub = config.hub
    give_back()

    def work() -> Report:
        if hub is None:
            return run_plan(plan, pipeline.functions, config, on_progress=view.show)
        with health_told(plan, config.node, hub) as health:

            def show(progress: Progress) -> None:
                health.show(progress)
                view.show(progress)

            return run_plan(plan, pipeline.functions, config, on_progress=show)

    shown(view, work)


def config_of(options: dict[str, Any]) -> RunConfig:
    """How the edge engine is to run, from options."""
    from fordstone.edge.config import RunConfig

    try:
        return RunConfig(**options)
    except FordstoneError as error:
        raise Misuse(str(error)) from error


def _refuse_for_part(context: click.Context, part: Part, engine: str) -> None:
    if part == "edge" and engine == "spark":
        raise Misuse("--part edge runs in this process; --on spark goes with --part center.")
    if part == "edge":
        refuse_tier_options(context, HUB | OUTBOX | {"part"}, "with --part edge there is no center here.")
    else:
        refuse_tier_options(
            context, HUB | {"part"}, "that goes with --part edge; the center keeps nothing for the hub."
        )
