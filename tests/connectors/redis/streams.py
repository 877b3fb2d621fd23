"""Streams for tests: keys, rows as entries, and entries as rows."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import polars as pl
from tests.services.redis import RedisServer

from fordstone.connectors.redis.kind import RedisSettings
from fordstone.connectors.redis.rows import EntryRows, RowEntries
from fordstone.lang.schema import DataType, Schema

Fields = dict[str, Any]


def key_of(place: Path, name: str = "s") -> str:
    """A key that only one test uses."""
    return f"{name}:{place.parent.name}:{place.name}"


def add(server: RedisServer, key: str, entries: Iterable[Fields], *, ids: Iterable[str] = ()) -> list[str]:
    """Add entries, and return their ids."""
    given = list(ids)
    with server.client() as client:
        return [
            client.xadd(key, fields, id=given[number] if given else "*").decode()
            for number, fields in enumerate(entries)
        ]


def add_rows(server: RedisServer, key: str, rows: pl.DataFrame, **options: Any) -> None:
    """Add rows as a sink does."""
    settings = RedisSettings(keys=(key,), url=server.url, **options)
    with server.client() as client:
        for entry in RowEntries(
            settings, Schema.stored({name: str(DataType.from_polars(kind)) for name, kind in rows.schema.items()})
        ).of(rows):
            client.execute_command("XADD", key, "*", *entry)


def entries_of(server: RedisServer, key: str) -> list[Any]:
    with server.client() as client:
        client.set_response_callback("XRANGE", lambda answer, **_: answer)
        return client.execute_command("XRANGE", key, "-", "+")  # type: ignore[no-any-return]


def rows_of(server: RedisServer, key: str, schema: Schema, **options: Any) -> pl.DataFrame:
    """The rows of a stream, with the ids and changes that some have."""
    found = entries_of(server, key)
    rows = EntryRows(RedisSettings(keys=(key,), url=server.url, **options), schema)
    frame, _, rejected = rows.of(key, found, range(1, len(found) + 1))
    assert not rejected
    objects = [dict(zip(fields[::2], fields[1::2], strict=True)) for _, fields in found]
    if options.get("format") == "json":
        objects = [{name.encode(): text for name, text in json.loads(one[b"value"]).items()} for one in objects]
    for name in ("__id", "__op"):
        values = [one.get(name.encode()) for one in objects]
        texts = [value.decode() if isinstance(value, bytes) else value for value in values]
        if any(texts):
            frame = frame.with_columns(pl.Series(name, texts, dtype=pl.String))
    return frame
