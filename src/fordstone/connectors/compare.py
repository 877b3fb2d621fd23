"""Whether two frames have the same rows, when one of them was computed again.

The same means: in any order, repeated rows as often; floats within a tolerance, since sums of floats depend on their
order (rule 10).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import polars as pl

TOLERANCE: Final = 1e-9
_TURN: Final = "__turn"


def same_rows(one: pl.DataFrame, other: pl.DataFrame) -> bool:
    """Whether they differ in nothing but their order, and floats a little."""
    if one.schema != other.schema:
        return False
    return not any(frame.height for frame in difference(one, other))


def difference(
    sealed: pl.DataFrame, replayed: pl.DataFrame, *, ignored: Sequence[str] = ()
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """What is only in `sealed`, and what is only in `replayed`, counting repeated rows; floats may differ a little.

    `ignored`: columns that may differ. Rows that are equal in them too match first.
    """
    every = list(sealed.schema)
    if ignored:
        sealed, replayed = _unmatched(sealed, replayed, every)
    compared = {name: kind for name, kind in sealed.schema.items() if name not in ignored}
    exact = [name for name, kind in compared.items() if not kind.is_float()]
    floats = [name for name, kind in compared.items() if kind.is_float()]
    missing, extra = _unmatched(sealed, replayed, list(compared))
    if not (missing.height and extra.height and exact and floats):
        return missing, extra
    pairs = _turns(missing, exact).join(
        _turns(extra, exact), on=[*exact, _TURN], how="inner", nulls_equal=True, suffix="__again"
    )
    for name in floats:
        left, right = pl.col(name), pl.col(f"{name}__again")
        near = (
            (left - right).abs() <= TOLERANCE * pl.max_horizontal(left.abs(), right.abs(), pl.lit(1.0))
        ) | left.eq_missing(right)
        pairs = pairs.filter(near)
    matched = pairs.select(*exact, _TURN)
    return tuple(  # type: ignore[return-value]  # two of them
        _turns(frame, exact).join(matched, on=[*exact, _TURN], how="anti", nulls_equal=True).select(every)
        for frame in (missing, extra)
    )


def _unmatched(one: pl.DataFrame, other: pl.DataFrame, columns: list[str]) -> tuple[pl.DataFrame, pl.DataFrame]:
    left, right = _turns(one, columns), _turns(other, columns)
    on = [*columns, _TURN]
    return (
        left.join(right, on=on, how="anti", nulls_equal=True).drop(_TURN),
        right.join(left, on=on, how="anti", nulls_equal=True).drop(_TURN),
    )


def _turns(frame: pl.DataFrame, columns: list[str]) -> pl.DataFrame:
    """Number repeated rows, so that each matches only one of its like."""
    floats = [name for name, kind in frame.schema.items() if kind.is_float()]
    ordered = frame.sort(floats) if floats else frame
    return ordered.with_columns(pl.int_range(pl.len()).over(columns).alias(_TURN))
