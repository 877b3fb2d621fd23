"""Fordstone: stateful stream processing that reaches from edge devices to Spark.

The public names are loaded when they are first used, so that `fordstone --help` need not wait for them.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from fordstone.log_fields import FieldsHandler

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fordstone.api.column import (
        Column,
        beta_high,
        beta_low,
        beta_mean,
        col,
        collect,
        count,
        count_distinct,
        first,
        fn,
        last,
        lit,
        max_,
        mean,
        median,
        min_,
        quantile,
        stddev,
        sum_,
        variance,
        when,
    )
    from fordstone.api.pattern import Pattern
    from fordstone.api.pipeline import Pipeline
    from fordstone.api.process import Context, KeyedFunction, ListState, MapState, Timer, ValueState
    from fordstone.api.stream import Stream
    from fordstone.api.windows import by_count, session, sliding, tumbling
    from fordstone.errors import FordstoneError
    from fordstone.operators.aggregate.user import Aggregator

_HOMES = {
    "Aggregator": "fordstone.operators.aggregate.user",
    "Column": "fordstone.api.column",
    "Context": "fordstone.api.process",
    "FordstoneError": "fordstone.errors",
    "KeyedFunction": "fordstone.api.process",
    "ListState": "fordstone.api.process",
    "MapState": "fordstone.api.process",
    "Pattern": "fordstone.api.pattern",
    "Pipeline": "fordstone.api.pipeline",
    "Stream": "fordstone.api.stream",
    "Timer": "fordstone.api.process",
    "ValueState": "fordstone.api.process",
    "beta_high": "fordstone.api.column",
    "beta_low": "fordstone.api.column",
    "beta_mean": "fordstone.api.column",
    "by_count": "fordstone.api.windows",
    "col": "fordstone.api.column",
    "collect": "fordstone.api.column",
    "count": "fordstone.api.column",
    "count_distinct": "fordstone.api.column",
    "first": "fordstone.api.column",
    "fn": "fordstone.api.column",
    "last": "fordstone.api.column",
    "lit": "fordstone.api.column",
    "max_": "fordstone.api.column",
    "mean": "fordstone.api.column",
    "median": "fordstone.api.column",
    "min_": "fordstone.api.column",
    "quantile": "fordstone.api.column",
    "session": "fordstone.api.windows",
    "sliding": "fordstone.api.windows",
    "stddev": "fordstone.api.column",
    "sum_": "fordstone.api.column",
    "tumbling": "fordstone.api.windows",
    "variance": "fordstone.api.column",
    "when": "fordstone.api.column",
}

__all__ = [
    "Aggregator",
    "Column",
    "Context",
    "FordstoneError",
    "KeyedFunction",
    "ListState",
    "MapState",
    "Pattern",
    "Pipeline",
    "Stream",
    "Timer",
    "ValueState",
    "__version__",
    "beta_high",
    "beta_low",
    "beta_mean",
    "by_count",
    "col",
    "collect",
    "count",
    "count_distinct",
    "first",
    "fn",
    "last",
    "lit",
    "max_",
    "mean",
    "median",
    "min_",
    "quantile",
    "session",
    "sliding",
    "stddev",
    "sum_",
    "tumbling",
    "variance",
    "when",
]

logging.getLogger("fordstone").addHandler(FieldsHandler())


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fordstone' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
