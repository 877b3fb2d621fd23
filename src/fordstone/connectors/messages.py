"""The values of messages, as brokers and requests carry them: from bytes to columns, and back.

One message is one row. A message that cannot be read as a row is rejected with its text and the reason, and takes no other with it. JSON is
read and written exactly as in files (`files.formats`, `files.rows`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import contains
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
import polars as pl

from fordstone.connectors.files.formats import JsonLines, MalformedError
from fordstone.connectors.files.records import TEXT_MAX, ParsedRecords, RecordParser, Records
from fordstone.connectors.files.rows import encoded
from fordstone.errors import ConfigError
from fordstone.lang.schema import Schema

MessageFormatName = Literal["json", "raw"]
MESSAGE_BYTES_MAX: Final = 1 << 24
"""Larger messages are rejected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedMessage:
    """A message that is no row of the schema."""

    number: int
    """Its place among the messages that were decoded together."""
    text: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """The rows of messages that were decoded together."""

    frame: pl.DataFrame
    numbers: npt.NDArray[np.int64]
    """Of each row, the place of its message."""
    rejected: tuple[RejectedMessage, ...]
    """In the order of messages. Each message is here or in `numbers`."""


class MessageFormat(ABC):
    """What the values of messages contain."""

    @abstractmethod
    def decode(self, values: Sequence[bytes]) -> Decoded:
        """Decode the values of messages. What becomes of one does not depend on the others."""

    @abstractmethod
    def encode(self, frame: pl.DataFrame) -> list[bytes]:
        """Return the value of one message per row. The frame may have further columns, such as `__id`."""


def message_format(name: MessageFormatName, schema: Schema, *, time_unit: str = "us", where: str) -> MessageFormat:
    """Return the format for the columns that messages carry in their value. `where` begins the error if they do not fit it."""
    if name == "json":
        return JsonMessages(schema, time_unit=time_unit)
    columns = list(schema.items())
    if len(columns) != 1 or columns[0][1].name not in {"string", "binary"}:
        raise ConfigError(
            f"{where}: with format='raw', the value of a message is one column of type string or binary. "
            f"It would be: {', '.join(f'{column} {kind}' for column, kind in columns) or 'no column'}."
        )
    return RawMessages(schema)


class JsonMessages(MessageFormat):
    """Each value is one JSON object."""

    def __init__(self, schema: Schema, *, time_unit: str) -> None:
        self._schema = schema
        self._parser = RecordParser(JsonLines(schema, time_unit=time_unit), schema, record_bytes_max=MESSAGE_BYTES_MAX)

    def decode(self, values: Sequence[bytes]) -> Decoded:
        if any(map(contains, values, repeat(b"\n"))):
            # A newline in JSON is white space, so a blank means the same.
            values = [value.replace(b"\n", b" ") for value in values]
        data = b"\n".join(values)
        ends = np.cumsum(np.fromiter(map(len, values), dtype=np.int64, count=len(values)) + 1) - 1
        starts = np.concatenate((np.zeros(min(1, len(values)), np.int64), ends[:-1] + 1))
        parts = self._parsed(Records(base=0, data=data, starts=starts, ends=ends))
        numbers = np.searchsorted(starts, np.concatenate([np.zeros(0, np.int64), *(part.starts for part in parts)]))
        rejected = [
            RejectedMessage(number=int(np.searchsorted(starts, one.position)), text=one.text, reason=one.reason)
            for part in parts
            for one in part.rejected
        ]
        if len(numbers) + len(rejected) < len(values):
            missing = np.setdiff1d(np.arange(len(values)), [*numbers, *(one.number for one in rejected)])
            rejected += [
                RejectedMessage(number=int(number), text="", reason="the message is empty") for number in missing
            ]
            rejected.sort(key=lambda one: one.number)
        return Decoded(
            frame=parts[0].frame
            if len(parts) == 1
            else pl.concat([self._schema.empty(), *(part.frame for part in parts)]),
            numbers=numbers,
            rejected=tuple(rejected),
        )

    def _parsed(self, records: Records) -> list[ParsedRecords]:
        parts: list[ParsedRecords] = []
        while records.ends.size:
            try:
                parts.append(self._parser.parse(records))
                break
            except MalformedError:
                part = self._parser.parse_closely(records)
            parts.append(part)
            records = records.after(part.length)
        return parts

    def encode(self, frame: pl.DataFrame) -> list[bytes]:
        return encoded(frame, "jsonl").splitlines()


class RawMessages(MessageFormat):
    """Each value is one column, as it is."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        ((self._column, self._kind),) = schema.items()

    def decode(self, values: Sequence[bytes]) -> Decoded:
        if self._kind.name == "binary":
            frame = pl.DataFrame({self._column: pl.Series(values, dtype=pl.Binary)}, schema=self._schema.polars)
            return Decoded(frame=frame, numbers=np.arange(len(values)), rejected=())
        texts, numbers, rejected = [], [], []
        for number, value in enumerate(values):
            try:
                texts.append(value.decode())
                numbers.append(number)
            except UnicodeDecodeError as error:
                text = value[:TEXT_MAX].decode(errors="replace")
                reason = f"invalid UTF-8 at byte {error.start}"
                rejected.append(RejectedMessage(number=number, text=text, reason=reason))
        return Decoded(
            frame=pl.DataFrame({self._column: texts}, schema=self._schema.polars),
            numbers=np.array(numbers, dtype=np.int64),
            rejected=tuple(rejected),
        )

    def encode(self, frame: pl.DataFrame) -> list[bytes]:
        column = frame.get_column(self._column)
        values = column.cast(pl.Binary) if column.dtype == pl.String else column
        return values.fill_null(b"").to_list()
