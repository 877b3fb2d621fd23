"""Between frames and the automaton: conditions by column, rows as plain values, and found matches as frames.

Everything that the row alone decides is worked out here for whole batches: each condition's part is one bit of a number
a row. What the automaton found becomes columns again, and measures are worked out over these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import and_, or_
from typing import Any, Final

import polars as pl
from sqlglot import exp

from fordstone.lang.expression import Expression, expression_of
from fordstone.lang.polars.lower import to_polars
from fordstone.lang.polars.scalar import Scalar, Values, as_plain, plain_type, scalar_of
from fordstone.lang.schema import DataType, Schema
from fordstone.lang.term import Call, Column, Term, columns_of
from fordstone.operators.match.automaton import Node, Test, kept
from fordstone.operators.match.check import (
    CLASSIFIER,
    DECIDED,
    MATCH_START,
    NUMBER,
    SLOT_PREFIX,
    SPECIALS,
    STAGES,
    Condition,
    Measure,
    Pattern,
    row_text,
    slot_index,
)
from fordstone.operators.match.matcher import Found
from fordstone.plan import plan as p
from fordstone.plan.stream_type import TIMESTAMP

BITS: Final = "__bits"
_NO_TREE: Final = exp.Null()


class RowForms:
    """The forms that a pattern needs rows in."""

    def __init__(self, step: p.Match, pattern: Pattern, schema: Schema) -> None:
        self._schema = schema
        self._values: dict[str, Term] = {}
        self._bits: dict[str, pl.Expr] = {}
        if step.all_rows:
            for name in schema:
                self.value(Column(name, schema[name]))
        self.slots = tuple(
            kept(slot, None if slot.argument is None else self.value(slot.argument)) for slot in pattern.slots
        )
        self.tests = tuple(
            self._test(condition, own_row=step.own_row and not stage.negated)
            for condition, stage in zip(pattern.conditions, step.stages, strict=True)
        )
        self.untils = tuple(None if until is None else self._test(until) for until in pattern.untils)
        for measure in pattern.measures:
            for name in _row_columns(measure.term):
                self.value(Column(name, schema[name]))
        self.all_rows_count = any(test.bit == 0 for test in (*self.tests, *self.untils) if test is not None)
        """Whether some condition is fulfilled by every row, as far as the row decides."""
        self.columns = [
            as_plain(to_polars(_named(term, f"__v{at}"), schema), term.type).alias(f"__v{at}")
            for at, term in enumerate(self._values.values())
        ]

    @cached_property
    def bits(self) -> pl.Expr:
        """Which conditions a row fulfils."""
        if not self._bits:
            return pl.repeat(0, pl.len(), dtype=pl.Int64).alias(BITS)
        parts = [
            found.fill_null(value=False).cast(pl.Int64) * (1 << at) for at, found in enumerate(self._bits.values())
        ]
        return reduce(lambda left, right: left + right, parts).alias(BITS)

    @cached_property
    def candidates(self) -> pl.Expr | None:
        """Which rows fulfil any; None: all do."""
        if self.all_rows_count or not self._bits:
            return None
        return reduce(or_, [found.fill_null(value=False) for found in self._bits.values()])

    def value(self, term: Term) -> int:
        """Which of a row's values a term is."""
        text = row_text(term)
        self._values.setdefault(text, term)
        return list(self._values).index(text)

    def values_of(self, name: str) -> int:
        """Which of a row's values a column is."""
        return self.value(Column(name, self._schema[name]))

    def _test(self, condition: Condition, *, own_row: bool = False) -> Test:
        bit = 0
        if condition.row:
            text = " AND ".join(map(row_text, condition.row))
            if text not in self._bits:
                parts = [to_polars(_named(term, "c"), self._schema) for term in condition.row]
                self._bits[text] = reduce(and_, parts)
            bit = 1 << list(self._bits).index(text)
        rest = None
        reads = {slot for term in condition.rest for name in columns_of(term) if (slot := slot_index(name)) is not None}
        if condition.rest:
            whole = reduce(lambda left, right: Call("and", (left, right), left.type), condition.rest)
            rest = scalar_of(whole, self._source)
        return Test(bit=bit, rest=rest, own_row=own_row, reads=tuple(sorted(reads)))

    def _source(self, name: str) -> Scalar:
        """Where a term finds a column: a slot, or a value of the row."""
        slot = slot_index(name)
        if slot is None:
            at = self.values_of(name)
            return lambda _slots, values: values[at]
        read_slot = self.slots[slot].read

        def read(states: Values, _values: Values) -> Any:
            return read_slot(states[slot])

        return read


def _row_columns(term: Term) -> list[str]:
    known = {column.name for column in SPECIALS.values()}
    return [name for name in columns_of(term) if slot_index(name) is None and name not in known]


def _named(term: Term, name: str) -> Expression:
    return expression_of(term, _NO_TREE, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """One row of output: what is known of `found` at one of its nodes."""

    found: Found
    node: Node


class Output:
    """Makes frames of what was found."""

    def __init__(self, step: p.Match, pattern: Pattern, schema: Schema, forms: RowForms) -> None:
        self._step = step
        self._pattern = pattern
        self._schema = schema
        self._forms = forms
        self._names = [stage.name for stage in step.stages if not stage.negated]
        used = dict.fromkeys(name for measure in pattern.measures for name in columns_of(measure.term))
        self._slots = [index for name in used if (index := slot_index(name)) is not None]
        self._columns = list(dict.fromkeys(name for m in pattern.measures for name in _row_columns(m.term)))
        self._specials = {column.name: column.type for column in SPECIALS.values() if column.name in used}
        types: dict[str, DataType] = {f"{SLOT_PREFIX}{index}": pattern.slots[index].type for index in self._slots}
        types |= {name: schema[name] for name in self._columns} | self._specials
        self._types = Schema(tuple(types.items()))

    def matches(self, keys: pl.DataFrame, found: Sequence[Found]) -> pl.DataFrame:
        """Matches as rows. `keys`: the key of each."""
        if not self._step.all_rows:
            lines = [_Line(found=match, node=match.node) for match in found]
            return self._with_measures(self._keys(keys), lines)
        lines = [_Line(found=match, node=node) for match in found for node in match.node.path()]
        whole = [self._forms.values_of(name) for name in self._schema]
        rows = [
            column_of(name, [line.node.row.values[at] for line in lines], self._schema[name])
            for name, at in zip(self._schema, whole, strict=True)
        ]
        return self._with_measures(rows, lines)

    def timeouts(self, keys: pl.DataFrame, found: Sequence[Found]) -> pl.DataFrame:
        """Beginnings whose time was over as rows."""
        lines = [_Line(found=one, node=one.node) for one in found]
        paths = [line.node.path() for line in lines]
        stages = [", ".join(dict.fromkeys(self._names[node.stage] for node in path)) for path in paths]
        start = column_of(MATCH_START, [path[0].row.time_us for path in paths], TIMESTAMP)
        return self._with_measures([*self._keys(keys), start, pl.Series(STAGES, stages, pl.String)], lines)

    def _keys(self, keys: pl.DataFrame) -> list[pl.Series]:
        return keys.select(self._step.keys).get_columns() if self._step.keys else []

    def _with_measures(self, columns: Sequence[pl.Series], lines: Sequence[_Line]) -> pl.DataFrame:
        found: dict[str, pl.Series] = {}
        for final in (False, True):
            asked = [measure for measure in self._pattern.measures if measure.final == final]
            if asked:
                frame = self._asked([line.found.node if final else line.node for line in lines], lines)
                out = frame.select(to_polars(_named(m.term, m.name), self._types) for m in asked)
                found |= {series.name: series for series in out.get_columns()}
        return pl.DataFrame([*columns, *(found[measure.name] for measure in self._pattern.measures)])

    def _asked(self, nodes: Sequence[Node], lines: Sequence[_Line]) -> pl.DataFrame:
        """What measures are worked out of: a column for each slot, column of a row, and word about the match."""
        columns = []
        for index in self._slots:
            read, slot = self._forms.slots[index].read, self._pattern.slots[index]
            values = [read(node.states[index]) for node in nodes]
            columns.append(column_of(f"{SLOT_PREFIX}{index}", values, slot.type))
        for name in self._columns:
            at = self._forms.values_of(name)
            columns.append(column_of(name, [node.row.values[at] for node in nodes], self._schema[name]))
        said: dict[str, Callable[[_Line, Node], Any]] = {
            NUMBER: lambda line, _: line.found.number or None,
            CLASSIFIER: lambda _, node: self._names[node.stage],
            DECIDED: lambda line, _: line.found.decided_us,
        }
        for name, kind in self._specials.items():
            values = [said[name](line, node) for line, node in zip(lines, nodes, strict=True)]
            columns.append(column_of(name, values, kind))
        return pl.DataFrame(columns) if columns else pl.DataFrame({"__none": [0] * len(nodes)})


def column_of(name: str, values: list[Any], kind: DataType) -> pl.Series:
    """Plain values as a column of their type."""
    plain = pl.Series(name, values, dtype=plain_type(kind), strict=False)
    return plain if kind.name.startswith("interval") or plain.dtype == kind.polars else plain.cast(kind.polars)


def numbered(measures: Sequence[Measure]) -> bool:
    """Whether matches are numbered, so that a number a key is kept."""
    return any(NUMBER in columns_of(measure.term) for measure in measures)
