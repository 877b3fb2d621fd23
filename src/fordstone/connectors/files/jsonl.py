"""JSON lines: one object a line.

Missing columns are null, others are ignored, of a repeated name the first counts. Whatever stands in a string column is
taken as its text. Polars parses; this module only says which lines it would refuse, and why, in words.
"""

from __future__ import annotations

from typing import Final

import msgspec
import polars as pl

from fordstone.connectors.files.bytes import FileBytes
from fordstone.connectors.files.cells import Cells, from_json, json_types, reason
from fordstone.connectors.files.lines import BOM, PARSER_ERRORS, LineFormat, MalformedError, Offsets, newlines
from fordstone.lang.schema import DataType, Schema

_WHITE: Final = b" \t\r"
_INTEGER_BITS: Final = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}


class JsonLines(LineFormat):
    """The format `jsonl`."""

    def __init__(self, schema: Schema, *, time_unit: str) -> None:
        self._schema = schema
        self._types = json_types(schema)
        self._time_unit = time_unit
        self._typed = {
            name: kind for name, kind in schema.items() if kind.name in {*_INTEGER_BITS, "boolean", "float", "double"}
        }

    def begin(self, data: FileBytes, limit: int | None, *, complete: bool) -> int | None:
        """At the start, after the byte-order mark that some editors write."""
        if limit is not None and limit < len(BOM):
            return 0
        head = data.at(0, len(BOM))
        if len(head) < len(BOM) and BOM.startswith(head) and not complete:
            return None
        return len(BOM) if head == BOM else 0

    @property
    def ends_at_every_newline(self) -> bool:
        return True

    def ends(self, data: bytes) -> Offsets:
        return newlines(data)

    def blank(self, record: bytes) -> bool:
        return not record.strip(_WHITE)

    def parse(self, data: bytes, records: int) -> pl.DataFrame:
        try:
            frame = pl.read_ndjson(data, schema=self._types)
        except PARSER_ERRORS as error:
            raise MalformedError(str(error).partition("\n")[0]) from error
        if frame.height != records:
            raise MalformedError("not one JSON object")
        return frame

    def judge(self, record: bytes) -> str | None:
        """Find what is surely wrong. Where decoders may disagree (surrogates, huge numbers, deep nesting), say nothing."""
        try:
            decoded = msgspec.json.decode(record)
        except UnicodeDecodeError as error:
            return f"invalid UTF-8 at byte {error.start} of a text"
        except msgspec.ValidationError:
            return None
        except msgspec.DecodeError as error:
            return None if b"\\ud" in record.lower() else str(error)  # halves of surrogate pairs
        except RecursionError:
            return None
        if not isinstance(decoded, dict):
            return "not a JSON object"
        for name, kind in self._typed.items():
            value = decoded.get(name)
            if value is None or _fits(value, kind):
                continue
            if record.count(msgspec.json.encode(name)) == 1:  # of a repeated name another value may count
                return reason(name, value, kind)
        return None

    def finish(self, frame: pl.DataFrame) -> Cells:
        return from_json(frame, self._schema, time_unit=self._time_unit)


def _fits(value: object, kind: DataType) -> bool:
    if kind.name == "boolean":
        return isinstance(value, bool)
    if isinstance(value, bool):
        return False
    if kind.is_float:
        return isinstance(value, int | float)
    bits = _INTEGER_BITS[kind.name]
    return isinstance(value, int) and -(1 << (bits - 1)) <= value < 1 << (bits - 1)
