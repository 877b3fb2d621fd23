"""`fordstone explain`: what would run where, what is shuffled and kept, and what each path guarantees.

With a state directory also what the watermark waited for at the newest checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from fordstone.cli import format as fmt
from fordstone.cli.checkpoints import newest_cuts
from fordstone.cli.errors import UsageError
from fordstone.cli.loading import limit_polars, load_pipeline
from fordstone.cli.options import HelpCommand, engine_option
from fordstone.cli.view.view import describe_held

if TYPE_CHECKING:
    from fordstone.cli.checkpoints import NewestCut
    from fordstone.plan import plan as p

TIERS: Final = ("", "edge", "center")
"""Where `fordstone run --state DIR` keeps checkpoints: below DIR, or for two tiers below these."""


@click.command(
    cls=HelpCommand,
    examples=[
        "fordstone explain cold_chain.py",
        "fordstone explain cold_chain.py --format mermaid > cold_chain.mmd",
        "fordstone explain pipelines.py:cold_chain --format json | jq .steps",
        "fordstone explain cold_chain.py --on spark",
        "fordstone explain cold_chain.py --state state      and what holds time back, at the newest checkpoint",
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
@click.option(
    "--state",
    metavar="DIR",
    help="Also say which partition held time back at the newest checkpoint in this state directory, and by how much.",
)
def explain(
    file: str, *, form: str, parallelism: int | None, engine: str | None, bounded: bool, state: str | None
) -> None:
    """Show what a pipeline would do, without running it.

    Shows which steps run together as one task, what is shuffled by which key, what checkpoints contain, and what each path from a
    source to a sink guarantees, with the reason.

    For a pipeline of two tiers: the edge part, what crosses to the center and what was pushed below the cut to reduce it, the center
    part, and the control tables.

    With --state also what held time back at the newest checkpoint of each node, and of the center if it is there.
    """
    if state is not None and form != "text":
        raise UsageError(f"--state goes with --format text, not with --format {form}.")
    limit_polars(1)
    plan = load_pipeline(file).plan()
    found = [] if state is None else _newest_cuts(plan, state)
    _explain(plan, form=form, parallelism=parallelism, engine=engine, bounded=bounded)
    for line in _held(plan, found):
        click.echo(line)


def _explain(plan: p.Plan, *, form: str, parallelism: int | None, engine: str | None, bounded: bool) -> None:
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


def _newest_cuts(plan: p.Plan, state: str) -> list[NewestCut]:
    found = [cut for tier in TIERS for cut in newest_cuts(Path(state) / tier, plan.pipeline)]
    if not found:
        raise UsageError(
            f"--state {state}: there is no checkpoint of pipeline {plan.pipeline} (working directory {Path.cwd()})."
        )
    return found


def _held(plan: p.Plan, found: list[NewestCut]) -> Iterator[str]:
    """What the watermark waited for at each of these checkpoints, and what would end the wait."""
    if not found:
        return
    from fordstone.plan.plan import Source
    from fordstone.planner.split import split
    from fordstone.protocol.progress import held_back
    from fordstone.runtime.partition import waited_for

    halves = [half for half in (split(plan).edge, split(plan).center) if half is not None]
    sources = {step.name: step for half in halves for step in half.steps if isinstance(step, Source)}
    yield "\nwhat holds time back"
    for one in found:
        made = "" if one.created_us is None else f", {fmt.instant(one.created_us)} UTC"
        held = held_back(waited_for(sources.values(), one.cut))
        text = "" if held is None or one.cut.ended else describe_held(held)
        yield f"  {one.where}, checkpoint {one.cut.epoch}{made}"
        yield f"    {text or 'nothing lags'}"
        if held is not None and text and sources[held.source].idle_after_us is None:
            yield f"    idle_after= at source {held.source} would limit the wait"
