"""Fordstone: stateful stream processing that reaches from edge devices to Spark.

The public names are loaded when they are first used, so that `fordstone --help` need not wait for them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fordstone.api.column import Column, col, count, fn, lit, max_, mean, min_, sum_, when
    from fordstone.api.pipeline import Pipeline
    from fordstone.api.stream import Stream
    from fordstone.api.window import tumbling
    from fordstone.errors import FordstoneError

_HOMES = {
    "Column": "fordstone.api.column",
    "FordstoneError": "fordstone.errors",
    "Pipeline": "fordstone.api.pipeline",
    "Stream": "fordstone.api.stream",
    "col": "fordstone.api.column",
    "count": "fordstone.api.column",
    "fn": "fordstone.api.column",
    "lit": "fordstone.api.column",
    "max_": "fordstone.api.column",
    "mean": "fordstone.api.column",
    "min_": "fordstone.api.column",
    "sum_": "fordstone.api.column",
    "tumbling": "fordstone.api.window",
    "when": "fordstone.api.column",
}

__all__ = [
    "Column",
    "FordstoneError",
    "Pipeline",
    "Stream",
    "__version__",
    "col",
    "count",
    "fn",
    "lit",
    "max_",
    "mean",
    "min_",
    "sum_",
    "tumbling",
    "when",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fordstone' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
