"""The command line. `main` is what the `fordstone` script calls.

Command modules import only Click and the standard library at their top. Each command imports Polars and the rest when it runs, so
that `--help` is quick.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import click

import fordstone
from fordstone.cli.checkpoints import checkpoints
from fordstone.cli.connectors import connectors
from fordstone.cli.edge import edge
from fordstone.cli.errors import FAILED, as_exit, show_bug
from fordstone.cli.example import example
from fordstone.cli.explain import explain
from fordstone.cli.hub import epochs, hub, nodes, streams
from fordstone.cli.options import HelpGroup
from fordstone.cli.run import center, run
from fordstone.cli.schema import schema
from fordstone.cli.sql.command import sql

HELP_CHARS_MAX: Final = 100


class Commands(HelpGroup):
    """The root of all commands, where exceptions become error messages."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. An error that the user can fix is shown as text; a bug keeps its traceback."""
        try:
            return super().invoke(ctx)
        except (click.exceptions.Exit, click.Abort, BrokenPipeError):
            # Click handles these, a closed standard output too.
            raise
        except Exception as error:
            shown = as_exit(error)
            if shown is not None:
                raise shown from error
            show_bug(error)
            ctx.exit(FAILED)


@click.group(
    cls=Commands,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": HELP_CHARS_MAX,
        "show_default": True,
    },
    examples=[
        "fordstone run cold_chain.py --bounded         read all input, then end",
        "fordstone run cold_chain.py --state /var/fs   run until SIGINT or SIGTERM",
        "fordstone run cold_chain.py --on spark        the same on Spark",
        "fordstone sql \"SELECT ...\" -s a='in/*.csv'    run a query over files",
        "fordstone hub                                 the service between nodes and center",
        "fordstone edge cold_chain.py --hub URL        the edge half, on a gateway",
        "fordstone center cold_chain.py --hub URL      the center, on Spark",
        "fordstone explain cold_chain.py               show what would run and what it guarantees",
        "fordstone schema 'in/*.jsonl'                 print the columns of files, ready to paste",
        "fordstone connectors                          list what can be read from and written to",
        "fordstone checkpoints ls                      list stored checkpoints",
        "fordstone example readings                    write input for a first pipeline",
    ],
)
@click.version_option(fordstone.__version__, prog_name="fordstone")
def cli() -> None:
    """Stateful stream processing, exactly once.

    Declare a pipeline in a Python file, then run it, on this machine or on Spark. Run it again with the same state directory to
    resume.
    """


for _command in (
    run,
    sql,
    edge,
    center,
    nodes,
    streams,
    epochs,
    hub,
    explain,
    schema,
    connectors,
    checkpoints,
    example,
):
    cli.add_command(_command)


def main() -> None:
    """Run the command line of this process and exit with its code."""
    try:
        cli(prog_name="fordstone")
    except SystemExit as ending:
        if ending.code and "py4j" in sys.modules:
            from fordstone.spark.run import leave

            leave(ending.code if isinstance(ending.code, int) else FAILED)
        raise
