"""Messages as rows of a schema, and rows as messages.

The value is decoded and encoded by `connectors.messages`; key, headers, time, partition and offset are columns of their own.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import polars as pl

from fordstone.connectors.base import OpenContext, Rejected, SinkStream
from fordstone.connectors.files.rows import OP
from fordstone.connectors.kafka.kind import KafkaSettings
from fordstone.connectors.messages import MessageFormat, message_format
from fordstone.connectors.registered import RegisteredMessages, codec
from fordstone.connectors.schema_registry import RegistryAwayError, SchemaRegistry
from fordstone.errors import ConfigError, FordstoneError, SinkError, SourceError
from fordstone.lang.schema import DataType, Schema

TEXT_MAX: Final = 200
REGISTRY_RETRY_S: Final = 0.05
Headers = list[tuple[str, bytes]]


class Messages(ABC):
    """Messages of one partition, in the order of their offsets. Parts that no column needs are not asked for."""

    @property
    @abstractmethod
    def offsets(self) -> np.ndarray:
        """The offset of each, Int64."""

    @abstractmethod
    def values(self) -> list[Any]:
        """The value of each, as bytes; None: it has none. The list is the caller's own."""

    @abstractmethod
    def keys(self) -> list[bytes | None]: ...

    @abstractmethod
    def partitions(self) -> list[int]: ...

    @abstractmethod
    def times_ms(self) -> list[int | None]:
        """The time of each in milliseconds since 1970; None: it has none."""

    @abstractmethod
    def headers(self, name: str) -> list[bytes | None]:
        """The last header of this name of each."""


class MessageRows:
    """Makes rows of the messages of a source."""

    def __init__(self, settings: KafkaSettings, schema: Schema, context: OpenContext) -> None:
        self._settings = settings
        self._schema = schema
        self._values = settings.value_schema(schema, with_key=False)
        self._format: MessageFormat | None = None
        if self._values:
            self._format = format_of(settings, self._values, context, where=settings.called, fails=SourceError)

    def of(
        self, messages: Messages | None, *, wait_s: float = 0.0
    ) -> tuple[pl.DataFrame, pl.Series, tuple[Rejected, ...]]:
        """Return the rows, the position of each, and the messages that are no rows. None: there are no messages.

        `wait_s`: how long to wait for a schema registry that does not answer.
        """
        deadline_s = time.monotonic() + wait_s
        while True:
            try:
                return self._of(messages)
            except RegistryAwayError:
                if time.monotonic() >= deadline_s:
                    raise
            time.sleep(REGISTRY_RETRY_S)

    def _of(self, messages: Messages | None) -> tuple[pl.DataFrame, pl.Series, tuple[Rejected, ...]]:
        if messages is None:
            return self._schema.empty(), pl.Series([], dtype=pl.Int64), ()
        offsets = messages.offsets
        frame, numbers, rejected = self._decoded(messages, offsets)
        parts: list[pl.Series] = []
        unfit = np.zeros(len(offsets), dtype=bool)
        for name in self._settings.columns:
            column, wrong = self._part(name, messages, offsets)
            parts.append(column)
            for number in wrong:
                unfit[number] = True
                rejected.append(_rejected(int(offsets[number]), "", f"column {name}: invalid UTF-8"))
        if parts:
            apart = pl.DataFrame(parts)
            apart = apart if len(numbers) == len(offsets) else apart[numbers]
            frame = frame.with_columns(apart) if frame.width else apart
        if unfit.any():
            fit = ~unfit[numbers]
            frame, numbers = frame.filter(pl.Series(fit)), numbers[fit]
        rejected = list({one.position: one for one in sorted(rejected, key=lambda one: one.position)}.values())
        return frame.select(list(self._schema)), pl.Series(offsets[numbers] + 1), tuple(rejected)

    def close(self) -> None:
        if isinstance(self._format, RegisteredMessages):
            self._format.close()

    def _decoded(self, messages: Messages, offsets: np.ndarray) -> tuple[pl.DataFrame, np.ndarray, list[Rejected]]:
        """The columns of the values, the message of each row, and what is no value."""
        if self._format is None:
            return pl.DataFrame(), np.arange(len(offsets)), []
        values = messages.values()
        missing = np.array([number for number, value in enumerate(values) if value is None], dtype=np.int64)
        present = np.setdiff1d(np.arange(len(values)), missing)
        decoded = self._format.decode([values[number] for number in present] if missing.size else values)
        rejected = [_rejected(int(offsets[present[one.number]]), one.text, one.reason) for one in decoded.rejected]
        frame, numbers = decoded.frame, present[decoded.numbers]
        if missing.size:
            numbers = np.concatenate((numbers, missing))
            order = np.argsort(numbers)
            frame, numbers = pl.concat([frame, self._values.empty().clear(missing.size)])[order], numbers[order]
        return frame, numbers, rejected

    def _part(self, name: str, messages: Messages, offsets: np.ndarray) -> tuple[pl.Series, list[int]]:
        """A column that is not in the value, and the messages that have no valid one."""
        settings, kind = self._settings, self._schema[name]
        if name == settings.offset:
            return pl.Series(name, offsets), []
        if name == settings.partition:
            return pl.Series(name, messages.partitions(), dtype=kind.polars), []
        if name == settings.timestamp:
            return (pl.Series(name, messages.times_ms(), dtype=pl.Int64) * 1000).cast(kind.polars), []
        if name == settings.key:
            return _texts(name, messages.keys(), kind)
        return _texts(name, messages.headers(settings.headers[name]), kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A message to be sent."""

    value: bytes
    key: bytes | None
    headers: Headers | None
    timestamp_ms: int
    partition: int


class RowMessages:
    """Makes messages of the rows of a sink."""

    def __init__(self, settings: KafkaSettings, stream: SinkStream, context: OpenContext) -> None:
        self._settings = settings
        self._values = settings.value_schema(stream.schema, with_key=settings.format != "raw")
        where = f"sink {stream.step}: {settings.called}"
        if not self._values:
            raise ConfigError(f"{where}: no column is left for the value of its messages. Add one to the stream.")
        self._format = format_of(settings, self._values, context, where=where, fails=SinkError)

    def prepare(self) -> None:
        """Ask for what rows are written by, if that is not known here. Raises `RegistryAwayError`."""
        if isinstance(self._format, RegisteredMessages):
            self._format.prepare()

    def close(self) -> None:
        if isinstance(self._format, RegisteredMessages):
            self._format.close()

    def of(self, frame: pl.DataFrame) -> Iterator[Outgoing]:
        """Ids and changes of rows (`__id`, `__op`) are in an object of JSON, else they are headers."""
        settings, count = self._settings, frame.height
        hidden = [name for name in ("__id", OP) if name in frame.columns]
        headers = dict(settings.headers)
        named = list(self._values)
        if settings.format == "json":
            named += hidden
        else:
            headers |= {name: name for name in hidden}
        values = self._format.encode(frame.select(named))
        keys = _bytes(frame, settings.key)
        times: list[int] = [0] * count
        if settings.timestamp is not None:
            times = frame[settings.timestamp].dt.epoch("ms").fill_null(0).to_list()
        numbers: list[int] = [-1] * count
        if settings.partition is not None:
            numbers = frame[settings.partition].fill_null(-1).to_list()
        carried = [(header, _bytes(frame, column)) for column, header in headers.items()]
        for at in range(count):
            mine = [(header, one) for header, column in carried if (one := column[at]) is not None]
            yield Outgoing(
                value=values[at], key=keys[at], headers=mine or None, timestamp_ms=times[at], partition=numbers[at]
            )


def format_of(
    settings: KafkaSettings,
    values: Schema,
    context: OpenContext,
    *,
    where: str,
    fails: Callable[[str], FordstoneError],
) -> MessageFormat:
    """Return the format of values with these columns. `where` begins errors, and `fails` makes those of a registry."""
    if settings.format == "json" or settings.format == "raw":  # noqa: PLR1714 - narrows the type
        return message_format(settings.format, values, time_unit=settings.time_unit, where=settings.called)
    if settings.schema_registry is None:
        raise AssertionError("checked when the settings were made")
    return RegisteredMessages(
        codec(settings.format, values, settings.schema, message=settings.message, where=where),
        values,
        SchemaRegistry(settings.schema_registry, context, where=where, fails=fails),
        subject=settings.subject or f"{settings.topics[0]}-value",
        auto_register=settings.auto_register,
        where=where,
        fails=fails,
    )


def _texts(name: str, found: list[Any], kind: DataType) -> tuple[pl.Series, list[int]]:
    if kind.name == "binary":
        return pl.Series(name, found, dtype=pl.Binary), []
    try:
        return pl.Series(name, [None if one is None else one.decode() for one in found], dtype=pl.String), []
    except UnicodeDecodeError:
        wrong = [number for number, one in enumerate(found) if one is not None and not _is_text(one)]
        shown = [None if one is None else one.decode(errors="replace") for one in found]
        return pl.Series(name, shown, dtype=pl.String), wrong


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def last_header(headers: Headers | None, name: str) -> bytes | None:
    """The value of the last header of a name; None: there is none."""
    return next((value for one, value in reversed(headers or ()) if one == name), None)


def _bytes(frame: pl.DataFrame, column: str | None) -> list[bytes | None]:
    if column is None:
        return [None] * frame.height
    found: list[bytes | None] = frame[column].cast(pl.Binary).to_list()
    return found


def _rejected(offset: int, text: str, reason: str) -> Rejected:
    return Rejected(position=offset + 1, text=text, reason=f"offset {offset}: {reason}")
