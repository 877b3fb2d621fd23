"""`fordstone sql`: run a query over files and print its result."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from fordstone.cli import format as fmt
from fordstone.cli.errors import UsageError, UserError, wrong_usage
from fordstone.cli.loading import limit_polars
from fordstone.cli.logs import configure_logging
from fordstone.cli.options import HelpCommand, engine_option, verbose_option
from fordstone.cli.run import STARTING_SPARK
from fordstone.errors import EndedError, FordstoneError, SourceError, TaskError

if TYPE_CHECKING:
    from fordstone.api.pipeline import Pipeline
    from fordstone.api.stream import Stream
    from fordstone.cli.sql.output import Output
    from fordstone.protocol.progress import Progress, Report

PIPELINE: Final = "sql"
RESULT: Final = "result"
INTERVAL: Final = "250ms"
"""Results are printed with each epoch, so a terminal needs short ones."""
_OPTIONS: Final = {
    r'time_unit="(\w+)" in the connector': r"--time-unit \1",
    r"check_time_unit=False at the source": "give the column another type with --schema",
    r'lateness="(\w+)" at source [\w.-]+': r"--lateness \1",
    r"a lateness of their source that": "a --lateness that",
}
"""The arguments that `protocol.time_unit`, `runtime.intake` and `protocol.progress` name in their advice."""


@click.command(
    cls=HelpCommand,
    examples=[
        "fordstone sql \"SELECT device, temp FROM readings WHERE temp > 30\" --source readings='in/*.jsonl'",
        'fordstone sql "SELECT device, window_start, count(*) AS n, avg(temp) AS mean FROM readings',
        "               GROUP BY device, TUMBLE(ts, INTERVAL '10' SECOND)\" --source readings='in/*.jsonl'",
        "fordstone sql --file hot.sql --source a=a.csv --source b=b.parquet --json | jq .device",
        "fordstone sql --file hot.sql --source a='in/*.jsonl' --follow",
        'fordstone sql "SELECT r.temp, d.site FROM readings r JOIN devices d ON r.device = d.id"',
        "               --source readings='in/*.jsonl' --table devices=devices.csv",
    ],
)
@click.argument("query", required=False)
@click.option(
    "--file", "file", metavar="FILE", help="Read the query from a file. QUERY '-' reads it from standard input."
)
@click.option(
    "-s",
    "--source",
    "sources",
    metavar="NAME=PATTERN",
    multiple=True,
    help="The files that a name in FROM stands for. May be given several times.",
)
@click.option(
    "-t",
    "--table",
    "tables",
    metavar="NAME=PATTERN",
    multiple=True,
    help="The files of a table that does not change, which JOIN looks rows up in by key. May be given several times.",
)
@click.option(
    "--schema",
    "schemas",
    metavar="[NAME=]COLUMNS",
    multiple=True,
    help="Types of columns that replace those found in a sample: 'ts timestamp, temp double'.",
)
@click.option(
    "--time",
    "times",
    metavar="[NAME=]COLUMN",
    multiple=True,
    help="The event time column.  [default: the only timestamp column]",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["jsonl", "csv", "parquet", "arrow"]),
    help="Format of the files.  [default: by their suffixes]",
)
@click.option("--delimiter", metavar="CHAR", help="Delimiter of CSV files.  [default: a comma; a tab for .tsv]")
@click.option(
    "--time-unit",
    type=click.Choice(["s", "ms", "us"]),
    show_default="inferred from the numbers, or us",
    help="Unit of numbers in timestamp columns of text files.",
)
@click.option(
    "--lateness",
    metavar="SPAN",
    show_default="1d; with --follow 5s",
    help="How far rows of a file may be out of order. Later rows are dropped and counted.",
)
@click.option("--follow", is_flag=True, help="Continue with new rows and files, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per row.")
@click.option(
    "--rows",
    "rows_max",
    metavar="N",
    type=click.IntRange(1, 100_000),
    default=20,
    help="Number of rows in a terminal. Pipes and --json get all rows.",
)
@click.option("--explain", "only_explain", is_flag=True, help="Show what would run, without running it.")
@click.option("--state", metavar="DIR", help="Directory for checkpoints, to resume the query.  [default: none]")
@engine_option("The engine: this process, or Spark.", default="edge")
@click.option("-q", "--quiet", is_flag=True, help="Do not print the columns found, nor the summary.")
@verbose_option
def sql(query: str | None, *, file: str | None, verbose: int, **options: Any) -> None:
    """Run a query over files.

    The columns of the files, and the event time if only one column can be it, are inferred from a sample. The query reads the input
    that exists now; with --follow it continues. docs/reference/sql.md lists the supported SQL.

    The result is printed to standard output: a live table in a terminal, a plain one in a pipe. The columns found are printed to
    standard error.
    """
    configure_logging(verbose)
    text = _query_text(query, file)
    limit_polars(1)
    pipeline, stream = _declared(text, options)
    output = _make_output(stream, options)
    from fordstone.connectors import memory

    stream.sink(RESULT, memory(output.result))
    from fordstone.cli.sql.output import ReaderGoneError, UnwritableError, put

    try:
        if options["only_explain"]:
            put(_explained(pipeline, options))
        else:
            _answer(pipeline, output, options)
    except ReaderGoneError:
        _abandon_stdout()
    except UnwritableError:
        _abandon_stdout()
        raise


def _abandon_stdout() -> None:
    """Discard what is still in the buffer, so that it is not written again when the process ends."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _answer(pipeline: Pipeline, output: Output, options: dict[str, Any]) -> None:
    temporary = tempfile.TemporaryDirectory(prefix="fordstone-sql-", ignore_cleanup_errors=True)
    with temporary as folder:
        state = options["state"] or folder
        try:
            with output:
                report = _run(pipeline, output, state, options)
        except EndedError as error:
            raise UserError(
                f"this query had ended with --state {state}, and there is new input since. Use another --state, or none."
            ) from error
        except (SourceError, TaskError) as error:
            text = _with_our_options(str(error))
            if text == str(error):
                raise
            raise UserError(text) from error
        output.finish()
        notices = _notices(pipeline, report, state)
    if not options["quiet"] and not options["as_json"]:
        click.echo(_summary(report, output, follow=options["follow"]), err=True)
    for notice in notices:
        click.echo(f"{click.style('note:', fg='yellow', bold=True)} {notice}", err=True)


def _query_text(query: str | None, file: str | None) -> str:
    if (query is None) == (file is None):
        raise UsageError(
            "give a query, or --file with one: fordstone sql \"SELECT ...\" --source readings='in/*.jsonl'"
        )
    if file is not None:
        try:
            return Path(file).read_text(encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--file {file}: {error.strerror}.") from error
        except UnicodeDecodeError:
            raise UsageError(f"--file {file} is not text in UTF-8.") from None
    return sys.stdin.read() if query == "-" else str(query)


def _declared(text: str, options: dict[str, Any]) -> tuple[Pipeline, Stream]:
    from fordstone.api.pipeline import Pipeline
    from fordstone.cli.sql.sources import add_sources

    pipeline = Pipeline(PIPELINE)
    reading = {
        "lateness": _lateness(options),
        "follow": options["follow"],
        "format": options["form"],
        "delimiter": options["delimiter"],
    }
    if options["time_unit"] is not None:
        reading["time_unit"] = options["time_unit"]
    lines = add_sources(
        pipeline, options["sources"], options["tables"], options["schemas"], options["times"], **reading
    )
    if not options["quiet"]:
        for line in lines:
            click.secho(line, err=True, dim=True)
    with wrong_usage():
        return pipeline, pipeline.sql(text)


def _make_output(stream: Stream, options: dict[str, Any]) -> Output:
    from fordstone.cli.sql.output import JsonOutput, LiveOutput, Order, PlainOutput

    if sys.stdout is None:
        raise UsageError(
            "standard output is closed, so the result cannot be printed. Redirect it to /dev/null if you do not need it."
        )
    order = Order.of(stream._type)  # noqa: SLF001 - our own class
    if options["as_json"]:
        return JsonOutput(order=order, follow=options["follow"])
    if not sys.stdout.isatty():
        return PlainOutput(stream.schema, order=order, follow=options["follow"])
    return LiveOutput(stream.schema, order=order, rows_max=options["rows_max"], bounded=not options["follow"])


def _explained(pipeline: Pipeline, options: dict[str, Any]) -> str:
    if options["engine"] == "edge":
        return pipeline.explain()
    from fordstone.spark import explain as on_spark

    return on_spark.explain(pipeline.plan(), bounded=not options["follow"])


def _run(pipeline: Pipeline, output: Output, state: str, options: dict[str, Any]) -> Report:
    if options["engine"] == "spark":
        return _run_on_spark(pipeline, output, state, options)
    from fordstone.edge.run import run

    return run(
        pipeline.plan(),
        pipeline.functions,
        state=state,
        bounded=not options["follow"],
        interval=INTERVAL,
        on_progress=output.show,
    )


def _run_on_spark(pipeline: Pipeline, output: Output, state: str, options: dict[str, Any]) -> Report:
    from fordstone.spark.config import SparkConfig
    from fordstone.spark.run import run_plan
    from fordstone.spark.session.application import application

    config = SparkConfig(state=state, bounded=not options["follow"])
    output.note(STARTING_SPARK)
    with application(name=f"fordstone {PIPELINE}") as spark:
        return run_plan(pipeline.plan(), pipeline.functions, config, spark=spark, on_progress=output.show)


def _summary(report: Report, output: Output, *, follow: bool) -> str:
    if report.outcome == "already_ended":
        return "this query had ended already: all input was read with this --state. Use another one, or none."
    progress: Progress = report.progress
    stopped = "stopped before the end: " if report.outcome == "stopped" and not follow else ""
    return f"{stopped}{fmt.count(output.result.count(), 'row')} from {fmt.count(progress.rows_in, 'input row')} in {fmt.span(progress.elapsed_us)}"


def _lateness(options: dict[str, Any]) -> str:
    """A query over existing files should drop nothing; one that follows should print results soon."""
    given: str | None = options["lateness"]
    return given if given is not None else "5s" if options["follow"] else "1d"


def _with_our_options(text: str) -> str:
    """A text of the engine whose advice names arguments of Python, with the options of this command instead."""
    for argument, option in _OPTIONS.items():
        text = re.sub(argument, option, text)
    return text


def _notices(pipeline: Pipeline, report: Report, state: str) -> list[str]:
    """Notes about rows that are not in the result."""
    progress, found = report.progress, []
    if progress.rows_late:
        found.append(
            f"{fmt.count(progress.rows_late, 'late row')} {'is' if progress.rows_late == 1 else 'are'} not in the result: "
            f"{_with_our_options(progress.late or '')}."
        )
    if progress.rows_rejected:
        found.append(
            f"{fmt.count(progress.rows_rejected, 'row')} could not be read{_with_our_options(_first_rejected(pipeline, state))} "
            "If a column's type was inferred wrong, give it with --schema."
        )
    return found


def _first_rejected(pipeline: Pipeline, state: str) -> str:
    from fordstone.connectors import rows
    from fordstone.plan import plan as p

    for step in pipeline.plan().steps:
        folder = Path(state) / PIPELINE / "node" / "dead-letters" / step.name
        if isinstance(step, p.Source) and folder.is_dir():
            with contextlib.suppress(FordstoneError):
                for letter in rows(folder).head(1).iter_rows(named=True):
                    return f"; the first in {letter['partition']}: {letter['reason']}."
    return "."
