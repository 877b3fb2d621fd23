"""Reading the epochs of one node, and how far its time has come behind them. `hub_epochs` says what there is, and gets the rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol, TypeVar

import polars as pl

from fordstone.connectors.base import Chunk, Reader
from fordstone.errors import HubAwayError, SourceError
from fordstone.hub.messages import ENDED_US, StreamEpoch
from fordstone.lang.duration import TIME_MIN_US
from fordstone.lang.schema import Schema
from fordstone.plan.ids import Position

log = logging.getLogger(__name__)

LATE: Final = "__late"
"""The column in which rows that cross say whether they were late at the edge."""
MAX_AHEAD_US: Final = 3_600_000_000
"""No node's time is further ahead of the hub's clock than this."""
_ORDINAL_BITS: Final = 31
T = TypeVar("T")


class Epochs(Protocol):
    """What is needed of `hub_epochs.HubSource`."""

    schema: Schema
    bounded: bool

    @property
    def title(self) -> str:
        """As messages name it."""
        ...

    def now(self, node: str, position: int, rows_max: int) -> list[StreamEpoch]:
        """The next epochs that can be read now."""
        ...

    def promised(self, node: str, position: int, rows_max: int, until: int) -> list[StreamEpoch]:
        """The next epochs up to `until`, which were there when the read was planned."""
        ...

    def ends_at(self, node: str, position: int) -> bool:
        """Whether bounded input has ended there."""
        ...

    def rows_of(self, entries: Sequence[StreamEpoch]) -> Iterator[tuple[StreamEpoch, pl.DataFrame]]:
        """The runs of epochs, in order."""
        ...

    def patiently(self, work: Callable[[], T]) -> T:
        """Do what was promised to be possible."""
        ...

    def be_quiet(self) -> None:
        """Ask for no more blobs for a while."""
        ...

    def reader_closed(self) -> None:
        """A reader is no longer used."""
        ...


class HubReader(Reader):
    """Reads the epochs of one node."""

    def __init__(self, source: Epochs, node: str, position: int, *, with_positions: bool) -> None:
        self._source: Epochs | None = source
        self._node = node
        self._position = position
        self._with_positions = with_positions

    def read(self, rows_max: int, until: Position | None = None) -> Chunk | None:
        """Whole epochs: small ones together up to `rows_max` rows, a large one alone."""
        source, rows_max = self._source, max(1, rows_max)
        if source is None:
            raise AssertionError("a closed reader was asked to read")
        if until is not None:
            if self._position >= until:
                return None
            wanted = int(until)
            return source.patiently(
                lambda: self._chunk(source, source.promised(self._node, self._position, rows_max, wanted))
            )
        entries = source.now(self._node, self._position, rows_max)
        if entries:
            try:
                return self._chunk(source, entries)
            except HubAwayError:
                source.be_quiet()
                return None
        if source.ends_at(self._node, self._position):
            return Chunk(frame=source.schema.empty(), position=Position(self._position), ended=True)
        return None

    def close(self) -> None:
        """Nothing is held but the source."""
        if self._source is not None:
            self._source.reader_closed()
        self._source = None

    def _chunk(self, source: Epochs, entries: Sequence[StreamEpoch]) -> Chunk:
        self._check_gap(source, entries)
        frames: list[pl.DataFrame] = []
        late: list[pl.Series] = []
        places: list[pl.Series] = []
        first = 0
        for entry, rows in source.rows_of(entries):
            frames.append(rows.select(list(source.schema)))
            late.append(_late_of(rows))
            first = max(first, entry.epoch << _ORDINAL_BITS)
            places.append(pl.int_range(first, first + rows.height, eager=True))
            first += rows.height
        # Behind everything that can fail: a read that failed may be made again.
        self._position = entries[-1].epoch
        marked = pl.concat([pl.Series(dtype=pl.Boolean), *late])
        return Chunk(
            frame=pl.concat([source.schema.empty(), *frames]),
            position=Position(self._position),
            row_positions=pl.concat([pl.Series(dtype=pl.Int64), *places]) if self._with_positions else None,
            ended=source.ends_at(self._node, self._position),
            watermark_us=max(declared_us(entry, bounded=source.bounded) for entry in entries),
            late=marked if marked.any() else None,
        )

    def _check_gap(self, source: Epochs, entries: Sequence[StreamEpoch]) -> None:
        first = entries[0].epoch if entries else None
        if first == self._position + 1:
            return
        if first is not None and self._position == 0:
            # A stream may have begun with a later epoch; or this is a center without state behind one that had read them.
            log.warning("stream begins late", extra={"stream": source.title, "node": self._node, "epoch": first})
            return
        raise SourceError(
            f"{source.title}: of node {self._node} epoch {self._position + 1} is to be read, and the hub no longer has it"
            + ("." if first is None else f": it goes on with {first}.")
            + " Another reader with the same consumer name may have let it go. Restore the hub's data, or begin anew with another "
            "state directory."
        )


def declared_us(entry: StreamEpoch, *, bounded: bool) -> int:
    """How far the node's time has come, as far as the hub's clock believes it (rule 7).

    Where input goes on, the end of a node is not the end of time: it rests, and others may join (`HubSource.outlook`).
    """
    if entry.watermark_us == ENDED_US:
        return ENDED_US if bounded else TIME_MIN_US
    if entry.watermark_us == TIME_MIN_US:
        return TIME_MIN_US
    return min(entry.watermark_us, entry.received_us + MAX_AHEAD_US)


def _late_of(rows: pl.DataFrame) -> pl.Series:
    if LATE not in rows.columns:
        return pl.repeat(value=False, n=rows.height, eager=True)
    return rows.get_column(LATE).fill_null(value=False).rename("")
