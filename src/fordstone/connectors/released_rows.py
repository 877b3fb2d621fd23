"""What the sinks of tables do with the rows of an epoch before they write them, and the digest by which they recognize them.

Digests of parts add up to the digest of the epoch, whatever the order of its rows is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import polars as pl

from fordstone.connectors.files.rows import OP, UPSERT
from fordstone.errors import SinkError
from fordstone.lang.polars.nested import json_text
from fordstone.lang.schema import Schema
from fordstone.state.key_group import row_hashes

ID: Final = "__id"
"""The id of a row that was emitted at once; a table gets this column with the first such row."""
_NOT_EXACT: Final = (pl.Float32, pl.Float64, pl.List, pl.Map, pl.Struct)
_NESTED: Final = (pl.List, pl.Map, pl.Struct)


def appended_rows(frame: pl.DataFrame, schema: Schema, *, where: str) -> pl.DataFrame:
    """The rows as a table takes them, with their ids if they have some."""
    missing = [name for name in schema if name not in frame.columns]
    if missing:
        raise SinkError(f"{where}: rows come without column {missing[0]!r}; they have {', '.join(frame.columns)}.")
    ids = [pl.col(ID).cast(pl.String)] if ID in frame.columns else []
    return frame.select(*(pl.col(name).cast(kind.polars) for name, kind in schema.items()), *ids)


def last_changes(frame: pl.DataFrame, schema: Schema, key: tuple[str, ...], *, where: str) -> pl.DataFrame:
    """The last row of each key, with what it does in `OP`; without it, rows are upserts. With an empty key, the last row of all."""
    columns = [_one_zero(name) if name in key and kind.is_float else pl.col(name) for name, kind in schema.items()]
    op = frame[OP].cast(pl.String) if OP in frame.columns else pl.lit(UPSERT)
    rows = appended_rows(frame, schema, where=where).select(columns).with_columns(op.alias(OP))
    return rows.unique(subset=list(key), keep="last", maintain_order=True) if key else rows.tail(1)


def _one_zero(name: str) -> pl.Expr:
    """A float key column in which equal keys have equal bits."""
    column = pl.col(name)
    return pl.when(column.is_nan()).then(float("nan")).when(column == 0).then(0.0).otherwise(column).alias(name)


def digest_of(rows: pl.DataFrame, schema: Schema, *, exact: bool = False) -> str:
    """A digest of the rows in any order; `exact`: without the columns of floats and nested values."""
    left_out = _NOT_EXACT if exact else ()
    hashed = [name for name, kind in rows.schema.items() if not isinstance(kind, left_out) and name != ID]
    texts = [
        json_text(pl.col(name), schema[name]).alias(name) for name in hashed if isinstance(rows.schema[name], _NESTED)
    ]
    return f"{int(row_hashes(rows.with_columns(texts), hashed).sum(dtype='uint64')):016x}"


def add_digests(digests: Iterable[str]) -> str:
    """The digest of the rows of all parts."""
    return f"{sum(int(digest, 16) for digest in digests) % 2**64:016x}"
