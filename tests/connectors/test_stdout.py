"""Printing rows."""

import io

import msgspec
import polars as pl
import pytest

from fordstone.connectors import stdout
from fordstone.connectors.base import ConnectorSpec, Delivery, SinkStream, SourceOptions
from fordstone.connectors.registry import open_sink, open_source, sink_delivery, source_delivery
from fordstone.errors import ConfigError, SinkError
from fordstone.lang.schema import Schema

STREAM = SinkStream(step="s", schema=Schema.of({"n": "bigint"}))
ROWS = pl.DataFrame({"n": [1, 2, 3], "s": ["x", None, "é"]})


def test_rows_are_printed_as_json_lines_to_the_given_stream() -> None:
    target = io.StringIO()
    sink = open_sink(stdout(stream=target), STREAM)
    sink.release(1, ROWS.head(1))
    sink.release(2, ROWS.clear())
    sink.write(ROWS.tail(2))
    sink.close()
    assert target.getvalue() == '{"n":1,"s":"x"}\n{"n":2,"s":null}\n{"n":3,"s":"é"}\n'


def test_rows_are_printed_as_a_table_and_cut_with_a_count() -> None:
    target = io.StringIO()
    open_sink(stdout("table", stream=target, rows_max=2), STREAM).write(ROWS)
    assert "│ n ┆ s    │" in target.getvalue()
    assert target.getvalue().endswith("... and 1 more\n")


def test_a_spec_read_back_from_json_prints_to_the_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    spec = msgspec.json.decode(msgspec.json.encode(stdout(stream=io.StringIO())), type=ConnectorSpec)
    open_sink(spec, STREAM).write(ROWS.head(1))
    assert capsys.readouterr().out == '{"n":1,"s":"x"}\n'


def test_it_is_at_least_once_and_cannot_be_read() -> None:
    assert sink_delivery(stdout()) is Delivery.AT_LEAST_ONCE
    with pytest.raises(ConfigError, match="cannot be read from"):
        source_delivery(stdout())
    with pytest.raises(ConfigError, match="cannot be read from"):
        open_source(stdout(), SourceOptions(schema=STREAM.schema, bounded=True))


def test_a_reader_that_has_gone_is_an_error_without_a_traceback() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    with pytest.raises(SinkError, match="has closed it"):
        open_sink(stdout(stream=Gone()), STREAM).write(ROWS)


def test_options_that_make_no_sense_are_errors_while_the_pipeline_is_built() -> None:
    with pytest.raises(ConfigError, match="xml"):
        stdout("xml")
    with pytest.raises(ConfigError, match="rows_max"):
        stdout(rows_max=-1)
