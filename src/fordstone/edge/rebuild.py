"""Compare an epoch that was computed again with what was sealed (rule 1).

The same means: the same rows in any order; floats within a tolerance, since sums of floats depend on their order (rule 10).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import polars as pl
from polars.testing import assert_frame_equal

from fordstone.checkpoint.store import CheckpointStore
from fordstone.errors import CheckpointError, RebuildError
from fordstone.model.manifest import Cut, Manifest

TOLERANCE: Final = 1e-9


def compare_with_sealed(
    store: CheckpointStore, cut: Cut, sealed: Manifest | None, frames: Mapping[str, Sequence[pl.DataFrame]]
) -> None:
    """Raise `RebuildError` if an epoch came out different. `sealed` is its manifest, if that can still be read."""
    for sink, rows_sealed in cut.segment_rows.items():
        rebuilt = list(frames.get(sink, ()))
        rows = sum(frame.height for frame in rebuilt)
        if rows != rows_sealed:
            raise RebuildError(
                f"epoch {cut.epoch} was sealed with {rows_sealed} rows for sink {sink}, and came out with {rows} when it was "
                "computed again. The input has changed since, or a step is not deterministic. Restore the input, or start "
                "over with an empty state directory."
            )
        runs = [segment.runs for segment in sealed.segments if segment.sink == sink] if sealed is not None else []
        if not runs or not rows:
            continue
        try:
            stored = pl.concat([store.read_run(run) for run in runs[0]])
        except CheckpointError:
            continue
        _same_rows(cut.epoch, sink, stored, pl.concat(rebuilt))


def _same_rows(epoch: int, sink: str, stored: pl.DataFrame, rebuilt: pl.DataFrame) -> None:
    exact = [name for name, kind in stored.schema.items() if not kind.is_float() and not kind.is_nested()]
    floats = [name for name, kind in stored.schema.items() if kind.is_float()]
    columns = [*exact, *floats]
    try:
        assert_frame_equal(
            stored.select(columns).sort(columns),
            rebuilt.select(columns).sort(columns),
            check_exact=False,
            rel_tol=TOLERANCE,
            abs_tol=TOLERANCE,
        )
    except (AssertionError, pl.exceptions.PolarsError) as error:
        raise RebuildError(
            f"epoch {epoch} came out with other rows for sink {sink} when it was computed again: {error}\n"
            "The input has changed since, or a step is not deterministic. Restore the input, or start over with an empty "
            "state directory."
        ) from error
