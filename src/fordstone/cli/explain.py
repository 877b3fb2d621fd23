"""`fordstone explain`: what would run where, what is shuffled and kept, and what each path guarantees."""

from __future__ import annotations

import click

from fordstone.cli.loading import load_pipeline
from fordstone.cli.memory import limit_polars
from fordstone.cli.teaching import TaughtCommand


@click.command(
    cls=TaughtCommand,
    examples=[
        "fordstone explain cold_chain.py",
        "fordstone explain cold_chain.py --format mermaid > cold_chain.mmd",
        "fordstone explain pipelines.py:cold_chain --format json | jq .steps",
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
    "--parallelism", type=click.IntRange(1), default=1, show_default=True, help="For this many subtasks a keyed step."
)
def explain(file: str, form: str, parallelism: int) -> None:
    """Show what a pipeline would do, without running it.

    Which steps run together as one task, what is shuffled by which key, what is kept in checkpoints, and what each path
    from a source to a sink guarantees, with the reason.
    """
    limit_polars(1)
    plan = load_pipeline(file).plan()
    if form == "json":
        import msgspec

        click.echo(msgspec.json.format(plan.to_json(), indent=2).decode())
        return
    from fordstone.edge import explain as wording

    click.echo(wording.explain(plan, format=form, parallelism=parallelism), nl=False)
