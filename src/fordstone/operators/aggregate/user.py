"""The seam of users' own aggregates: state columns, and columnar functions of them.

    class WeightedMean(Aggregator):
        state = {"total": "double", "weight": "double"}
        result = "double"

        def add(self, value, weight):
            return {"total": (value * weight).sum(), "weight": weight.sum()}

        def merge(self, total, weight):
            return {"total": total.sum(), "weight": weight.sum()}

        def finish(self, total, weight):
            return total / weight

`agg(mean=WeightedMean.of("temp", "area"))` uses it. The plan says what the state is, and the class is looked up when the first rows
come: where Spark plans, the user's modules may not be found.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import polars as pl

from fordstone.errors import PlanError
from fordstone.lang.aggregates import AggregateCall
from fordstone.lang.schema import DataType
from fordstone.operators.aggregate.part import Part, Values
from fordstone.operators.base import Functions, resolve_function


@dataclass(frozen=True, slots=True)
class AggregatorCall:
    """A use of an aggregator: over expressions, as SQL text or built."""

    aggregator: type[Aggregator]
    arguments: tuple[Any, ...]


class Aggregator(ABC):
    """A mergeable aggregate, written by a user. The class is named by import path in the plan and made without arguments.

    `add`, `merge` and `finish` are called once or a few times per batch, on any thread, with Polars expressions, and give
    Polars expressions: those of `add` and `merge` are evaluated within groups and must give one value per group. What
    they give must be a function of the rows of a group as a multiset: parts made of any of the rows, merged in any
    order, must mean the same. That is what makes results the same on every batch size, parallelism, restart and engine;
    it is not checked.
    """

    state: ClassVar[Mapping[str, str]]
    """The columns that are kept for a group, and their types."""
    init: ClassVar[Mapping[str, Any]] = {}
    """What a state column holds where `add` gives null, such as a sum of nothing. Null where it is not named."""
    result: ClassVar[str]
    """The type of the result."""

    @classmethod
    def of(cls, *arguments: Any) -> AggregatorCall:
        """Use it in `agg(...)`: over columns or expressions, one for each argument of `add`."""
        return AggregatorCall(cls, arguments)

    @abstractmethod
    def add(self, *values: pl.Expr) -> Mapping[str, pl.Expr]:
        """The state of a group of rows: an expression for each state column. `values` are the arguments' values."""

    @abstractmethod
    def merge(self, *state: pl.Expr) -> Mapping[str, pl.Expr]:
        """The state of a group of states: an expression for each state column. `state` is in the order of `cls.state`."""

    @abstractmethod
    def finish(self, *state: pl.Expr) -> pl.Expr:
        """The result of each state. Not in a group."""


@dataclass(frozen=True, slots=True)
class UserPart(Part):
    """The state of one aggregator. Made by `partial` for a call whose function is an import path."""

    path: str
    state: tuple[tuple[str, DataType], ...]
    functions: Functions = field(compare=False, hash=False, repr=False)
    order = 12
    streams = False

    def columns(self, values: Values) -> tuple[str, ...]:
        return tuple(f"__u{values.index}_{self.path}_{name}" for name, _ in self.state)

    def of_rows(self, values: Values, rows: pl.DataFrame) -> list[pl.Expr]:
        if not rows.height:
            return self._nothing(values)
        made = self._checked(self.aggregator().add(*map(pl.col, values.names)), "add")
        return self._named(made, values)

    def merged(self, values: Values, partials: pl.DataFrame) -> list[pl.Expr]:
        if not partials.height:
            return self._nothing(values)
        made = self._checked(self.aggregator().merge(*map(pl.col, self.columns(values))), "merge")
        return self._named(made, values)

    def settle(self, values: Values, made: pl.DataFrame) -> list[pl.Series]:
        """Of the types that the state has, with `init` for null. (Not within the groups: there a list is not one value.)"""
        init = self.aggregator().init if made.height else {}
        found = []
        for (name, kind), column in zip(self.state, self.columns(values), strict=True):
            series = made.get_column(column)
            if init.get(name) is not None and series.null_count():
                series = series.fill_null(init[name])
            found.append(series if series.dtype == kind.polars else series.cast(kind.polars))
        return found

    def result(self, call: AggregateCall, values: Values) -> pl.Expr:
        columns, kind = self.columns(values), call.type.polars

        def finish(state: pl.Series) -> pl.Series:
            frame = state.struct.unnest()
            return frame.select(self.aggregator().finish(*map(pl.col, columns)).cast(kind).alias("__")).to_series()

        return pl.struct(columns).map_batches(finish, return_dtype=kind)

    def aggregator(self) -> Aggregator:
        found = resolve_function(self.path, self.functions)
        if not (isinstance(found, type) and issubclass(found, Aggregator)):
            raise PlanError(f"{self.path} is not a subclass of fordstone.Aggregator.")
        state = tuple((name, DataType.parse(kind)) for name, kind in found.state.items())
        if state != self.state:
            raise PlanError(
                f"{self.path} keeps {_spelt(state)} here, and {_spelt(self.state)} in the plan. Build the plan with the same module."
            )
        return found()

    def _checked(self, made: Mapping[str, pl.Expr], what: str) -> Mapping[str, pl.Expr]:
        wanted = {name for name, _ in self.state}
        if not isinstance(made, Mapping) or set(made) != wanted:
            given = ", ".join(made) if isinstance(made, Mapping) else repr(made)
            raise PlanError(
                f"{self.path}: {what} gives an expression for each column of state ({', '.join(sorted(wanted))}), but gave {given}."
            )
        return made

    def _named(self, made: Mapping[str, pl.Expr], values: Values) -> list[pl.Expr]:
        return [made[name].alias(column) for (name, _), column in zip(self.state, self.columns(values), strict=True)]

    def _nothing(self, values: Values) -> list[pl.Expr]:
        return [
            pl.lit(None, dtype=kind.polars).alias(column)
            for (_, kind), column in zip(self.state, self.columns(values), strict=True)
        ]


def _spelt(state: tuple[tuple[str, DataType], ...]) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in state)
