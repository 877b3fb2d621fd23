"""The tables of lookups with `refresh=`, in a query on Spark.

The process that plans batches reads them again when they are due (`BatchTables`), and keeps what it has read below the checkpoint location. The
work of a batch names the files that its rows are looked up in; tasks read those (`open_table_of`) and nothing else, so a batch that is executed
again finds what it found. What was read during a batch counts from the next one on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final

import polars as pl
from msgspec import structs

from fordstone.connectors.refreshed_table import Content, RefreshedTables
from fordstone.errors import CheckpointError
from fordstone.operators.base import OpenTable, OperatorContext
from fordstone.operators.registry import make_operator
from fordstone.plan import plan as p
from fordstone.planner.check import stream_types
from fordstone.storage.remote import open_remote

if TYPE_CHECKING:
    from fordstone.spark.hosted.plan_batches import Work
    from fordstone.spark.hosted.stages import QuerySetting

_HOME: Final = "fordstone"
_FRAMES_MAX: Final = 8
"""How many tables a process of Spark's keeps in memory."""


class BatchTables:
    """All of one query. Used by the process that plans its batches."""

    def __init__(self, setting: QuerySetting) -> None:
        self._plan = setting.stages.plan
        self._tables = RefreshedTables(partial(open_remote, setting.root), _HOME)
        self._begun = False

    def planned(self, work: Work, *, before_us: int) -> Work:
        """Return the work with the files of its tables. `before_us`: the time of the batch before."""
        if not self._begun:
            # Without the functions of the pipeline, which this process may not find (`sent.Lazy`).
            operators = OperatorContext(plan=self._plan, types=stream_types(self._plan), open_table=self._tables.open)
            for step in refreshed_steps(self._plan):
                make_operator(step, operators)
            self._tables.begin(before_us)
            self._begun = True
        return structs.replace(work, tables=self._tables.paths(work.now_us))

    def refresh(self, now_us: int) -> None:
        """Begin to read the tables that are due."""
        self._tables.refresh(now_us)

    def ack(self, now_us: int) -> None:
        """No batch before that of this time will be executed again."""
        self._tables.ack(now_us)

    def close(self) -> None:
        self._tables.close()


def refreshed_steps(plan: p.Plan) -> list[p.Lookup]:
    """The lookups with `refresh=`."""
    return [step for step in plan.steps if isinstance(step, p.Lookup) and step.refresh_us is not None]


def open_table_of(root: str, tables: Mapping[str, str]) -> OpenTable:
    """What operators of one batch find tables with. `tables`: the file of each step, below the checkpoint location `root`."""

    def open_table(step: p.Lookup, check: Callable[[pl.DataFrame], pl.DataFrame]) -> _BatchTable:
        del check  # it was checked when it was read
        return _BatchTable(root, tables.get(step.name, ""))

    return open_table


@dataclass(frozen=True, slots=True)
class _BatchTable:
    """One table in one batch."""

    root: str
    path: str

    def at(self, now_us: int) -> pl.DataFrame:
        del now_us  # within a batch it is always the same
        return _frame(self.root, self.path)

    def refresh(self, now_us: int) -> None:
        """Tables are read where batches are planned."""

    def due_us(self) -> int | None:
        return None


@lru_cache(maxsize=_FRAMES_MAX)
def _frame(root: str, path: str) -> pl.DataFrame:
    content = Content.named(path.rpartition("/")[2])
    if content is None:
        raise AssertionError(f"the work of a batch names {path!r} for a table")
    try:
        data = open_remote(root).get(path)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{root}/{path} is missing: it has the table that rows of this batch are looked up in. Restore the checkpoint location as a whole, "
            "or begin with a new one."
        ) from error
    return content.decode(data)
