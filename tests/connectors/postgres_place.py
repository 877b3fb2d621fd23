"""An empty database per test, and what can be seen in it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import polars as pl
from tests.services.postgres import Postgres

from fordstone.lang.schema import Schema


def database_of(server: Postgres, place: Path) -> str:
    """The dsn of the database of a folder, which is made when it is first asked for."""
    name = f"t_{hashlib.sha256(str(place).encode()).hexdigest()[:16]}"
    if not server.rows(f"SELECT 1 FROM pg_database WHERE datname = '{name}'", "postgres"):
        server.create_database(name)
    return server.dsn(name)


def seen_in(server: Postgres, dsn: str, table: str, schema: Schema, *, order: str) -> pl.DataFrame:
    """The rows of a table with the columns of the schema, and the ids if there are some."""
    database = dsn.split("dbname=")[1].split(maxsplit=1)[0]
    columns = {
        row[0]
        for row in server.rows(f"SELECT attname FROM pg_attribute WHERE attrelid = '{table}'::regclass", database)
    }
    names = [*schema, *({"__id"} & columns)]
    listed = ", ".join(f'"{name}"' for name in names)
    found = server.rows(f"SELECT {listed} FROM {table} ORDER BY {order}", database)
    kinds = dict(schema.polars) | {"__id": pl.String()}
    frame = pl.DataFrame(found, schema={name: kinds[name] for name in names}, orient="row")
    return frame.select(name for name in names if name in schema or frame[name].count())
