"""Compare an epoch that was computed again with what was sealed (rule 1).

The same means: the same rows in any order; floats within a tolerance, since sums of floats depend on their order (rule
10). An unaligned epoch had rows in flight that came out later: computed again, it gives those too, and they are what is
left over, to go out with the next epoch.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Final

import polars as pl

from fordstone.checkpoint.store import CheckpointStore
from fordstone.errors import CheckpointError, RebuildError
from fordstone.model.manifest import Cut
from fordstone.operators.operator import OP

log = logging.getLogger(__name__)

TOLERANCE: Final = 1e-9
_TURN: Final = "__turn"

SealedRows = Mapping[str, list[pl.DataFrame] | None]
"""What a sealed epoch let out, by sink; None where that cannot be read any more."""


def read_sealed(store: CheckpointStore, cut: Cut) -> SealedRows:
    """What the epoch let out."""
    found: dict[str, list[pl.DataFrame] | None] = {}
    for segment in cut.segments:
        try:
            found[segment.sink] = [store.read_run(run) for run in segment.runs]
        except CheckpointError as error:
            log.warning(
                "sealed output damaged", extra={"epoch": cut.epoch, "sink": segment.sink, "problem": str(error)}
            )
            found[segment.sink] = None
    return found


def left_over(
    cut: Cut, sink: str, sealed: Sequence[pl.DataFrame] | None, rebuilt: Sequence[pl.DataFrame]
) -> list[pl.DataFrame]:
    """The rows that came out beyond what was sealed; raises `RebuildError` where that may not be."""
    again = pl.concat(rebuilt) if rebuilt else pl.DataFrame()
    rows_sealed = sum(run.rows for segment in cut.segments if segment.sink == sink for run in segment.runs)
    if sealed is None:
        return _left_over_unseen(cut, sink, rows_sealed, again)
    if again.height == 0:
        if rows_sealed:
            raise _mismatch(cut, sink, f"{rows_sealed} rows were sealed, none came out")
        return []
    if OP in again.columns and cut.overtaking:
        # Rows that replace each other by key: those that came out now are newer, and take the place of the sealed ones.
        return [again]
    before = pl.concat(sealed) if sealed else None
    missing, extra = _difference(again.clear() if before is None else before, again)
    if missing.height:
        raise _mismatch(
            cut, sink, f"{missing.height} sealed rows did not come out again, such as {missing.row(0, named=True)}"
        )
    if extra.height and not cut.overtaking:
        raise _mismatch(
            cut, sink, f"{extra.height} rows came out that were not sealed, such as {extra.row(0, named=True)}"
        )
    return [extra] if extra.height else []


def _left_over_unseen(cut: Cut, sink: str, rows_sealed: int, again: pl.DataFrame) -> list[pl.DataFrame]:
    """The same without the sealed rows: an aligned epoch gives them again, and only their number can be compared."""
    if cut.overtaking and rows_sealed:
        raise RebuildError(
            f"epoch {cut.epoch} is sealed and unaligned, and its output for sink {sink} is damaged as well as its checkpoint: what it "
            "let out cannot be known. Bring back the files from a copy, or start over with an empty state directory and new sinks."
        )
    if cut.overtaking:
        return [again] if again.height else []
    if again.height != rows_sealed:
        raise _mismatch(cut, sink, f"{rows_sealed} rows were sealed, {again.height} came out")
    return []


def _difference(sealed: pl.DataFrame, rebuilt: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """What is only in `sealed`, and what is only in `rebuilt`, counting repeated rows; floats may differ a little."""
    every = list(sealed.schema)
    exact = [name for name, kind in sealed.schema.items() if not kind.is_float()]
    floats = [name for name, kind in sealed.schema.items() if kind.is_float()]
    missing, extra = _unmatched(sealed, rebuilt, every)
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


def _mismatch(cut: Cut, sink: str, what: str) -> RebuildError:
    return RebuildError(
        f"epoch {cut.epoch} came out different for sink {sink} when it was computed again: {what}.\n"
        "The input has changed since, or a step is not deterministic. Restore the input, or start over with an empty state "
        "directory and new sinks."
    )
