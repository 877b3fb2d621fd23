"""`fordstone checkpoints import-spark`: make an edge checkpoint of the state of a Spark query."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from fordstone.cli import format as wording
from fordstone.cli.errors import Misuse
from fordstone.cli.help import TaughtCommand
from fordstone.cli.logs import configure_logging
from fordstone.cli.memory import limit_polars
from fordstone.cli.spark import STARTING
from fordstone.cli.stores import SPARK_DIRECTORY, spark_queries
from fordstone.cli.view.showing import print_json

if TYPE_CHECKING:
    from fordstone.spark.hosted.state_transfer import Imported


@click.command(
    "import-spark",
    cls=TaughtCommand,
    examples=[
        "fordstone checkpoints import-spark /srv/center --state /var/lib/cold-chain",
        "fordstone checkpoints import-spark s3://center/state/cold-chain/_spark --state state --node gateway-7",
    ],
)
@click.argument("checkpoint", metavar="CHECKPOINT")
@click.option("--state", metavar="DIR", default="state", show_default=True, help="The state directory to import into.")
@click.option("--node", metavar="N", default="node", show_default=True, help="The edge machine that is to go on.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def import_spark(checkpoint: str, *, state: str, node: str, as_json: bool) -> None:
    """Make an edge checkpoint of a Spark query's state.

    CHECKPOINT is the --state that the pipeline ran with on Spark, or <state>/<pipeline>/_spark below it. The query must be
    stopped, and stays as it is. `fordstone run FILE --state DIR` then goes on where Spark was.
    """
    configure_logging(0)
    limit_polars(1)
    found = _location(checkpoint)
    imported = _imported(found, state, node, quiet=as_json)
    if as_json:
        from dataclasses import asdict

        print_json({"node": node, **asdict(imported)})
        return
    click.echo(
        f"checkpoint {imported.epoch} of pipeline {imported.pipeline} on node {node}: {wording.count(imported.rows, 'row')} of state in "
        f"{wording.count(imported.runs, 'run')}, {wording.size(imported.size_bytes)}. "
        f"It is in {state}; `fordstone run FILE --state {state}` goes on from it."
    )


def _location(given: str) -> str:
    """The checkpoint location that is meant. What is not on this machine's disk is taken as it was given."""
    if "://" in given:
        return given
    path = Path(given).expanduser()
    if not path.is_dir():
        raise Misuse(f"there is no directory {given} (working directory {Path.cwd()}).")
    queries = spark_queries(path)
    if not queries:
        raise Misuse(
            f"{given} holds no state of a Spark query. Name the --state that the pipeline ran with on Spark, or "
            f"<state>/<pipeline>/{SPARK_DIRECTORY} below it."
        )
    if len(queries) > 1:
        listed = "\n".join(f"    {one}" for one in queries)
        raise Misuse(f"{given} holds the state of several queries. Say which:\n{listed}")
    return str(queries[0].absolute())


def _imported(checkpoint: str, state: str, node: str, *, quiet: bool) -> Imported:
    from fordstone.spark.hosted.state_transfer import import_spark as export
    from fordstone.spark.session.application import application

    if not quiet:
        click.echo(STARTING, err=True)
    with application(name="fordstone import-spark") as spark:
        return export(spark, checkpoint, state, node=node)
