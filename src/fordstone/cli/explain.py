"""`fordstone explain`: what would run where, what is shuffled and kept, and what each path guarantees."""

from __future__ import annotations

from functools import partial

import click

from fordstone.cli.errors import UsageError
from fordstone.cli.loading import limit_polars, load_pipeline
from fordstone.cli.options import HelpCommand, engine_option


@click.command(
    cls=HelpCommand,
    examples=[
        "fordstone explain cold_chain.py",
        "fordstone explain cold_chain.py --format mermaid > cold_chain.mmd",
        "fordstone explain pipelines.py:cold_chain --format json | jq .steps",
        "fordstone explain cold_chain.py --on spark",
    ],
)
@click.argument("file", metavar="FILE[:NAME]")
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "mermaid", "json"]),
    default="text",
    help="Text, a Mermaid flowchart, or the plan as JSON.",
)
@click.option(
    "--parallelism",
    type=click.IntRange(1),
    show_default="1; on Spark the number of tasks that run at once",
    help="Number of subtasks per keyed step; on Spark, of shards.",
)
@engine_option(
    "The engine of the pipeline, or of its center part. Spark is not started.",
    show_default="edge; for two tiers, the center on spark",
)
@click.option("--bounded", is_flag=True, help="On Spark: as a batch job over the input that exists now.")
def explain(file: str, *, form: str, parallelism: int | None, engine: str | None, bounded: bool) -> None:
    """Show what a pipeline would do, without running it.

    Shows which steps run together as one task, what is shuffled by which key, what checkpoints contain, and what each path from a
    source to a sink guarantees, with the reason.

    For a pipeline of two tiers: the edge part, what crosses to the center and what was pushed below the cut to reduce it, the center
    part, and the control tables.
    """
    limit_polars(1)
    plan = load_pipeline(file).plan()
    if engine == "spark" and not plan.tiered and form != "json":
        if form == "mermaid":
            raise UsageError("--format mermaid draws the tasks of the edge engine; with --on spark use --format text.")
        from fordstone.spark import explain as on_spark

        click.echo(on_spark.explain(plan, bounded=bounded, shards=parallelism), nl=False)
        return
    from fordstone.planner import explain as planned

    center: planned.DescribeCenter | None = None
    if plan.tiered and engine != "edge":
        from fordstone.spark.explain import describe_center

        center = partial(describe_center, bounded=bounded)
    click.echo(planned.explain(plan, format=form, parallelism=parallelism or 1, center=center), nl=False)
