"""Tables that streams are joined with: control tables, which the center writes, and lookup tables, which do not change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import polars as pl

from fordstone.connectors.base import live_of
from fordstone.connectors.lookup_table import inline_spec, read_table
from fordstone.connectors.memory import MemorySource, checked_rows, inferred_schema, memory
from fordstone.connectors.registry import source_delivery
from fordstone.errors import ConfigError
from fordstone.lang.schema import Schema
from fordstone.plan import plan as p
from fordstone.plan.stream_type import shown

if TYPE_CHECKING:
    from fordstone.api.pipeline import Pipeline

TableRows = Sequence[Mapping[str, Any]] | pl.DataFrame


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlTable:
    """A table that the center writes (`to_edges`) and every node reads (`join_control`). Made by `Pipeline.control`."""

    pipeline: Pipeline
    name: str
    schema: Schema
    keys: tuple[str, ...]

    def __repr__(self) -> str:
        return f"ControlTable({self.name}: {shown(self.schema)}; key {', '.join(self.keys)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupTable:
    """A table that does not change, which streams are joined with. Made by `Pipeline.table`."""

    name: str
    connector: p.ConnectorSpec
    schema: Schema

    def __repr__(self) -> str:
        return f"LookupTable({self.name}: {shown(self.schema)})"


def table_of(
    table: p.ConnectorSpec | LookupTable | TableRows, schema: Mapping[str, str] | None
) -> tuple[p.ConnectorSpec, Schema]:
    """The table as it stands in the plan, and its columns."""
    if isinstance(table, LookupTable):
        if schema is not None:
            raise ConfigError(f"table {table.name} has its columns already. Leave schema= out.")
        return table.connector, table.schema
    if isinstance(table, p.ConnectorSpec):
        if schema is None:
            raise ConfigError('a lookup needs the columns of its table: schema={"device": "string", "site": "string"}.')
        source_delivery(table)
        columns = Schema.of(schema)
        live = live_of(table)
        if isinstance(live, MemorySource) and not live.replays:
            raise ConfigError(
                "a generator is not a table, which is read whole before the first row. Give its rows as a list."
            )
        # What lives in this process would not be there where the plan is read.
        return (table if live is None else inline_spec(read_table(table, columns))), columns
    try:
        rows = checked_rows(table, "lookup")
    except ConfigError:
        raise ConfigError(
            f'{table!r} is not a table. Give files("devices.csv"), a list of records, or a frame.'
        ) from None
    columns = Schema.of(inferred_schema(rows) if schema is None else schema)
    return inline_spec(read_table(memory([rows]), columns)), columns
