"""Entries of a stream as rows of a schema, and rows as entries.

With `format="fields"` a field is a column, as text in the form of CSV; bytes are as they are, null is no field, and of several fields of one name
the last counts. With `json` and `raw` one field has the columns, as `connectors.messages` reads and writes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import polars as pl

from fordstone.connectors.base import Rejected
from fordstone.connectors.files.cells import from_text
from fordstone.connectors.files.rows import OP
from fordstone.connectors.messages import message_format
from fordstone.connectors.redis.kind import RedisSettings
from fordstone.connectors.released_rows import ID
from fordstone.errors import ConfigError
from fordstone.lang.python_times import fits_python, python_bounds
from fordstone.lang.schema import Schema

TEXT_MAX: Final = 4096
"""How many characters of a rejected entry are kept."""
FIELDS_MAX: Final = 3_000
"""Of a sink: a script on the server can pass on about 8,000 values at once, which are names and values of fields."""
NO_FIELD: Final = b"__null"
"""The field of an entry that would have none, which Redis does not take."""
_TIME: Final = "%Y-%m-%dT%H:%M:%S%.6fZ"
RawEntry = list[Any]
"""As the server sends it: the id, and a list in which names and values of fields alternate."""


class EntryRows:
    """Makes rows of the entries of a source."""

    def __init__(self, settings: RedisSettings, schema: Schema) -> None:
        self._settings = settings
        self._schema = schema
        self._fields = settings.field_schema(schema)
        self._texts = Schema.stored({name: str(kind) for name, kind in self._fields.items() if kind.name != "binary"})
        self._format = None
        if settings.format == "fields":
            check_flat(settings, self._fields)
        elif self._fields or settings.format == "json":
            self._format = message_format(
                settings.format, self._fields, time_unit=settings.time_unit, where=settings.called
            )

    def of(
        self, key: str, entries: Sequence[RawEntry], numbers: Sequence[int]
    ) -> tuple[pl.DataFrame, pl.Series, tuple[Rejected, ...]]:
        """Return the rows, the position of each, and the entries that are no rows. `numbers` are those of the ids."""
        if not entries:
            return self._schema.empty(), pl.Series([], dtype=pl.Int64), ()
        frame, kept, bad = self._from_fields(entries) if self._format is None else self._from_one_field(entries)
        places = np.array(numbers, dtype=np.int64)
        apart = [self._part(name, key, entries, places) for name in self._settings.columns]
        if apart:
            frame = pl.concat([frame, pl.DataFrame(apart)[kept]], how="horizontal")
        rejected = tuple(
            Rejected(position=int(places[at]), text=text, reason=f"{key} {entries[at][0].decode()}: {why}")
            for at, (text, why) in sorted(bad.items())
        )
        return frame.select(list(self._schema)), pl.Series(places[kept]), rejected

    def _from_fields(self, entries: Sequence[RawEntry]) -> tuple[pl.DataFrame, np.ndarray, dict[int, tuple[str, str]]]:
        found = [dict(zip(fields[::2], fields[1::2], strict=True)) for _, fields in entries]
        bad: dict[int, str] = {}
        columns: dict[str, pl.Series] = {}
        for name, kind in self._fields.items():
            field = name.encode()
            values = [one.get(field) for one in found]
            if kind.name == "binary":
                columns[name] = pl.Series(name, values, dtype=pl.Binary)
            else:
                columns[name] = _decoded(name, values, bad)
        cells = from_text(
            pl.DataFrame([columns[name] for name in self._texts], height=len(entries)),
            self._texts,
            time_unit=self._settings.time_unit,
        )
        bad = cells.bad | bad
        made = {name: cells.frame.get_column(name) for name in self._texts}
        frame = pl.DataFrame([made.get(name, columns[name]) for name in self._fields], height=len(entries))
        kept = np.setdiff1d(np.arange(len(entries)), list(bad))
        return frame[kept] if bad else frame, kept, {at: (_shown(entries[at][1]), why) for at, why in bad.items()}

    def _from_one_field(
        self, entries: Sequence[RawEntry]
    ) -> tuple[pl.DataFrame, np.ndarray, dict[int, tuple[str, str]]]:
        assert self._format is not None  # noqa: S101 - see `of`
        field = self._settings.field.encode()
        values = [dict(zip(fields[::2], fields[1::2], strict=True)).get(field) for _, fields in entries]
        there = np.array([at for at, value in enumerate(values) if value is not None], dtype=np.int64)
        decoded = self._format.decode([value for value in values if value is not None])
        bad = {
            at: (_shown(entries[at][1]), f"there is no field {self._settings.field!r}")
            for at, value in enumerate(values)
            if value is None
        }
        bad |= {int(there[one.number]): (one.text, one.reason) for one in decoded.rejected}
        return decoded.frame, there[decoded.numbers], bad

    def _part(self, name: str, key: str, entries: Sequence[RawEntry], numbers: np.ndarray) -> pl.Series:
        """A column that is no field."""
        if name == self._settings.stream:
            return pl.Series(name, [key] * len(entries), dtype=pl.String)
        if name == self._settings.id:
            return pl.Series(name, [one[0].decode() for one in entries], dtype=pl.String)
        times = (numbers >> self._settings.sequence_bits) * 1000
        return pl.Series(name, times, dtype=pl.Int64).cast(self._schema[name].polars)


class RowEntries:
    """Makes entries of the rows of a sink."""

    def __init__(self, settings: RedisSettings, schema: Schema) -> None:
        self._settings = settings
        self._schema = schema
        self._format = None
        if settings.format != "fields":
            self._format = message_format(settings.format, schema, where=settings.called)
            return
        check_flat(settings, schema)
        if len(schema) > FIELDS_MAX:
            raise ConfigError(
                f"{settings.called}: {len(schema):,} columns are too many for the fields of an entry, which may have {FIELDS_MAX:,}. Use format='json'."
            )

    def of(self, frame: pl.DataFrame) -> list[list[bytes]]:
        """Return names and values of the fields of each entry. Ids and changes of rows are fields too, or in the object of JSON."""
        hidden = [name for name in (ID, OP) if name in frame.columns]
        fields: list[tuple[bytes, list[bytes | None]]] = []
        if self._format is None:
            fields = [(name.encode(), _encoded(frame.get_column(name))) for name in (*self._schema, *hidden)]
        else:
            within = hidden if self._settings.format == "json" else []
            values: list[bytes | None] = list(self._format.encode(frame.select(*self._schema, *within)))
            fields = [(self._settings.field.encode(), values)]
            if not within:
                fields += [(name.encode(), _encoded(frame.get_column(name))) for name in hidden]
        entries: list[list[bytes]] = [[] for _ in range(frame.height)]
        for name, column in fields:
            for entry, value in zip(entries, column, strict=True):
                if value is not None:
                    entry.extend((name, value))
        return [entry or [NO_FIELD, b""] for entry in entries]


def check_flat(settings: RedisSettings, schema: Schema) -> None:
    """Raise if a column cannot be one text."""
    for name, kind in schema.items():
        if kind.is_nested:
            raise ConfigError(
                f"{settings.called}: column {name!r} is {kind}, and a field is one value. Use format='json', or make it text with to_json(...)."
            )


def _decoded(name: str, values: list[bytes | None], bad: dict[int, str]) -> pl.Series:
    """Values as text. Those that are none are null, and `bad`."""
    try:
        texts = [None if value is None else value.decode() for value in values]
    except UnicodeDecodeError:
        texts = []
        for at, value in enumerate(values):
            try:
                texts.append(None if value is None else value.decode())
            except UnicodeDecodeError as error:
                texts.append(None)
                bad.setdefault(at, f"field {name}: invalid UTF-8 at byte {error.start}")
    return pl.Series(name, texts, dtype=pl.String)


def _encoded(column: pl.Series) -> list[bytes | None]:
    if column.dtype == pl.Binary:
        return column.to_list()
    if isinstance(column.dtype, pl.Datetime | pl.Date):
        if not fits_python(column):  # no reader takes it: as in files
            within = column.cast(pl.Int64).is_between(*python_bounds(column.dtype))
            column = pl.select(pl.when(within).then(column)).to_series()
        texts = column.dt.strftime(_TIME if isinstance(column.dtype, pl.Datetime) else "%Y-%m-%d")
    else:
        texts = column.cast(pl.String)
    return [None if text is None else text.encode() for text in texts.to_list()]


def _shown(fields: Sequence[bytes]) -> str:
    pairs = zip(fields[::2], fields[1::2], strict=True)
    shown = [
        f"{name[:TEXT_MAX].decode(errors='replace')}={value[:TEXT_MAX].decode(errors='replace')}"
        for name, value in pairs
    ]
    return " ".join(shown)[:TEXT_MAX]
