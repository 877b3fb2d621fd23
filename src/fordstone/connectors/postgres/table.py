"""The table that a sink writes to: found or made, compared with the stream, and written in a transaction of the sink."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import polars as pl
import psycopg
from psycopg import sql

from fordstone.connectors.base import SinkStream
from fordstone.connectors.files.rows import DELETE, OP
from fordstone.connectors.postgres.columns import Column, copy_texts, difference, new_type, shown_columns
from fordstone.connectors.postgres.server import Cursor
from fordstone.connectors.postgres.settings import PostgresSettings
from fordstone.connectors.released_rows import ID
from fordstone.errors import SinkError
from fordstone.lang.schema import Schema

EPOCHS: Final = "fordstone_epochs"
"""The table of epochs, in the schema of the target."""
_EPOCHS_COLUMNS: Final = (
    "target text, sink text, epoch bigint NOT NULL, rows bigint NOT NULL, digest text NOT NULL, writer text NOT NULL, "
    "changed timestamp with time zone NOT NULL, PRIMARY KEY (target, sink)"
)
_DISTINCT_NULLS_SINCE: Final = 150_000
"""The version from which on a unique index may take nulls for equal."""
_DDL_LOCK: Final = 0x666F7264
"""Held while tables are made: `CREATE TABLE IF NOT EXISTS` fails if two sessions do it at once."""
_FIND: Final = (
    "SELECT n.nspname, c.relname, c.relkind, c.relpersistence FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
    "WHERE c.oid = to_regclass(%s)"
)
_COLUMNS: Final = (
    "SELECT a.attname, CASE WHEN t.typtype = 'd' THEN b.typname ELSE t.typname END, format_type(a.atttypid, a.atttypmod), "
    "a.attnotnull AND NOT a.atthasdef AND a.attidentity = '' FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid "
    "LEFT JOIN pg_type b ON b.oid = t.typbasetype WHERE a.attrelid = to_regclass(%s) AND a.attnum > 0 AND NOT a.attisdropped "
    "ORDER BY a.attnum"
)
_UNIQUE: Final = (
    "SELECT array_agg(a.attname::text) FROM pg_index i CROSS JOIN LATERAL unnest(i.indkey::int2[]) WITH ORDINALITY AS k (number, place) "
    "JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.number WHERE i.indrelid = to_regclass(%s) AND i.indisunique "
    "AND i.indisvalid AND i.indimmediate AND i.indpred IS NULL AND i.indexprs IS NULL AND k.place <= i.indnkeyatts GROUP BY i.indexrelid"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A table of the database, with its columns as they were when it was opened."""

    schema: str
    name: str
    columns: Mapping[str, Column]

    @property
    def id(self) -> sql.Identifier:
        return sql.Identifier(self.schema, self.name)

    @property
    def text(self) -> str:
        """The name as it stands in the table of epochs."""
        return quoted(self.schema, self.name)

    @property
    def epochs(self) -> sql.Identifier:
        return sql.Identifier(self.schema, EPOCHS)


def quoted(*names: str) -> str:
    """A name as SQL writes it, whatever is in it."""
    return ".".join('"' + name.replace('"', '""') + '"' for name in names)


def open_target(
    cursor: Cursor, settings: PostgresSettings, stream: SinkStream, key: tuple[str, ...] | None, *, where: str
) -> Target:
    """Find the table and the table of epochs beside it, or make them, and check that rows of the stream fit."""
    cursor.execute("SELECT pg_advisory_xact_lock(%s)", (_DDL_LOCK,))
    parts = _first(cursor, "SELECT parse_ident(%s)", settings.table)[0]
    if len(parts) > 2:  # noqa: PLR2004 - schema and table
        raise SinkError(f"sink {stream.step}: {where}: give the table as table, or schema.table.")
    found = cursor.execute(_FIND, (quoted(*parts),)).fetchone()
    if found is None:
        schema = parts[0] if len(parts) > 1 else _first(cursor, "SELECT current_schema()")[0]
        if schema is None:
            raise SinkError(f"sink {stream.step}: {where}: no schema of the search path exists. Give it: schema.table.")
        statements = _new_table(cursor, schema, parts[-1], settings, stream, key)
        _create(cursor, statements, f"sink {stream.step}: {where} does not exist")
        found = _first(cursor, _FIND, quoted(schema, parts[-1]))
    schema, name, relation, persistence = found
    if relation not in {"r", "p"}:
        raise SinkError(f"sink {stream.step}: {where} is not a table. Rows can be written to tables only.")
    if persistence != "p":
        raise SinkError(
            f"sink {stream.step}: {where} is UNLOGGED or temporary, so a crash of the server would empty it.\n"
            f"Change that, if it is not temporary: ALTER TABLE {quoted(schema, name)} SET LOGGED;"
        )
    columns = [Column(name=row[0], kind=row[1], shown=row[2], needed=row[3]) for row in _columns(cursor, schema, name)]
    target = Target(schema=schema, name=name, columns={column.name: column for column in columns})
    _check(cursor, target, settings, stream, key, where=where)
    if cursor.execute(_FIND, (quoted(schema, EPOCHS),)).fetchone() is None:
        statement = f"CREATE TABLE {quoted(schema, EPOCHS)} ({_EPOCHS_COLUMNS});"
        _create(cursor, [statement], f"sink {stream.step}: {where} needs a table for the numbers of its epochs")
    return target


def _columns(cursor: Cursor, schema: str, name: str) -> list[tuple[Any, ...]]:
    return cursor.execute(_COLUMNS, (quoted(schema, name),)).fetchall()


def _check(
    cursor: Cursor,
    target: Target,
    settings: PostgresSettings,
    stream: SinkStream,
    key: tuple[str, ...] | None,
    *,
    where: str,
) -> None:
    own = [settings.epoch_column] if settings.epoch_column is not None else []
    problem = difference(stream.schema, target.columns, also=[*own, ID])
    if problem is None and own and own[0] not in target.columns:
        problem = f"the table has no column {own[0]!r} (bigint), which epoch_column= names"
    if problem is None and own and target.columns[own[0]].kind != "int8":
        problem = f"column {own[0]!r}, which epoch_column= names, is {target.columns[own[0]].shown} in the table, and not bigint"
    if problem is not None:
        raise SinkError(
            f"sink {stream.step}: {where} does not take its rows: {problem}.\n"
            f"  stream: {shown_columns(stream.schema)}\n"
            f"  table:  {shown_columns(list(target.columns.values()))}\n"
            "Change the table or the pipeline so that they agree, or choose another table."
        )
    if key and not any(set(key) == set(names) for (names,) in cursor.execute(_UNIQUE, (target.text,))):
        raise SinkError(
            f"sink {stream.step}: its rows replace each other by {', '.join(key)}, and {where} has no unique index on that.\n"
            f"Make one: {_unique_index(cursor, target.schema, target.name, key)}"
        )


def _new_table(
    cursor: Cursor,
    schema: str,
    name: str,
    settings: PostgresSettings,
    stream: SinkStream,
    key: tuple[str, ...] | None,
) -> list[str]:
    columns = []
    for column, kind in stream.schema.items():
        made = new_type(kind)
        if made is None:
            raise SinkError(
                f"sink {stream.step}: PostgreSQL has no type for column {column!r}, which is {kind}. Cast it, or leave it out."
            )
        columns.append(f"{quoted(column)} {made}")
    if settings.epoch_column is not None:
        columns.append(f"{quoted(settings.epoch_column)} bigint")
    statements = [f"CREATE TABLE {quoted(schema, name)} ({', '.join(columns)});"]
    return [*statements, _unique_index(cursor, schema, name, key)] if key else statements


def _unique_index(cursor: Cursor, schema: str, name: str, key: Sequence[str]) -> str:
    nulls = " NULLS NOT DISTINCT" if cursor.connection.info.server_version >= _DISTINCT_NULLS_SINCE else ""
    return f"CREATE UNIQUE INDEX ON {quoted(schema, name)} ({', '.join(map(quoted, key))}){nulls};"


def _create(cursor: Cursor, statements: Sequence[str], why: str) -> None:
    try:
        for statement in statements:
            cursor.execute(sql.SQL(statement))  # composed of quoted names and of types
    except (psycopg.errors.InsufficientPrivilege, psycopg.errors.InvalidSchemaName) as error:
        raise SinkError(
            f"{why}, and cannot be made: {error.diag.message_primary}.\n"
            "Make it as a user who may, and grant SELECT, INSERT, UPDATE and DELETE on it to the user of the pipeline:\n"
            + "\n".join(f"  {statement}" for statement in statements)
        ) from error


def _first(cursor: Cursor, query: str, *values: object) -> tuple[Any, ...]:
    found = cursor.execute(sql.SQL(query), values).fetchone()
    if found is None:
        raise AssertionError(f"no row: {query}")
    return found


# Writing.


def append_rows(cursor: Cursor, target: Target, rows: pl.DataFrame, schema: Schema) -> None:
    """Append rows, whose columns are all in the table."""
    _copy(cursor, target.id, rows, schema, target)


def merge_rows(
    cursor: Cursor, target: Target, rows: pl.DataFrame, schema: Schema, key: tuple[str, ...], *, app: str
) -> None:
    """Replace, insert and delete rows by their key; each key is there once, with what to do in `OP`. `app`: of the sink."""
    columns = [name for name in rows.columns if name != OP]
    stage = _stage(cursor, target, columns, app)
    _copy(cursor, stage, rows, schema, target)
    places: dict[str, sql.Composable] = {
        "table": target.id,
        "stage": stage,
        "columns": _list(columns),
        "key": _list(key),
        "delete": sql.Literal(DELETE),
        "op": sql.Identifier(OP),
    }
    if not key:
        cursor.execute(sql.SQL("DELETE FROM {table}").format(**places))
    else:
        same = [sql.SQL("t.{0} = s.{0}").format(sql.Identifier(name)) for name in key]
        if (rows[OP] == DELETE).any():
            delete = "DELETE FROM {table} t USING {stage} s WHERE s.{op} = {delete} AND {same}"
            cursor.execute(sql.SQL(delete).format(same=sql.SQL(" AND ").join(same), **places))
        if rows.select(pl.any_horizontal(pl.col(key).is_null()).any()).item():
            # Nulls have no equal for an index that takes them for distinct. They are few: without an index, each reads the table.
            nulls = [sql.SQL("s.{} IS NULL").format(sql.Identifier(name)) for name in key]
            alike = [sql.SQL("t.{0} IS NOT DISTINCT FROM s.{0}").format(sql.Identifier(name)) for name in key]
            delete = "DELETE FROM {table} t USING {stage} s WHERE ({nulls}) AND {alike}"
            cursor.execute(
                sql.SQL(delete).format(nulls=sql.SQL(" OR ").join(nulls), alike=sql.SQL(" AND ").join(alike), **places)
            )
    rest = [name for name in columns if name not in key]
    changes = [sql.SQL("{0} = excluded.{0}").format(sql.Identifier(name)) for name in rest]
    then = sql.SQL("DO UPDATE SET {}").format(sql.SQL(", ").join(changes)) if rest else sql.SQL("DO NOTHING")
    conflict = sql.SQL("ORDER BY {key} ON CONFLICT ({key}) {then}").format(then=then, **places) if key else sql.SQL("")
    insert = "INSERT INTO {table} ({columns}) SELECT {columns} FROM {stage} WHERE {op} <> {delete} {conflict}"
    cursor.execute(sql.SQL(insert).format(conflict=conflict, **places))


def _stage(cursor: Cursor, target: Target, names: Sequence[str], app: str) -> sql.Identifier:
    """A temporary table of the session that is empty at the end of each transaction. Each sink and each set of columns has its own."""
    columns = ", ".join(f"{quoted(name)} {target.columns[name].shown}" for name in names)
    name = f"fordstone_{hashlib.sha256(f'{target.text} {app} {columns}'.encode()).hexdigest()[:16]}"
    statement = f"CREATE TEMPORARY TABLE IF NOT EXISTS {name} ({columns}, {quoted(OP)} text) ON COMMIT DELETE ROWS"
    cursor.execute(sql.SQL(statement))  # composed of quoted names and of the server's types
    return sql.Identifier("pg_temp", name)


def _copy(cursor: Cursor, into: sql.Identifier, rows: pl.DataFrame, schema: Schema, target: Target) -> None:
    statement = sql.SQL("COPY {} ({}) FROM STDIN").format(into, _list(rows.columns))
    with cursor.copy(statement) as copy:
        for text in copy_texts(rows, schema, target.columns):
            copy.write(text)


def _list(names: Iterable[str]) -> sql.Composed:
    return sql.SQL(", ").join(map(sql.Identifier, names))
