"""What beside a step itself decides how its operator is made."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from fordstone.errors import PlanError
from fordstone.model import plan as p
from fordstone.model.schema import Schema
from fordstone.model.stream_type import StreamType

Functions = Mapping[str, Callable[..., Any]]
ReadTable = Callable[[p.ConnectorSpec, Schema], pl.DataFrame]
"""Gives all rows that a connector has, as bounded input."""


def no_tables(spec: p.ConnectorSpec, schema: Schema) -> pl.DataFrame:
    """For those who look at operators and never run them."""
    raise PlanError(f"nothing here can read {spec.kind} with columns {', '.join(schema)}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSetting:
    """What beside the step itself decides how it runs."""

    plan: p.Plan
    types: Mapping[p.Input, StreamType]
    functions: Functions = field(default_factory=dict)
    read_table: ReadTable = no_tables
    """How lookups read their tables: connectors stand above operators, so whoever runs the steps says it."""
    with_ids: frozenset[str] = frozenset()
    """Steps whose rows must carry ids, because a sink releases them at once."""


def resolve_function(path: str, known: Functions) -> Callable[..., Any]:
    """The function of that path: as this process knows it, or imported."""
    if path in known:
        return known[path]
    if path.startswith(p.LOCAL_FUNCTION):
        raise PlanError(
            f"function {path.split(':')[1]} was written in place (a lambda, or inside another function or the main script), "
            "so only the process that built the pipeline has it. Move it to the top level of a module to deploy it."
        )
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise PlanError(
            f"function {path} cannot be imported: {error}. Put its module on the path of this process."
        ) from error
    if not callable(found):
        raise PlanError(f"{path} is not a function.")
    return found  # type: ignore[no-any-return]  # callable, checked above
