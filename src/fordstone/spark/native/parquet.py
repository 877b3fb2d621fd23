"""Say whether Spark's own reader would read the files that a `files(...)` source means, and name them as Spark does.

Patterns are ours (Python's): `*` never matches a leading dot, and names that begin with '_' are left out. Spark's (Hadoop's)
differ in that and in braces, backslashes and `**`; what cannot be said the same way is refused here. Pure: looks at
text, not at disks.

Read Parquet files with Spark's own reader, so that its rows are those that our reader gives.

Columns are matched by name: missing ones are null, others are not read. Where Spark would silently change a value (a
number too large for a small integer), or a row is none for us, the query stops or leaves the row out, as the source says.
What Spark's reader cannot read as declared is refused by name, of the files that are there at the start; of those that
come later, Spark itself stops at them. Unlike ours, Spark's reader does not wait for a file's footer: move files into
place when they are complete.
"""

from __future__ import annotations

import glob
import re
from itertools import islice
from pathlib import Path
from typing import Final

import polars as pl
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name everybody uses

from fordstone.connectors.base import SourceOptions
from fordstone.connectors.files.bytes import PACKED_SUFFIXES
from fordstone.connectors.files.settings import FileSettings, file_settings
from fordstone.connectors.files.source import FileSource
from fordstone.errors import SourceError
from fordstone.lang.dialect import quoted_name
from fordstone.lang.schema import DataType, Schema
from fordstone.plan import plan as p
from fordstone.runtime.partition import TIME_BOUND_US
from fordstone.spark.native.column_types import spark_schema

LOOKED_AT_MAX: Final = 1000
"""Of so many files at most the footers are read before a stream starts."""
_AGE_MAX: Final = "36500d"
"""By default Spark leaves out files older than a week."""
_SMALL: Final = {"tinyint": 127, "smallint": 32767}
"""Integers that Spark cuts off without a word, by their largest value: read as int, and looked at."""
_INT: Final = DataType("int")
_INT_DIGITS: Final = 10
_IN_INT: Final = (pl.Int8, pl.Int16, pl.Int32, pl.UInt8, pl.UInt16)
"""What a Parquet file stores as a signed number of 32 bits."""


def read_parquet(spark: SparkSession, step: p.Source, *, streaming: bool, files_max: int | None) -> DataFrame:
    """The rows of a source that `choice` found fit. `files_max`: so many new files a micro-batch at most."""
    settings, schema = file_settings(step.connector), Schema.of(step.schema)
    source = FileSource(settings, SourceOptions(schema=schema, bounded=not streaming))
    paths = [source.path_of(partition) for partition in source.partitions()]
    for path in islice(paths, LOOKED_AT_MAX if streaming else None):
        _look_at(path, schema, waits=streaming)
    columns = spark_schema(Schema.of({name: _read_as(kind) for name, kind in schema.items()}))
    options = {"datetimeRebaseMode": "CORRECTED", "int96RebaseMode": "CORRECTED", "mergeSchema": "false"}
    if streaming:
        _refuse_directories(settings)
        options |= {"maxFileAge": _AGE_MAX} | ({} if files_max is None else {"maxFilesPerTrigger": str(files_max)})
        rows = spark.readStream.schema(columns).options(**options).parquet(spark_glob(settings))
    else:
        rows = spark.read.schema(columns).options(**options).parquet(*(escaped(str(path)) for path in paths))
    rows = rows.select(*(_fitted(step, name, kind) for name, kind in schema.items()))
    return rows if step.time is None else _timed(step, step.time, rows)


def _read_as(kind: DataType) -> DataType:
    if kind.element is not None:
        return DataType("array", element=_read_as(kind.element))
    return _INT if kind.name in _SMALL else kind


def _fitted(step: p.Source, name: str, kind: DataType) -> Column:
    """The column in its declared type; the query stops at a value that does not fit."""
    column = quoted_name(name)
    if _read_as(kind) == kind:
        return F.col(column)
    message = (
        f"source {step.name}: a value of column {name} does not fit {kind}. Declare a larger type, or use native=never."
    )
    return (
        F.when(F.expr(_fits(column, kind)), F.col(column).cast(str(kind)))
        .otherwise(F.raise_error(F.lit(message)))
        .alias(name)
    )


def _fits(value: str, kind: DataType, depth: int = 0) -> str:
    if kind.element is not None:
        item = f"v{depth}"
        return f"({value} IS NULL OR forall({value}, {item} -> {_fits(item, kind.element, depth + 1)}))"
    most = _SMALL[kind.name]
    return f"({value} IS NULL OR {value} BETWEEN {-most - 1} AND {most})"


def _timed(step: p.Source, time: str, rows: DataFrame) -> DataFrame:
    """Rows with a time that is one. On the edge the others are dead letters; here they are left out, or stop the query."""
    sane = f"unix_micros({quoted_name(time)}) BETWEEN {-TIME_BOUND_US} AND {TIME_BOUND_US}"
    if step.on_error == "keep":
        return rows.filter(sane)
    message = (
        f"source {step.name}: column {time} (time=) is null or out of range. Mend the input, or use on_error='keep'."
    )
    return rows.filter(F.when(F.expr(sane), F.lit(True)).otherwise(F.raise_error(F.lit(message))))  # noqa: FBT003 - a literal


def _refuse_directories(settings: FileSettings) -> None:
    for name in glob.iglob(str(Path(settings.path).expanduser())):  # noqa: PTH207 - leaves out hidden files, as Path.glob does not
        if Path(name).is_dir():
            raise SourceError(
                f"{settings.path!r} matches the directory {name}, and natively Spark would read the files in it. "
                "Narrow the pattern, or use native='never'."
            )


def _look_at(path: Path, schema: Schema, *, waits: bool) -> None:
    """Refuse a file that Spark would read otherwise than we do."""
    try:
        found = pl.scan_parquet(path, glob=False, hive_partitioning=False).collect_schema()
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
        if waits:
            return  # perhaps it is being written; if it stays so, Spark will stop at it
        raise SourceError(
            f"{path} cannot be read as parquet: {str(error).partition(chr(10))[0]}. Get the file again."
        ) from error
    if not any(name in found for name in schema):
        raise SourceError(
            f"{path} has the columns {', '.join(found)}, and none of those declared ({', '.join(schema)}).\n"
            f"Correct the schema of the source, or its pattern."
        )
    for name, kind in schema.items():
        if name in found and not _reads_as(found[name], kind):
            raise SourceError(
                f"{path}: column {name!r} is {found[name]}, which Spark's own reader does not read as {kind}.\n"
                f"Declare the column with its own type and cast it in a select, or use native='never'."
            )


def _reads_as(found: pl.DataType, kind: DataType) -> bool:
    """Whether Spark reads every value of the found type as we would, or stops."""
    wanted = kind.polars
    if found in {wanted, pl.Null()}:
        return True
    if kind.element is not None:
        return isinstance(found, pl.List | pl.Array) and _reads_as(found.inner, kind.element)  # type: ignore[arg-type]  # a type, not a class
    small = isinstance(found, _IN_INT)
    match kind.name:
        case "tinyint" | "smallint" | "int":
            return small
        case "bigint":
            return small or found == pl.UInt32
        case "double":
            return small or found == pl.Float32
        case "decimal":
            if isinstance(found, pl.Decimal):
                whole = (found.precision or 0) - found.scale
                return kind.precision - kind.scale >= whole and kind.scale >= found.scale
            return small and kind.precision - kind.scale >= _INT_DIGITS
        case "string":
            return isinstance(found, pl.Categorical | pl.Enum)
        case "timestamp":
            return isinstance(found, pl.Datetime) and found.time_unit != "ns"
        case _:
            return False


_FORMATS: Final = {"jsonl": "JSON lines", "csv": "CSV", "arrow": "Arrow"}
_UNLIKE: Final = re.compile(r"[{}\\:]")
"""Means something to Spark and nothing to us."""
_SPECIAL: Final = re.compile(r"[{}\[\]*?\\]")
_PIECE: Final = re.compile(r"\*|\?|\[(?P<other>!?)(?P<set>[\w-]+)\]|[^\[\]*?]+")


def refusal(settings: FileSettings, *, streaming: bool) -> str | None:
    """Why these files need our reader; None: Spark's own finds and reads the same ones."""
    name = Path(settings.path).name
    found = settings.format_of(Path(name))
    if found in _FORMATS:
        return f"it reads {_FORMATS[found]}, where rows that cannot be read become dead letters: that takes our reader"
    if found is None:
        return f"{settings.path!r} does not say that all its files are Parquet; format='parquet' would"
    if name.endswith(PACKED_SUFFIXES):
        return f"{settings.path!r} names compressed files, which Spark's Parquet reader does not read"
    if not streaming:
        return None  # the files are listed by our own rules, once
    if not glob.has_magic(settings.path):
        return f"{settings.path!r} is one file, and a stream of files needs a pattern on Spark"
    for part in Path(settings.path).parts:
        if part == "**":
            return "'**' finds other directories on Spark than here"
        if _UNLIKE.search(part) or (glob.has_magic(part) and _spelt(part, last=False) is None):
            return f"{part!r} in its pattern means something else to Spark"
    if name[0] in "._":
        return f"Spark leaves out files whose name begins with {name[0]!r}"
    return None


def spark_glob(settings: FileSettings) -> str:
    """The pattern as Spark writes it, absolute. Only for settings that are not refused."""
    given = Path(settings.path).expanduser()
    *directories, name = given.parts
    # The working directory is no pattern, whatever its name.
    here = () if given.is_absolute() else (escaped(part) for part in Path.cwd().parts)
    return str(
        Path(*here, *(_spelt(part, last=False) or part for part in directories), _spelt(name, last=True) or name)
    )


def escaped(name: str) -> str:
    """A name that is no pattern, as Spark writes it in one."""
    return _SPECIAL.sub(r"\\\g<0>", name)


def _spelt(part: str, *, last: bool) -> str | None:
    """One name of a pattern as Spark writes it; None: it cannot be said."""
    pieces, end = [], 0
    while end < len(part):
        found = _PIECE.match(part, end)
        if found is None or (end == 0 and found["set"] is not None):
            return None
        pieces.append(f"[{'^' if found['other'] else ''}{found['set']}]" if found["set"] else found[0])
        end = found.end()
    hidden = "._" if last else "."
    if pieces[0] == "*":
        return f"[^{hidden}]{''.join(pieces)}"
    return "".join([f"[^{hidden}]" if pieces[0] == "?" else pieces[0], *pieces[1:]])
