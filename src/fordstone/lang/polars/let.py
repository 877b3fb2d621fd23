"""Work out a column once and use it several times within one Polars expression.

Polars evaluates an expression as often as it is mentioned, so nested expressions that mention their argument twice
would cost twice as much at every level. A struct with a field for each value, and a body that reads the fields, is
evaluated once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import polars as pl

_RESULT: Final = "result of let"


def let(body: Callable[..., pl.Expr], **values: pl.Expr) -> pl.Expr:
    """`body` with each value bound to the argument of its name.

    The body may use its arguments, constants and nothing else: inside a nested `let` the outer arguments are not seen,
    so what is needed there is handed on.
    """
    if all(value.meta.is_column() or value.meta.is_literal() for value in values.values()):
        return body(**values)  # nothing to work out
    fields = {name: pl.field(name) for name in values}
    bound = pl.struct(*(value.alias(name) for name, value in values.items()))
    return bound.struct.with_fields(body(**fields).alias(_RESULT)).struct.field(_RESULT)
