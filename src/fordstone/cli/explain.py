"""`fordstone explain`: what would run where, what is shuffled and kept, and what each path guarantees."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import click

from fordstone.cli.errors import Misuse
from fordstone.cli.help import TaughtCommand
from fordstone.cli.loading import load_pipeline
from fordstone.cli.memory import limit_polars

if TYPE_CHECKING:
    from fordstone.planner.explain_tiers import CenterWords


@click.command(
    cls=TaughtCommand,
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
    show_default=True,
    help="Text for people, a Mermaid flowchart for documents, or the plan itself.",
)
@click.option(
    "--parallelism",
    type=click.IntRange(1),
    show_default="1; on Spark as many as it runs tasks",
    help="For this many subtasks a keyed step; on Spark, shards.",
)
@click.option(
    "--on",
    "engine",
    type=click.Choice(["edge", "spark"]),
    show_default="edge; of two tiers, the center on spark",
    help="The engine that it, or its center part, would run on. Spark is not started.",
)
@click.option("--bounded", is_flag=True, help="On Spark: as a batch job over what is there now.")
def explain(
    file: str,
    form: str,
    parallelism: int | None,
    engine: str | None,
    bounded: bool,  # noqa: FBT001 - a flag of the command line
) -> None:
    """Show what a pipeline would do, without running it.

    Which steps run together as one task, what is shuffled by which key, what is kept in checkpoints, and what each path
    from a source to a sink guarantees, with the reason.

    Of a pipeline for two tiers: the edge part, what crosses to the center and what was pushed below the cut to make that
    less, the center part, and the control tables.
    """
    limit_polars(1)
    plan = load_pipeline(file).plan()
    if plan.tiered:
        from fordstone.planner.explain_tiers import explain as explain_tiers

        text = explain_tiers(plan, format=form, parallelism=parallelism or 1, center=_center(engine, bounded))
        click.echo(text, nl=False)
        return
    if form == "json":
        import msgspec

        click.echo(msgspec.json.format(plan.to_json(), indent=2).decode())
        return
    if engine == "spark":
        if form == "mermaid":
            raise Misuse("a flowchart is drawn of tasks on the edge; on Spark there is --format text.")
        from fordstone.spark import explain as on_spark

        text = on_spark.explain(plan, bounded=bounded, shards=parallelism)
        click.echo(text, nl=False)
        return
    from fordstone.planner import explain as wording

    click.echo(wording.explain(plan, format=form, parallelism=parallelism or 1), nl=False)


def _center(engine: str | None, bounded: bool) -> CenterWords | None:  # noqa: FBT001 - as it was given
    """How the center part is worded: as it runs on Spark, unless told otherwise."""
    if engine == "edge":
        return None
    from fordstone.spark.explain import center_words

    return partial(center_words, bounded=bounded)
