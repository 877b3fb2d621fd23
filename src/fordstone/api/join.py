"""The steps that `Stream.join`, `lookup`, `join_latest` and `join_control` add."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import polars as pl

from fordstone.connectors.base import live_of
from fordstone.connectors.lookup_table import inline_spec, read_table
from fordstone.connectors.memory import memory
from fordstone.connectors.registry import source_delivery
from fordstone.errors import ConfigError, FordstoneError, PipelineError
from fordstone.lang.duration import duration_us
from fordstone.lang.schema import DataType, Schema
from fordstone.plan import plan as p

if TYPE_CHECKING:
    from fordstone.api.stream import Stream

On = str | Sequence[str] | Mapping[str, str]
"""Columns that must be equal: of both sides, or from those of the left to those of the right."""
Span = str | timedelta
TableRows = Sequence[Mapping[str, Any]] | pl.DataFrame


def join_step(
    step: str,
    left: Stream,
    right: Stream,
    *,
    on: On,
    between: tuple[Span, Span] | None,
    how: str,
    suffix: str,
) -> p.Join:
    """The step of an interval join."""
    _same_pipeline(step, left, right)
    left_keys, right_keys = join_columns_of(step, on)
    if between is None:
        raise PipelineError(
            f"step {step}: a join of two streams needs a bound on time, or it would have to keep every row for good. Add how far the "
            'right time may lie from the left: between=("-5s", "10s").'
        )
    if isinstance(between, str | timedelta) or len(between) != 2:  # noqa: PLR2004 - a pair
        raise PipelineError(f'step {step}: between={between!r} is not a pair. Write between=("-5s", "10s").')
    from_us, to_us = (signed_us(bound, what=f"step {step}: between") for bound in between)
    return p.Join(
        name=step,
        left=left._at,  # noqa: SLF001 - our own class
        right=right._at,  # noqa: SLF001 - our own class
        left_keys=left_keys,
        right_keys=right_keys,
        from_us=from_us,
        to_us=to_us,
        how=cast("p.JoinHow", how),
        suffix=suffix,
    )


def lookup_step(
    step: str,
    stream: Stream,
    table: p.ConnectorSpec | TableRows,
    *,
    on: On,
    schema: Mapping[str, str] | None,
    how: str,
    suffix: str,
) -> p.Lookup:
    """The step of a lookup in a static table."""
    keys, table_keys = join_columns_of(step, on)
    try:
        spec, columns = _table(table, schema)
    except FordstoneError as error:
        raise PipelineError(f"step {step}: {error}") from error
    return p.Lookup(
        name=step,
        input=stream._at,  # noqa: SLF001 - our own class
        table=spec,
        schema=columns.to_dict(),
        keys=keys,
        table_keys=table_keys,
        how=cast("Any", how),
        suffix=suffix,
    )


def latest_step(
    step: str,
    stream: Stream,
    control: Stream,
    *,
    on: On,
    how: str,
    suffix: str,
    wait: bool,
) -> p.LookupLatest:
    """The step of a lookup in a control stream."""
    _same_pipeline(step, stream, control)
    keys, control_keys = join_columns_of(step, on)
    return p.LookupLatest(
        name=step,
        input=stream._at,  # noqa: SLF001 - our own class
        control=control._at,  # noqa: SLF001 - our own class
        keys=keys,
        control_keys=control_keys,
        how=cast("Any", how),
        suffix=suffix,
        waits=bool(wait),
    )


def signed_us(value: Span, *, what: str) -> int:
    """Read a span that may be negative: `"-5s"`."""
    if isinstance(value, str) and value.strip().startswith("-"):
        return -duration_us(value.strip().removeprefix("-"), what=what)
    return duration_us(value, what=what)


def join_columns_of(step: str, on: On) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The columns of both sides that must be equal."""
    given: Any = on
    if isinstance(given, Mapping):
        pairs = list(given.items())
    else:
        names = [given] if isinstance(given, str) or not isinstance(given, Sequence) else given
        pairs = [(name, name) for name in names]
    if not all(isinstance(name, str) for pair in pairs for name in pair):
        raise PipelineError(
            f'step {step}: on={on!r} does not name columns. Write on="device", on=["site", "device"], or from left to right '
            'on={"device": "id"}.'
        )
    return tuple(left for left, _ in pairs), tuple(right for _, right in pairs)


def _same_pipeline(step: str, one: Stream, other: object) -> None:
    from fordstone.api.stream import Stream  # noqa: PLC0415 - streams are built from these steps

    if not isinstance(other, Stream):
        raise PipelineError(
            f"step {step}: {other!r} is not a stream. For a table that does not change, use .lookup(table, on=...); for a control "
            "table, .join_control(table, on=...)."
        )
    if other.pipeline is not one.pipeline:
        raise PipelineError(f"step {step}: {getattr(other, 'name', other)} belongs to another pipeline.")


def _table(table: p.ConnectorSpec | TableRows, schema: Mapping[str, str] | None) -> tuple[p.ConnectorSpec, Schema]:
    """The table as it stands in the plan, and its columns."""
    if isinstance(table, p.ConnectorSpec):
        if schema is None:
            raise ConfigError('a lookup needs the columns of its table: schema={"device": "string", "site": "string"}.')
        source_delivery(table)
        columns = Schema.of(schema)
        # What lives in this process would not be there where the plan is read.
        return (table if live_of(table) is None else inline_spec(read_table(table, columns))), columns
    given: Any = table
    if isinstance(given, str | bytes) or not isinstance(given, Sequence | pl.DataFrame):
        raise ConfigError(f'{given!r} is not a table. Give files("devices.csv"), a list of records, or a Polars frame.')
    if schema is None:
        schema = _inferred(table)
    columns = Schema.of(schema)
    return inline_spec(read_table(memory([given]), columns)), columns


def _inferred(table: TableRows) -> dict[str, str]:
    if isinstance(table, pl.DataFrame):
        frame = table
    elif not table:
        raise ConfigError("a table without rows does not tell its columns. Add schema=.")
    else:
        try:
            frame = pl.DataFrame(table, infer_schema_length=None)
        except (pl.exceptions.PolarsError, TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"the rows of the table are not of one kind: {error}. Add schema=.") from error
    return {name: str(DataType.from_polars(kind)) for name, kind in frame.schema.items()}
