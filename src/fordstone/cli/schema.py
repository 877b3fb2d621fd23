"""`fordstone schema`: the columns that files have, by a first look at them, ready to paste into a pipeline."""

from __future__ import annotations

from typing import Any

import click

from fordstone.cli.errors import UsageError
from fordstone.cli.loading import limit_polars
from fordstone.cli.options import HelpCommand


@click.command(
    cls=HelpCommand,
    examples=["fordstone schema 'in/*.jsonl'", "fordstone schema readings.txt --format csv --delimiter ';'"],
)
@click.argument("pattern", metavar="FILES")
@click.option(
    "--format",
    "form",
    type=click.Choice(["jsonl", "csv", "parquet", "arrow"]),
    show_default="by the ending of each file",
    help="Format of the files.",
)
@click.option("--delimiter", show_default="a comma; a tab for .tsv", help="Delimiter of CSV files.")
def schema(pattern: str, *, form: str | None, delimiter: str | None) -> None:
    """Print the schema that files have, ready to paste into source(...).

    Text files are sampled at the beginning of the first five; Parquet and Arrow files contain their types. Check the result: a
    column that only later rows have is not in it.
    """
    limit_polars(1)
    from fordstone.connectors import files
    from fordstone.connectors.registry import first_look

    given: dict[str, Any] = {"delimiter": delimiter} if delimiter is not None else {}
    found = first_look(files(pattern, form, **given))
    if found is None:
        raise UsageError(f"no file matches {pattern!r}, or the files have no rows yet.")
    click.echo(found)
