"""A sink that prints rows, for people who watch. Rows may be printed again after a restart."""

from __future__ import annotations

import sys
from typing import Literal, TextIO, cast

import msgspec
import polars as pl

from fordstone.connectors.base import (
    About,
    Capability,
    ConnectorKind,
    ConnectorSpec,
    Delivery,
    LiveSpec,
    OpenContext,
    Sink,
    SinkStream,
    checked_spec,
    live_of,
    options_of,
)
from fordstone.connectors.files.rows import encoded
from fordstone.errors import ConfigError, SinkError


class StdoutOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stands in the plan."""

    format: Literal["jsonl", "table"] = "jsonl"
    rows_max: int | None = None
    """How many rows of a batch are printed; the rest are counted only."""

    def __post_init__(self) -> None:
        if self.rows_max is not None and self.rows_max < 0:
            raise ConfigError(f"stdout: rows_max={self.rows_max} must not be negative.")


def stdout(format: str = "jsonl", *, stream: TextIO | None = None, rows_max: int | None = None) -> ConnectorSpec:  # noqa: A002 - the word that people look for
    """Print rows, as JSON lines (`"jsonl"`) or as a table (`"table"`); to another `stream` in this process if given."""
    spec = checked_spec("stdout", {"format": format, "rows_max": rows_max}, StdoutOptions)
    return spec if stream is None else LiveSpec.around(stream, kind=spec.kind, options=spec.options)


class StdoutKind(ConnectorKind):
    """The kind `stdout`."""

    capabilities = frozenset({Capability.PRINTS})
    about = About(
        summary="the terminal",
        sink='stdout("table")',
        guarantee="Rows of an epoch are printed when it is sealed, and may be printed again after a crash.",
        page="reference/connectors.md#stdout",
    )

    def sink_delivery(self, spec: ConnectorSpec) -> Delivery:
        options_of(spec, StdoutOptions)
        return Delivery.AT_LEAST_ONCE

    def open_sink(self, spec: ConnectorSpec, stream: SinkStream, context: OpenContext) -> Sink:
        """Print to the stream that the spec carries, else to the standard output of this process."""
        del stream, context
        return StdoutSink(options_of(spec, StdoutOptions), cast("TextIO", live_of(spec) or sys.stdout))


class StdoutSink(Sink):
    """Prints each batch as it comes."""

    def __init__(self, options: StdoutOptions, stream: TextIO) -> None:
        self._options = options
        self._stream = stream

    def release(self, epoch: int, frame: pl.DataFrame) -> None:
        del epoch
        self.write(frame)

    def write(self, frame: pl.DataFrame) -> None:
        if frame.is_empty():
            return
        shown = frame if self._options.rows_max is None else frame.head(self._options.rows_max)
        if self._options.format == "table":
            with pl.Config(
                tbl_rows=-1,
                tbl_cols=-1,
                tbl_hide_dataframe_shape=True,
                tbl_hide_column_data_types=True,
                fmt_str_lengths=60,
            ):
                text = f"{shown}\n"
        else:
            text = encoded(shown, "jsonl").decode()
        if shown.height < frame.height:
            text += f"... and {frame.height - shown.height} more\n"
        try:
            self._stream.write(text)
            self._stream.flush()
        except BrokenPipeError as error:
            raise SinkError("stdout: the reader of the output has closed it. Stopping.") from error

    def close(self) -> None:
        """Does nothing: the caller closes the stream."""
