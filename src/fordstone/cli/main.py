"""The command line. `main` is what the `fordstone` script calls.

Command modules import only Click and the standard library at their top: Polars and the rest are loaded by the command
that needs them, so that `--help` answers at once.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import click

import fordstone
from fordstone.cli.center import center
from fordstone.cli.checkpoints import checkpoints
from fordstone.cli.edge import edge
from fordstone.cli.errors import FAILED, as_exit, show_bug
from fordstone.cli.explain import explain
from fordstone.cli.help import TaughtGroup
from fordstone.cli.hub import hub
from fordstone.cli.hub_tables import epochs, nodes, streams
from fordstone.cli.run import run
from fordstone.cli.sql.command import sql

HELP_CHARS_MAX: Final = 100


class Commands(TaughtGroup):
    """The top of all commands: where exceptions become what a person reads."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. What the user can mend is shown as text; a bug keeps its traceback."""
        try:
            return super().invoke(ctx)
        except (click.exceptions.Exit, click.Abort):
            raise
        except BrokenPipeError:
            # Whoever read our output has gone; Click knows what to do.
            raise
        except Exception as error:
            shown = as_exit(error)
            if shown is not None:
                raise shown from error
            show_bug(error)
            ctx.exit(FAILED)


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": HELP_CHARS_MAX},
    examples=[
        "fordstone run cold_chain.py --bounded         read all there is, then end",
        "fordstone run cold_chain.py --state /var/fs   run on, until SIGINT or SIGTERM",
        "fordstone run cold_chain.py --on spark        the same on Spark",
        "fordstone sql \"SELECT ...\" -s a='in/*.csv'    answer a query over files",
        "fordstone hub                                 the service between nodes and center",
        "fordstone edge cold_chain.py --hub URL        its edge half, on a gateway",
        "fordstone center cold_chain.py --hub URL      its center, on Spark",
        "fordstone explain cold_chain.py               what would run, and what it guarantees",
        "fordstone checkpoints ls                      what is stored",
    ],
)
@click.version_option(fordstone.__version__, prog_name="fordstone")
def cli() -> None:
    """Stateful stream processing, exactly once.

    Declare a pipeline in a Python file, then run it, on this machine or on Spark. Running it again with the same state
    directory goes on where it was.
    """


cli.add_command(run)
cli.add_command(sql)
cli.add_command(edge)
cli.add_command(center)
cli.add_command(nodes)
cli.add_command(streams)
cli.add_command(epochs)
cli.add_command(hub)
cli.add_command(explain)
cli.add_command(checkpoints)


def main() -> None:
    """Run the command line of this process, and exit with its code."""
    try:
        cli(prog_name="fordstone")
    except SystemExit as ending:
        if ending.code and "py4j" in sys.modules:
            from fordstone.spark.session.failures import leave

            leave(ending.code if isinstance(ending.code, int) else FAILED)
        raise
