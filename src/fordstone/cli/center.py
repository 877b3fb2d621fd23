"""`fordstone center`: the half of a pipeline that stands behind the cut, or a whole one, as an application that runs until it is told to stop."""

from __future__ import annotations

from typing import Any

import click

from fordstone.cli.errors import Misuse
from fordstone.cli.help import EngineOption, TaughtCommand
from fordstone.cli.hub_options import tier_hub_options
from fordstone.cli.loading import load_pipeline
from fordstone.cli.logs import configure_logging, say_always
from fordstone.cli.memory import limit_polars
from fordstone.cli.options import edge_options, refuse_others, shared_options, spark_options
from fordstone.cli.run import run_part
from fordstone.cli.tier_options import refuse_tier_options


@click.command(
    cls=TaughtCommand,
    examples=[
        "fordstone center cold_chain.py --hub https://hub.example:7411 --token-file token --state /srv/state",
        "fordstone center cold_chain.py --hub http://127.0.0.1:7411 --on edge",
        "fordstone center cold_chain.py --master spark://center:7077 --state /srv/state",
        "fordstone center cold_chain.py --master 'local[4]' --memory 8g",
        "fordstone center cold_chain.py --state /srv/state --from-checkpoint /var/lib/cold-chain",
    ],
)
@click.argument("file", metavar="FILE[:NAME]")
@click.option(
    "--on",
    "engine",
    type=click.Choice(["spark", "edge"]),
    default="spark",
    show_default=True,
    help="Which engine: Spark, or the edge's in this process, without a JVM. The results are the same.",
)
@shared_options
@spark_options
@edge_options
@tier_hub_options
@click.pass_context
def center(
    context: click.Context,
    /,
    file: str,
    *,
    engine: str,
    verbose: int,
    as_json: bool,
    logs: str,
    progress_every: str,
    **options: Any,
) -> None:
    """Run the center of a pipeline, until stopped.

    Of a pipeline of two tiers this runs what stands behind to_center(), over the rows of all nodes, which the hub has. A
    pipeline of one tier runs as a whole, on Spark. Without --master, what spark-submit or SPARK_CONF_DIR say holds, else Spark
    runs on this machine with all its cores. On a cluster, --state and the paths of sources and sinks are places that every
    executor reaches by the same name.

    SIGINT (Ctrl-C) and SIGTERM finish the epoch and stop cleanly; the second one stops at once. The same command goes on
    where it was.
    """
    refuse_others(context, engine)
    configure_logging(verbose, as_json=logs == "json")
    strange = {one.name for one in context.command.params if isinstance(one, EngineOption) and one.engine != engine}
    options = {name: value for name, value in options.items() if name not in strange}
    limit_polars(1 if engine == "spark" else options["parallelism"])
    pipeline = load_pipeline(file)
    plan = pipeline.plan()
    say_always(pipeline=plan.pipeline)
    if not plan.tiered:
        why = f"pipeline {plan.pipeline} has one tier: nothing in it goes to_center(), and it reads no hub. Leave the option out."
        refuse_tier_options(context, frozenset(), why)
        if engine == "edge":
            raise Misuse(
                f"pipeline {plan.pipeline} has one tier, and no center. On the edge it runs with: fordstone run FILE."
            )
    run_part(
        context,
        file,
        pipeline,
        options,
        part="center" if plan.tiered else None,
        engine=engine,
        as_json=as_json,
        verbose=verbose,
        logged_every=progress_every if logs == "json" else None,
    )
