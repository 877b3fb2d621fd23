"""Compare an epoch that was computed again with what was sealed (rule 1).

The same means: the same rows in any order; floats within a tolerance, since sums of floats depend on their order (rule
10). An unaligned epoch had rows in flight that came out later: computed again, it gives those too, and they are what is
left over, to go out with the next epoch.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import polars as pl

from fordstone.connectors.compare import difference
from fordstone.epochs.manifest import Cut
from fordstone.epochs.store import CheckpointStore
from fordstone.errors import CheckpointError, RebuildError
from fordstone.lang.aggregates import AGGREGATES
from fordstone.lang.schema import DataType, Schema
from fordstone.operators.aggregate.family import aggregates, rows_of
from fordstone.plan import plan as p
from fordstone.plan.stream_type import StreamType
from fordstone.runtime.dead_letters import DEAD_LETTERS

log = logging.getLogger(__name__)


def varying_sinks(plan: p.Plan, types: Mapping[p.Input, StreamType]) -> frozenset[str]:
    """The sinks that a sketch whose estimates depend on the batches has a part in."""
    varying: set[str] = set()
    for step in plan.steps:
        own = isinstance(step, p.Aggregate) and any(
            not AGGREGATES[call.function].repeats
            for aggregate in aggregates(step, rows_of(step, types).schema)
            for call in aggregate.calls
            if call.function in AGGREGATES
        )
        # What a sketch or a list of values looks like depends on the batches, although what is made of it may not.
        own = own or (isinstance(step, p.Combine) and any(map(_varying, Schema.stored(step.schema).values())))
        if own or any(stream.step in varying for stream in step.inputs):
            varying.add(step.name)
    return frozenset(step.name for step in plan.steps if isinstance(step, p.Sink) and step.name in varying)


def _varying(kind: DataType) -> bool:
    return kind.element is not None or kind.name == "binary"


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


def latest_rows(frame: pl.DataFrame, key: tuple[str, ...]) -> pl.DataFrame:
    """The last row of each key; of all, where there is no key."""
    return frame.unique(key, keep="last", maintain_order=True) if key else frame.tail(1)


def left_over(
    cut: Cut,
    sink: str,
    sealed: Sequence[pl.DataFrame] | None,
    rebuilt: Sequence[pl.DataFrame],
    *,
    key: tuple[str, ...] | None = None,
    varies: bool = False,
) -> list[pl.DataFrame]:
    """The rows that came out beyond what was sealed; raises `RebuildError` where that may not be.

    `key`: rows replace each other by it, so only the last of each counts. `varies`: values may be others within what is
    promised (`varying_sinks`), so that only the number of rows can be compared.
    """
    again = pl.concat(rebuilt) if rebuilt else pl.DataFrame()
    if key is not None and again.height:
        again = latest_rows(again, key)
    rows_sealed = sum(run.rows for segment in cut.segments if segment.sink == sink for run in segment.runs)
    if sealed is None or varies:
        return _left_over_unseen(cut, sink, rows_sealed, again)
    if again.height == 0:
        if rows_sealed:
            raise _mismatch(cut, sink, f"{rows_sealed} rows were sealed, none came out")
        return []
    before = pl.concat(sealed) if sealed else None
    if key is not None and cut.overtaking:
        # Rows that are not as they were sealed are newer: a later epoch has sealed them, or they go out with the next.
        newer = again if before is None else difference(before, again)[1]
        return [newer] if newer.height else []
    if sink.startswith(DEAD_LETTERS):
        # Where a row without a time stood is known only as nearly as the read that brought it.
        again = again.drop("position")
        before = None if before is None else before.drop("position")
    missing, extra = difference(again.clear() if before is None else before, again)
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


def _mismatch(cut: Cut, sink: str, what: str) -> RebuildError:
    return RebuildError(
        f"epoch {cut.epoch} came out different for sink {sink} when it was computed again: {what}.\n"
        "The input has changed since, or a step is not deterministic. Restore the input, or start over with an empty state "
        "directory and new sinks."
    )
