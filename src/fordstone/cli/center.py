"""`fordstone center`: the Spark application, which runs until it is told to stop."""

from __future__ import annotations

from typing import Any

import click

from fordstone.cli.logs import configure_logging
from fordstone.cli.run_options import shared_options, spark_options
from fordstone.cli.spark import run_on_spark
from fordstone.cli.teaching import TaughtCommand


@click.command(
    cls=TaughtCommand,
    examples=[
        "fordstone center cold_chain.py --master spark://center:7077 --state /srv/state",
        "fordstone center cold_chain.py --master 'local[4]' --memory 8g",
        "fordstone center cold_chain.py --state /srv/state --from-checkpoint /var/lib/cold-chain",
    ],
)
@click.argument("file", metavar="FILE[:NAME]")
@spark_options
@shared_options
def center(file: str, *, verbose: int, as_json: bool, **options: Any) -> None:
    """Run a pipeline as a Spark application, until stopped.

    As `fordstone run --on spark`, for input without end. Without --master, what spark-submit or SPARK_CONF_DIR say
    holds, else Spark runs on this machine with all its cores. On a cluster, --state and the paths of sources and sinks
    are places that every executor reaches by the same name.

    SIGINT (Ctrl-C) and SIGTERM finish the epoch and stop cleanly; the second one stops at once. The same command goes on
    where it was.
    """
    configure_logging(verbose)
    run_on_spark(file, options, as_json=as_json, verbose=verbose)
