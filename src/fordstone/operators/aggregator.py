"""The seam of users' own aggregates: state columns, and four columnar functions of them.

    class WeightedMean(Aggregator):
        state = {"total": "double", "weight": "double"}
        result = "double"

        def add(self, value, weight):
            return {"total": (value * weight).sum(), "weight": weight.sum()}

        def merge(self, total, weight):
            return {"total": total.sum(), "weight": weight.sum()}

        def finish(self, total, weight):
            return total / weight

`agg(mean=WeightedMean.of("temp", "area"))` uses it. The state is of plan types, so it is snapshot and shuffled as any other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import polars as pl


@dataclass(frozen=True, slots=True)
class AggregatorCall:
    """A use of an aggregator: over expressions, as SQL text or built."""

    aggregator: type[Aggregator]
    arguments: tuple[Any, ...]


class Aggregator(ABC):
    """A mergeable aggregate, written by a user. The class is named by import path in the plan and made without arguments.

    `add`, `merge` and `finish` are called once or a few times a batch, on any thread, with Polars expressions, and give
    Polars expressions: those of `add` and `merge` are evaluated within groups and must give one value a group. What
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
