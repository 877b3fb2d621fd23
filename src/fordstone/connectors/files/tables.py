"""Reading Parquet and Arrow files from a row position, in slices.

Such a file is complete when it has its footer, and never grows: at its last row it has ended, whether the input as a
whole is bounded or not. Columns are matched by name: missing ones are null, others
are not read. A file whose column cannot become the declared type at all is an error; a single value that does not fit
(a number too large) is a rejected row.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import polars as pl

from fordstone.connectors.base import Chunk, Reader, Rejected
from fordstone.connectors.files.bytes import Mark, unreadable
from fordstone.connectors.files.cells import lost_values
from fordstone.errors import SourceError
from fordstone.lang.polars import cast as casts
from fordstone.lang.python_times import shown_row
from fordstone.lang.schema import DataType, Schema
from fordstone.plan.ids import Position

SLICE_ROWS: Final = 1 << 19
"""Maximum rows decoded at a time; a Parquet row group is decoded again for each slice that touches it."""
SLICE_BYTES_MAX: Final = 1 << 26
"""About how much memory a decoded slice may take."""
_SLICE_ROWS_FIRST: Final = 1 << 14
_SLICE_ROWS_MIN: Final = 1 << 8
_SLICE_GROWTH: Final = 8
_MAGIC: Final = {"parquet": b"PAR1", "arrow": b"ARROW1"}
_TEXTS: Final = (pl.String, pl.Categorical, pl.Enum)


class TableReader(Reader):
    """Reads one Parquet or Arrow file. Positions are row numbers."""

    def __init__(
        self, path: Path, file_format: str, schema: Schema, position: int, *, bounded: bool, with_positions: bool
    ) -> None:
        self._path = path
        self._format = file_format
        self._schema = schema
        self._position = position
        self._bounded = bounded
        self._with_positions = with_positions
        self._frame: pl.LazyFrame | None = None
        self._rows = 0
        self._identity = ""
        self._slice_rows = _SLICE_ROWS_FIRST
        self._slice = pl.DataFrame()
        self._slice_start = position

    @property
    def rows(self) -> int:
        """How many rows the file has; 0 before it could be opened."""
        return self._rows

    def read(self, rows_max: int, until: Position | None = None) -> Chunk | None:
        if self._frame is None and not self._open():
            if until is None or until <= self._position:
                return None
            raise SourceError(f"{self._path} was complete, and now lacks its footer. Give new content a new name.")
        if until is not None and until > self._rows:
            raise self._shrank(until)
        stop = min(self._rows, self._position + max(1, rows_max), self._rows if until is None else until)
        if stop <= self._position:
            if self._position < self._rows:
                return None
            stop = self._position
        start = self._position
        frame = self._sliced(start, stop)
        stop = start + frame.height
        self._position = stop
        made, bad = self._typed(frame)
        rows = pl.int_range(start, stop, eager=True)
        if bad is not None:
            made, rows = made.filter(~bad), rows.filter(~bad)
        return Chunk(
            frame=made,
            position=Position(stop),
            row_positions=rows if self._with_positions else None,
            rejected=() if bad is None else self._rejections(frame, bad, start),
            ended=stop >= self._rows,
        )

    def identity(self) -> str:
        if self._position == 0:
            return ""
        if not self._identity:
            self._identity = str(Mark.of_file(self._path))
        return self._identity

    def count(self) -> int | None:
        """How many rows the file has, without reading any; None while it has no footer yet."""
        return self._rows if self._frame is not None or self._open() else None

    def close(self) -> None:
        self._frame = None
        self._slice = pl.DataFrame()

    def _open(self) -> bool:
        if not self._complete():
            if self._bounded:
                raise SourceError(
                    f"{self._path} is no {self._format} file, or was not written to its end: it lacks the footer."
                )
            return False
        try:
            scan = (
                pl.scan_parquet(self._path, glob=False, hive_partitioning=False)
                if self._format == "parquet"
                else pl.scan_ipc(self._path)
            )
            found = scan.collect_schema()
            self._rows = int(scan.select(pl.len()).collect().item())
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
            raise self._damaged(error) from error
        wanted = [name for name in self._schema if name in found]
        if not wanted:
            raise SourceError(
                f"{self._path} has the columns {', '.join(found)}, and none of those declared ({', '.join(self._schema)}).\n"
                f"Correct the schema of the source, or its pattern."
            )
        for name in wanted:
            if not _castable(found[name], self._schema[name]):
                raise SourceError(
                    f"{self._path}: column {name!r} is {found[name]}, which cannot be read as {self._schema[name]}.\n"
                    f"Declare the column with its own type, and cast it in a select."
                )
        if self._position > self._rows:
            raise self._shrank(self._position)
        self._frame = scan.select(wanted)
        return True

    def _complete(self) -> bool:
        magic = _MAGIC[self._format]
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, 2)
                if size < 2 * len(magic):
                    return False
                file.seek(-len(magic), 2)
                return file.read() == magic
        except OSError as error:
            raise unreadable(self._path, error) from error

    def _sliced(self, start: int, stop: int) -> pl.DataFrame:
        """At most these rows, from what is decoded already or else decoded now."""
        offset = start - self._slice_start
        if not 0 <= offset < self._slice.height:
            if self._frame is None or stop <= start:
                return self._slice.clear() if self._slice.width else pl.DataFrame()
            try:
                self._slice = self._frame.slice(start, self._slice_rows).collect()
            except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
                raise self._damaged(error) from error
            self._slice_start, offset = start, 0
            row_bytes = int(self._slice.estimated_size()) // max(1, self._slice.height) + 1
            fitting = max(_SLICE_ROWS_MIN, SLICE_BYTES_MAX // row_bytes)
            self._slice_rows = min(SLICE_ROWS, self._slice_rows * _SLICE_GROWTH, fitting)
        return self._slice.slice(offset, stop - start)

    def _typed(self, frame: pl.DataFrame) -> tuple[pl.DataFrame, pl.Series | None]:
        columns, bad = [], None
        for name, kind in self._schema.items():
            if name not in frame.columns:
                columns.append(pl.Series(name, dtype=kind.polars).extend_constant(None, frame.height))
                continue
            given = frame.get_column(name)
            made = given if given.dtype == kind.polars else _cast(given, kind)
            lost = None if made is given else lost_values(given, made)
            if kind.name == "float" and given.dtype == pl.Float64 and made.is_infinite().any():
                lost = (made.is_infinite() & given.is_finite()).fill_null(value=False)
            if lost is not None:
                bad = lost if bad is None else bad | lost
            columns.append(made)
        return pl.DataFrame(columns), bad

    def _rejections(self, frame: pl.DataFrame, bad: pl.Series, start: int) -> tuple[Rejected, ...]:
        types = ", ".join(f"{name} {kind}" for name, kind in self._schema.items())
        return tuple(
            Rejected(
                position=start + place,
                text=repr(shown_row(frame, place)),
                reason=f"a value does not fit its type ({types})",
            )
            for place in bad.arg_true().to_list()
        )

    def _shrank(self, position: int) -> SourceError:
        return SourceError(
            f"{self._path} shrank: it has {self._rows} rows, and {position} had been read. Give new content a new name."
        )

    def _damaged(self, error: BaseException) -> SourceError:
        return SourceError(
            f"{self._path} cannot be read as {self._format}: {str(error).partition(chr(10))[0]}. Get the file again."
        )


def _castable(found: pl.DataType, kind: DataType) -> bool:
    """Whether most values of the found type have a counterpart in the declared one."""
    wanted = kind.polars
    if found in {wanted, pl.Null()}:
        return True
    if kind.element is not None:
        return isinstance(found, pl.List | pl.Array) and _castable(found.inner, kind.element)  # type: ignore[arg-type]
    if kind.name == "map":
        parts = [(found.key, "key"), (found.value, "value")] if isinstance(found, pl.Map) else []
        return bool(parts) and all(_castable(part, kind.field(name)) for part, name in parts)  # type: ignore[arg-type]
    if kind.name == "struct":
        # Fields are matched by name, as columns are; those that the file lacks are null.
        there = {field.name: field.dtype for field in found.fields} if isinstance(found, pl.Struct) else {}
        shared = [(there[name], inner) for name, inner in kind.fields if name in there]
        return bool(shared) and all(_castable(part, inner) for part, inner in shared)  # type: ignore[arg-type]
    if kind.name == "string":
        return isinstance(found, _TEXTS)
    if kind.name == "timestamp":
        return isinstance(found, pl.Datetime | pl.Date)
    if kind.is_integer:
        return found.is_integer()
    return kind.is_numeric and found.is_numeric()


def _cast(given: pl.Series, kind: DataType) -> pl.Series:
    if kind.name == "timestamp" and isinstance(given.dtype, pl.Datetime) and given.dtype.time_zone not in {None, "UTC"}:
        given = given.dt.convert_time_zone("UTC")
    if kind.name == "timestamp" and getattr(given.dtype, "time_zone", None) is None:
        return given.cast(pl.Datetime("us"), strict=False).dt.replace_time_zone("UTC")
    if kind.name == "decimal" and not given.dtype.is_unsigned_integer():
        # Polars would cut digits off.
        rounded = casts.cast(pl.first(), DataType.from_polars(given.dtype), kind)
        return given.to_frame().select(rounded.alias(given.name)).to_series()
    return given.cast(kind.polars, strict=False)
