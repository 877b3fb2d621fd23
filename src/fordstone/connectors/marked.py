"""A sink over a system with transactions: exactly once, and closed to writers that were replaced. All but the transaction itself is done here.

With the rows of an epoch the system keeps a *mark*: the number of the newest epoch, and who may write (rule 18). Each release reads the mark in its
transaction, so an epoch that is there is not added again, and of two writers only one can commit.
"""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager
from typing import Final

import msgspec
import polars as pl

from fordstone.connectors.base import Sink, SinkStream, judge_claim, later_output, owned_by_newer
from fordstone.connectors.files.rows import OP
from fordstone.connectors.released_rows import ID
from fordstone.protocol.claim import SinkWriter

HIDDEN: Final = (ID, OP)
"""Columns after those of the schema: the id of a row that is released at once, and what an upsert does to its key. Null where there is none."""


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """What the system keeps of a sink."""

    epoch: int = 0
    writer: SinkWriter = SinkWriter()


class MarkedSink(Sink):
    """Adds the rows of an epoch, and its number, in one transaction.

    A kind that opens such sinks declares `EXACTLY_ONCE`, and that it `fences`. An error in a transaction stops the pipeline; raise `SinkDelayedError`
    where waiting may help.
    """

    def __init__(self, stream: SinkStream, *, where: str) -> None:
        """Take the sink over from earlier writers. Call it when transactions are possible. `where` names the target in errors."""
        self.stream = stream
        self._where = where
        with self.transaction():
            mark = self._mark()
            if stream.owner:
                found = [mark.writer] if mark.writer.holder else []
                judge_claim(where, stream, found, lambda: self._check_later(mark))
            self._check_later(mark)
            epoch = mark.epoch
            if stream.resumes_after is not None and epoch > stream.resumes_after:
                epoch = stream.resumes_after
                self.remove_after(epoch)
            self.store_mark(msgspec.json.encode(Mark(epoch=epoch, writer=stream.writer)))

    @abstractmethod
    def transaction(self) -> AbstractContextManager[object]:
        """Begin a transaction in which no other one can change the mark; commit it durably at the end, or undo it all if something is raised."""

    @abstractmethod
    def load_mark(self) -> bytes | None:
        """Return the mark as it was stored last; None: never. Called in a transaction, as all that follow."""

    @abstractmethod
    def store_mark(self, mark: bytes) -> None:
        """Replace the mark of this sink."""

    @abstractmethod
    def add(self, frame: pl.DataFrame, epoch: int | None) -> None:
        """Add rows, which have the columns of the schema and then `HIDDEN`. Without an epoch they are released at once."""

    @abstractmethod
    def remove_after(self, epoch: int) -> None:
        """Remove, or set aside, the rows of later epochs than this one. Called only if the user asks for it (`--discard-later-output`)."""

    def release(self, epoch: int, frame: pl.DataFrame) -> None:
        with self.transaction():
            mark = self._checked()
            if mark.epoch < epoch:
                self.add(self._whole(frame), epoch)
                self.store_mark(msgspec.json.encode(Mark(epoch=epoch, writer=mark.writer)))

    def write(self, frame: pl.DataFrame) -> None:
        with self.transaction():
            self._checked()
            self.add(self._whole(frame), None)

    def _mark(self) -> Mark:
        found = self.load_mark()
        return Mark() if found is None else msgspec.json.decode(found, type=Mark)

    def _checked(self) -> Mark:
        """The mark; raise if another writer has taken over."""
        mark = self._mark()
        if self.stream.owner and mark.writer != self.stream.writer:
            raise owned_by_newer(self._where, self.stream, mark.writer)
        return mark

    def _check_later(self, mark: Mark) -> None:
        """Epochs that the writer's state does not have would be there twice."""
        known = self.stream.resumes_after
        if known is not None and mark.epoch > known and not self.stream.discard_later:
            raise later_output(self._where, self.stream, range(known + 1, mark.epoch + 1))

    def _whole(self, frame: pl.DataFrame) -> pl.DataFrame:
        missing = [pl.lit(None, dtype=pl.String).alias(name) for name in HIDDEN if name not in frame.columns]
        return frame.with_columns(missing).select(*self.stream.schema, *HIDDEN)
