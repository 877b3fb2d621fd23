"""The tables of lookups that are read again while a pipeline runs: what they had in them, kept on the node by the time at barriers.

    lookups/<step>-<what is read>/<from>-<rows>-<digest>.arrow

A file is the whole table as the epochs see it that begin at a barrier of time `from` or later. On the edge the time of a barrier is recorded with
its epoch, and on Spark the file with the batch, so that an epoch that is computed again, and all tasks, see the same rows. A table is read on a
thread of its own, and no task waits for it.

Invariants: what `at` has returned for a time it returns for that time from then on, after restarts too; contents are durable before rows are
looked up in them; those that no kept checkpoint needs are removed.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec
import polars as pl

from fordstone.connectors.lookup_table import read_table
from fordstone.epochs.run_file import decode_run, encode_run
from fordstone.errors import FordstoneError, SourceError
from fordstone.lang.schema import Schema
from fordstone.operators.base import RefreshedTable
from fordstone.plan import plan as p
from fordstone.state.base import RunRef
from fordstone.storage.disk import FatalStorageError
from fordstone.storage.remote import Remote

log = logging.getLogger(__name__)

Check = Callable[[pl.DataFrame], pl.DataFrame]
"""Gives rows as they are looked up in, in one order; raises `SourceError` for a table that is none."""
_FRAMES_MAX: Final = 2
"""Subtasks that pass a barrier at different moments ask for two contents in turn."""
_NAME: Final = re.compile(r"(\d{16,19})-(\d+)-([0-9a-f]{64})\.arrow")
_FOLDER: Final = "lookups"


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """A file."""

    from_us: int
    rows: int
    digest: str

    @classmethod
    def named(cls, name: str) -> Content | None:
        """The content of a file; None: the name is not one of ours."""
        found = _NAME.fullmatch(name)
        return found and cls(from_us=int(found[1]), rows=int(found[2]), digest=found[3])

    @property
    def name(self) -> str:
        return f"{self.from_us:016}-{self.rows}-{self.digest}.arrow"

    def decode(self, data: bytes) -> pl.DataFrame:
        return decode_run(data, RunRef(digest=self.digest, size_bytes=len(data), rows=self.rows))


class RefreshedTables:
    """Those of one job, by step. Closed with its engine, or with the planner of its query on Spark."""

    def __init__(self, open_files: Callable[[], Remote], home: str) -> None:
        """`open_files`: gives what stores the files; `home`: the path there."""
        self._open_files = open_files
        self._folder = f"{home}/{_FOLDER}"
        self._tables: dict[str, KeptTable] = {}
        self._mutex = threading.Lock()
        self._live_us: int | None = None

    def open(self, step: p.Lookup, check: Check) -> RefreshedTable:
        """The table of a step, the same one for all its subtasks."""
        with self._mutex:
            if step.name not in self._tables:
                schema = Schema.of(step.schema)
                what = hashlib.sha256(msgspec.json.encode([step.table, step.schema, step.table_keys])).hexdigest()[:16]
                table = KeptTable(
                    step.name,
                    self._open_files(),
                    f"{self._folder}/{step.name}-{what}",
                    lambda: check(read_table(step.table, schema)),
                    every_us=step.refresh_us or 0,
                )
                if self._live_us is not None:
                    table.begin(self._live_us)
                self._tables[step.name] = table
            return self._tables[step.name]

    def begin(self, now_us: int) -> None:
        """From here on tables are read again: recorded epochs, the last of which ended at this time, were computed again before."""
        with self._mutex:
            self._live_us = now_us
            for table in self._tables.values():
                table.begin(now_us)

    def paths(self, now_us: int) -> dict[str, str]:
        """The file of each step at a barrier, and until the next. Reads tables that were never read."""
        return {step: table.path(now_us) for step, table in self._tables.items()}

    def refresh(self, now_us: int) -> None:
        """Begin to read the tables that are due."""
        for table in self._tables.values():
            table.refresh(now_us)

    def ack(self, now_us: int) -> None:
        """No run will start before the barrier of this time."""
        for table in self._tables.values():
            table.ack(now_us)

    def close(self) -> None:
        """A read that is under way changes nothing any more."""
        for table in self._tables.values():
            table.close()


class KeptTable:
    """One table with what was in it. Used by the tasks of its step, and by the thread that reads."""

    def __init__(
        self, step: str, files: Remote, folder: str, read: Callable[[], pl.DataFrame], *, every_us: int
    ) -> None:
        self._step = step
        self._files = files
        self._folder = folder
        self._read = read
        self._every_us = every_us
        self._mutex = threading.RLock()
        self._contents: list[Content] = []
        for content in filter(None, map(Content.named, sorted(files.sizes(folder)))):
            self._append(content)
        self._frames: dict[str, pl.DataFrame] = {}
        """By digest: those that were asked for last."""
        self._asked_us = -1
        self._due_us: int | None = None
        """None: at the next barrier."""
        self._live = self._reading = self._closed = False
        self._problem: str | None = None

    def begin(self, now_us: int) -> None:
        with self._mutex:
            self._live, self._asked_us = True, max(self._asked_us, now_us)

    def at(self, now_us: int) -> pl.DataFrame:
        """The rows at a barrier, and until the next. Reads the table itself if it was never read on this node."""
        with self._mutex:
            content = self._content(now_us)
            if content.digest not in self._frames:
                data = self._files.get(f"{self._folder}/{content.name}")
                if len(self._frames) >= _FRAMES_MAX:
                    self._frames.clear()
                self._frames[content.digest] = content.decode(data)
            return self._frames[content.digest]

    def path(self, now_us: int) -> str:
        """The file with the rows that `at` gives."""
        with self._mutex:
            return f"{self._folder}/{self._content(now_us).name}"

    def refresh(self, now_us: int) -> None:
        """Begin to read the table, if it is due. Called at barriers, by each subtask."""
        with self._mutex:
            if not self._live or self._reading or self._closed:
                return
            if self._due_us is not None and now_us < self._due_us:
                return
            self._reading, self._due_us = True, now_us + self._every_us
        threading.Thread(target=self._read_again, name=f"fordstone-lookup-{self._step}", daemon=True).start()

    def due_us(self) -> int | None:
        with self._mutex:
            return self._due_us if self._live and not self._closed else None

    def ack(self, now_us: int) -> None:
        with self._mutex:
            needed = [one for one in self._contents if one.from_us <= now_us][-1:]
            for content in [one for one in self._contents if needed and one.from_us < needed[0].from_us]:
                self._files.remove(f"{self._folder}/{content.name}")
                self._contents.remove(content)

    def close(self) -> None:
        with self._mutex:
            self._closed = True

    def _content(self, now_us: int) -> Content:
        self._asked_us = max(self._asked_us, now_us)
        if not self._contents:
            # On another machine than before, later ones are not here either: the table is then as it is now.
            self._add(self._read(), from_us=0)
            self._due_us = now_us + self._every_us if now_us else None
        content = next((one for one in reversed(self._contents) if one.from_us <= now_us), None)
        if content is None:
            raise SourceError(
                f"step {self._step}: what its table had in it at an epoch that has to be computed again is gone from {self._folder}. "
                "Restore the state directory as a whole."
            )
        return content

    def _read_again(self) -> None:
        problem: str | None = None
        try:
            frame = self._read()
            with self._mutex:
                if not self._closed:
                    # After all barriers that have asked, so that their answer stays what it was.
                    self._add(frame, from_us=self._asked_us + 1)
        except FatalStorageError:
            raise
        except (FordstoneError, OSError) as error:
            problem = str(error)
            if problem != self._problem:
                log.warning("table of a lookup not read again", extra={"step": self._step, "problem": problem})
        finally:
            with self._mutex:
                self._reading, self._problem = False, problem

    def _add(self, frame: pl.DataFrame, *, from_us: int) -> None:
        """Keep what was read, durably, if it is other than before."""
        ref, data = encode_run(frame, "zstd")
        if self._contents and self._contents[-1].digest == ref.digest:
            return
        content = Content(from_us=from_us, rows=ref.rows, digest=ref.digest)
        self._files.put(f"{self._folder}/{content.name}", bytes(data))
        self._append(content)
        log.info("table of a lookup read", extra={"step": self._step, "rows": ref.rows})

    def _append(self, content: Content) -> None:
        """Nobody has asked for a content that another one follows at the same time."""
        while self._contents and self._contents[-1].from_us >= content.from_us:
            self._files.remove(f"{self._folder}/{self._contents.pop().name}")
        self._contents.append(content)
