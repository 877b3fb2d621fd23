"""Decodes runs that a holder of a token has sent (rule 25): a node's rows, control tables, checkpoints at a hub.

A digest proves that bytes arrived as they were sent, not that they are harmless. So sizes are bounded from the metadata before
anything is decoded (`ipc`), Polars validates what is inside buffers (offsets, text, nulls) as it decodes, the columns are compared with
those that are expected, and partial aggregates are checked by their kind. Whatever comes from a hub is decoded here and nowhere else.

Invariant: every failure is a `RejectedRunError` that says what is wrong with the run. No bytes make the process abort, and none
make it allocate more than `decoded_bytes_max` says, and as much again for the copy that is checked. Runs that are held together share
one `DecodeBudget`: a thousand small runs may become a thousand times as much as one, and all of them may be the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

import polars as pl

from fordstone.epochs.ipc import (
    DECODED_BYTES_MAX,
    DECODED_RATIO_MAX,
    FILE_MAGIC,
    IpcError,
    IpcFacts,
    as_binary,
    decoded_bytes_max,
    read_facts,
)
from fordstone.epochs.manifest import Manifest, decode_manifest
from fordstone.errors import RejectedRunError
from fordstone.lang.python_times import parts_of
from fordstone.operators.aggregate.received import partial_problem
from fordstone.state.base import RunRef

MANIFEST_BYTES_MAX: Final = 32 << 20
"""Maximum size of a manifest at a hub: decoded it takes some ten times as much."""
EPOCH_BYTES_FREE: Final = 512 << 20
"""What the rows of one stream in one epoch may always take when they are decoded. A task of a node seals an epoch when it holds
64 MiB of rows for the center."""
STATE_RATIO_MAX: Final = 16
"""How many times the size of its different runs a state may take, if that is more than `DECODED_BYTES_MAX`."""
TEXT_BYTES_FREE: Final = 1 << 20
"""Text of a run that is at most this long is not measured."""
_FAILURES: Final = (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError, ValueError, OverflowError)
_INTEGERS: Final[tuple[pl.DataType, ...]] = (pl.Int8(), pl.Int16(), pl.Int32(), pl.Int64())
_FLOATS: Final[tuple[pl.DataType, ...]] = (pl.Float32(), pl.Float64())
_DAYS_MIN, _DAYS_MAX = -96_465_292, 95_026_236
"""From 1 January of the year -262143 to 31 December 262142, counted from 1970."""
_PER_DAY: Final = {"ms": 86_400_000, "us": 86_400_000_000, "ns": 86_400_000_000_000}
_KINDS: Final = {pl.Decimal: "decimal", pl.Date: "date", pl.Datetime: "time"}
_SHOWN_COLUMNS_MAX: Final = 20
_REASON_CHARS_MAX: Final = 300


class DecodeBudget:
    """What several runs may take together when they are decoded. Used by one thread, for one attempt."""

    def __init__(self, bytes_max: int, what: str) -> None:
        """`what`: what the runs are together, for messages."""
        self.bytes_max = bytes_max
        self.taken = 0
        self._what = what

    @classmethod
    def of_epoch(cls, runs: Iterable[RunRef]) -> DecodeBudget:
        """For the rows of one stream in one epoch of a node. A run that is named twice may become no more for that."""
        bytes_max = min(DECODED_BYTES_MAX, max(EPOCH_BYTES_FREE, _size_bytes(runs) * DECODED_RATIO_MAX))
        return cls(bytes_max, "the rows of its epoch")

    @classmethod
    def of_state(cls, runs: Iterable[RunRef]) -> DecodeBudget:
        """For a state that is held as a whole. It may be as large as the memory of its node, so that only the ratio limits it."""
        return cls(max(DECODED_BYTES_MAX, _size_bytes(runs) * STATE_RATIO_MAX), "its state")

    def take(self, ref: RunRef, size_bytes: int) -> None:
        """Count what a run takes.

        Raises:
            RejectedRunError: It is too much.
        """
        self.taken += size_bytes
        if self.taken > self.bytes_max:
            raise _rejected(
                ref,
                f"is one of those with which {self._what} become more than {self.bytes_max} bytes when they are decoded",
            )


def _size_bytes(runs: Iterable[RunRef]) -> int:
    return sum({run.digest: run.size_bytes for run in runs}.values())


def check_run(data: bytes, ref: RunRef) -> IpcFacts:
    """Check what a run says about itself, before it is decoded. `data` has the digest of `ref`: `HubClient.read_blob` has checked it.

    Raises:
        RejectedRunError: It is not Arrow IPC, has another number of rows than `ref`, or becomes too large.
    """
    try:
        facts = read_facts(data)
    except IpcError as error:
        raise _rejected(ref, str(error)) from error
    if facts.rows != ref.rows:
        raise _rejected(ref, f"has {facts.rows} rows, what names it says {ref.rows}")
    bytes_max = decoded_bytes_max(len(data))
    if facts.decoded_bytes > bytes_max:
        raise _rejected(
            ref, f"has {len(data)} bytes and becomes {facts.decoded_bytes} when it is decoded; {bytes_max} are allowed"
        )
    return facts


def decode_untrusted(
    data: bytes,
    ref: RunRef,
    columns: Mapping[str, pl.DataType | None] | None = None,
    *,
    optional: Collection[str] = (),
    budget: DecodeBudget | None = None,
) -> pl.DataFrame:
    """The rows of a run, all of them valid. `data` has the digest of `ref`, as `HubClient.read_blob` returns it.

    Args:
        data: The bytes.
        ref: What names the run.
        columns: Which columns to decode, in their order; the others are left out. A narrower type is widened. None as a type:
            as it is stored. None: all columns, as they are.
        optional: Those of `columns` that a run may lack.
        budget: What the runs that are held with it may take together.

    Raises:
        RejectedRunError: The run is not what it must be.
    """
    facts = check_run(data, ref)
    if budget is not None:
        budget.take(ref, max(facts.decoded_bytes, len(data)))
    wanted: dict[str, pl.DataType | None] = dict.fromkeys(facts.columns)
    if columns is not None:
        missing = [name for name in columns if name not in wanted and name not in optional]
        if missing:
            has = ", ".join(facts.columns[:_SHOWN_COLUMNS_MAX]) + (
                " ..." if len(facts.columns) > _SHOWN_COLUMNS_MAX else ""
            )
            raise _rejected(ref, f"has no column {', '.join(map(repr, missing))}; it has {has or 'none'}")
        wanted = {name: kind for name, kind in columns.items() if name in wanted}
    try:
        text_bytes = _checked_text(data, ref, facts)
        frame = _decoded(data, list(wanted))
        if budget is not None:
            # Before it is copied: then each view becomes text of its own.
            budget.take(ref, max(0, (_text_bytes(frame) if text_bytes is None else text_bytes) - facts.decoded_bytes))
        if frame.height != ref.rows:
            raise _rejected(ref, f"has {frame.height} rows, what names it says {ref.rows}")
        _check_ranges(frame, ref)
        other = {name: kind for name, kind in wanted.items() if kind is not None and frame.schema[name] != kind}
        unfit = [name for name, kind in other.items() if not _widens(frame.schema[name], kind)]
        if unfit:
            raise _rejected(ref, f"has {frame.schema[unfit[0]]} in {unfit[0]!r}, where {other[unfit[0]]} is expected")
        frame = frame.cast(other) if other else frame  # type: ignore[arg-type]  # names to types, as Polars has them
        problem = partial_problem(frame)
    except _FAILURES as error:
        raise _rejected(ref, f"cannot be decoded: {_reason(error)}") from error
    if problem is not None:
        raise _rejected(ref, problem)
    return frame


def decode_untrusted_manifest(data: bytes, *, pipeline: str, node: str, epoch: int) -> Manifest:
    """A manifest from a hub. The runs that it names are checked when they are fetched.

    Raises:
        RejectedRunError: It is larger than any that a node sends.
        DamagedError: It is not a manifest, or that of something else.
    """
    if len(data) > MANIFEST_BYTES_MAX:
        raise RejectedRunError(
            f"the checkpoint of epoch {epoch} of node {node} is rejected: its manifest has {len(data)} bytes; "
            f"{MANIFEST_BYTES_MAX} are allowed."
        )
    return decode_manifest(data, pipeline=pipeline, node=node, epoch=epoch)


def _decoded(data: bytes, names: list[str]) -> pl.DataFrame:
    """The columns of these names, in this order."""
    if data.startswith(FILE_MAGIC):
        return pl.read_ipc(data, columns=names)
    return pl.read_ipc_stream(data, columns=names)


def _checked_text(data: bytes, ref: RunRef, facts: IpcFacts) -> int | None:
    """Check that views do not show the same bytes too often. Return about how much text there is; None: it was not measured.

    A million views of one megabyte take a terabyte when they are copied, and minutes only to be validated as text. As bytes they
    are decoded quickly, so that their sizes can be added up.
    """
    bytes_max = decoded_bytes_max(len(data))
    if facts.text_bytes_max <= TEXT_BYTES_FREE:
        return facts.text_bytes_max
    if facts.text_bytes_max <= bytes_max:
        return None
    columns = list(dict.fromkeys(name for name, _ in facts.views))
    frame = _decoded(as_binary(data, facts), columns)
    text_bytes = _text_bytes(frame)
    if text_bytes > bytes_max:
        raise _rejected(ref, f"has {len(data)} bytes, and text of {text_bytes} bytes; {bytes_max} are allowed")
    return text_bytes


def _text_bytes(frame: pl.DataFrame) -> int:
    """What all text and all bytes take if each value has its own."""
    parts = [part for column in frame.iter_columns() for part in parts_of(column, pl.String, pl.Binary)]
    sizes = (part.bin.size() if part.dtype == pl.Binary else part.str.len_bytes() for part in parts)
    # In 32 bits, as sizes are, the sum would wrap.
    return sum(int(size.cast(pl.UInt64).sum()) for size in sizes)


def _check_ranges(frame: pl.DataFrame, ref: RunRef) -> None:
    """Check that decimals fit their types, and that dates and times are ones that Polars can show: it panics at others."""
    for column in frame.iter_columns():
        for part in parts_of(column, pl.Decimal, pl.Date, pl.Datetime):
            stored, (least, most) = part.to_physical(), _range_of(part.dtype)
            if not all(least <= int(str(each)) <= most for each in (stored.min(), stored.max()) if each is not None):
                raise _rejected(ref, f"has a {_KINDS[type(part.dtype)]} in {column.name!r} that does not fit its type")


def _range_of(dtype: pl.DataType) -> tuple[int, int]:
    if isinstance(dtype, pl.Decimal):
        return 1 - 10**dtype.precision, 10**dtype.precision - 1
    per_day = _PER_DAY[dtype.time_unit] if isinstance(dtype, pl.Datetime) else 1
    return _DAYS_MIN * per_day, (_DAYS_MAX + 1) * per_day - 1


def _widens(stored: pl.DataType, wanted: pl.DataType) -> bool:
    """Whether every value of the one type is a value of the other, without parsing and rounding."""
    if stored == pl.Null:
        return True
    if isinstance(stored, pl.Decimal) and isinstance(wanted, pl.Decimal):
        return wanted.scale == stored.scale and wanted.precision >= stored.precision
    order = next((kinds for kinds in (_INTEGERS, _FLOATS) if stored in kinds and wanted in kinds), ())
    return bool(order) and order.index(stored) < order.index(wanted)


def _rejected(ref: RunRef, problem: str) -> RejectedRunError:
    return RejectedRunError(f"run {ref.digest[:12]}… is rejected: it {problem}.")


def _reason(error: BaseException) -> str:
    """The first line: Polars adds hints for programmers to some."""
    return str(error).partition("\n")[0].removesuffix(".")[:_REASON_CHARS_MAX] or type(error).__name__
