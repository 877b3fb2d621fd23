"""Make the output of a micro-batch visible, once, and record the positions of its sources.

Tasks write parts for sinks that take them; the other rows, and the facts, come to the driver. What Spark wrote is synced
(`spark_files`), the output is recorded (`checkpoint.QueryFiles`), then each sink releases it, then the cut is written. If Spark
executes a batch again, it must be the recorded one (rule 23). The recorded output is released, unless all sinks have it.

Invariants: a batch is executed once, by one action, and always executed (Spark's state is broken by a batch that is
skipped unexecuted); an epoch is sealed when its batch and Spark's state after it are durable; no sink is released before all tasks
are done and the epoch is sealed; the cut is written after the sinks.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import msgspec
import polars as pl
import pyarrow as pa

from fordstone.connectors.base import Part, PartedSink, PartWriter, Sink, SinkStream
from fordstone.connectors.registry import open_parts, open_sink
from fordstone.epochs.manifest import Cut
from fordstone.errors import DamagedError, PlanMismatchError, SinkError
from fordstone.operators.base import OP, ROW_ID
from fordstone.operators.dead_letter import DEAD_LETTERS
from fordstone.plan import plan as p
from fordstone.plan.stream_type import StreamType
from fordstone.protocol.claim import SinkWriter
from fordstone.spark.hosted.checkpoint import DriverMark, EpochRecord, QueryFiles, SealedEpoch
from fordstone.spark.hosted.packing import Packed, What, decode, freeze_gc, int_array, record_batch
from fordstone.spark.hosted.plan_batches import TaskFacts, Work, cut_after
from fordstone.spark.hosted.sent import PACKED
from fordstone.spark.hosted.spark_files import spark_files
from fordstone.storage.failpoint import Failpoints, NoFailpoints

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from fordstone.spark.hosted.connector_sources import ConnectorWork

log = logging.getLogger(__name__)

PART_BYTES_MAX: Final = 128 * 1024 * 1024
PARTS_MAX: Final = 10_000
"""Parts of one try at a task are numbered from the try's own number times this."""
RESULTS_SETTING: Final = "spark.driver.maxResultSize"
"""Bounds what comes to the driver (see `session.settings`). Spark aborts a job that would exceed it, before it gathers the rest."""
_RESULTS_TOO_LARGE: Final = re.compile(
    r"Total size of serialized results of \d+ tasks \(([^)]*)\) is bigger than spark\.driver\.maxResultSize \(([^)]*)\)"
)


@dataclass(frozen=True, kw_only=True)
class SinkSpec:
    """A sink as tasks know it."""

    connector: p.ConnectorSpec
    stream: SinkStream
    hidden: tuple[str, ...] = ()
    """Columns that rows carry beside those of the schema."""
    parted: bool = True
    """Whether tasks may write parts, if the sink takes them."""

    def empty(self) -> pl.DataFrame:
        return self.stream.schema.empty().with_columns(pl.lit(None, pl.String).alias(name) for name in self.hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOutcome:
    """What a batch did, for progress displays."""

    epoch: int
    cut: Cut
    rows_in: int = 0
    rows_out: int = 0
    rows_late: int = 0
    late_by_us: int = 0
    """By how much they were too late, at most."""
    rows_rejected: int = 0
    rows_failed: int = 0
    state_bytes: int = 0
    written_bytes: int = 0


OnBatch = Callable[[BatchOutcome], None]


def sink_specs(plan: p.Plan, types: Mapping[p.Input, StreamType], *, writer: SinkWriter) -> dict[str, SinkSpec]:
    """The sinks of a plan by name. `writer`: this start of the driver, with the owner of the checkpoint location."""
    return {
        step.name: SinkSpec(
            connector=step.connector,
            stream=SinkStream(
                step=step.name,
                schema=types[step.input].schema,
                upsert_key=types[step.input].upsert_key,
                pipeline=writer.pipeline,
                node=writer.node,
                owner=writer.holder,
                start=writer.start,
                generation=writer.fence,
            ),
            hidden=(OP,)
            if types[step.input].upsert_key is not None
            else (ROW_ID,)
            if step.release == "at_once"
            else (),
        )
        for step in plan.steps
        if isinstance(step, p.Sink)
    }


class PartTask:
    """Runs in tasks: writes the parts of those sinks that take parts, and passes everything else on."""

    def __init__(self, sinks: Sequence[SinkSpec], epoch: int, attempt: str) -> None:
        self._sinks = sinks
        self._epoch = epoch
        self._attempt = attempt

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext  # noqa: PLC0415 - only tasks have one

        context = TaskContext.get()
        # Of this try alone: another try at the same task, here or elsewhere, must not overwrite the parts of this one.
        self._next = (context.taskAttemptId() if context is not None else 0) * PARTS_MAX
        self._writers: dict[int, PartWriter | None] = {}
        held: dict[int, list[pl.DataFrame]] = {}
        sizes: dict[int, int] = {}
        for batch in batches:
            kept = []
            for index, (what, tag) in enumerate(zip(batch["what"].to_pylist(), batch["tag"].to_pylist(), strict=True)):
                if what != What.OUT or self._writer(tag) is None:
                    kept.append(index)
                    continue
                data = batch["data"][index].as_py()
                held.setdefault(tag, []).append(decode(data))
                sizes[tag] = sizes.get(tag, 0) + len(data)
                if sizes[tag] >= PART_BYTES_MAX:
                    yield self._part(tag, held.pop(tag))
                    sizes[tag] = 0
            if kept:
                yield batch.take(int_array(kept))
        for tag, frames in held.items():
            yield self._part(tag, frames)
        freeze_gc()

    def _writer(self, tag: int) -> PartWriter | None:
        if tag not in self._writers:
            sink = self._sinks[tag]
            self._writers[tag] = open_parts(sink.connector, sink.stream) if sink.parted else None
        return self._writers[tag]

    def _part(self, tag: int, frames: Sequence[pl.DataFrame]) -> pa.RecordBatch:
        writer = self._writers[tag]
        if writer is None:
            raise AssertionError("rows were held for a sink that takes no parts")
        part = writer.write(self._epoch, self._attempt, self._next, pl.concat(frames))
        self._next += 1
        return record_batch([Packed(0, What.PART, tag, msgspec.json.encode(part))], keys=[0])


class Committer:
    """Spark's `foreachBatch` function of a hosted query, on the driver.

    Sent to another process, as Spark Connect does, it opens its sinks there and reports no outcomes.
    """

    def __init__(
        self,
        *,
        first_epoch: int,
        specs: Sequence[SinkSpec],
        files: QueryFiles,
        seed_cut: Cut | None = None,
        lateness_us: Mapping[str, int],
        on_batch: OnBatch,
        driver: DriverMark | None = None,
        failpoints: Failpoints | None = None,
        discard_later: bool = False,
        connectors: ConnectorWork | None = None,
    ) -> None:
        """`specs` by tag; the sinks are opened here, so that errors show before the query starts. `first_epoch` is that of batch 0.

        `driver`: seal only while the location has the mark of this driver. None: the location is locked.
        `discard_later`: set aside the epochs that sinks have beyond the newest sealed one. `connectors`: of a query whose sources
        connectors of Spark's read, what its batches do.
        """
        self.first_epoch = first_epoch
        self.files = files
        self._specs = tuple(specs)
        self._seed_cut = seed_cut
        self._lateness_us = dict(lateness_us)
        self._on_batch: OnBatch | None = on_batch
        self._driver = driver
        self._failpoints = failpoints or NoFailpoints()
        self._discard_later = discard_later
        self._connectors = connectors
        self._sinks = self._opened()
        self._spark_files = spark_files(files.root)

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        self.run(batch, self.first_epoch + batch_id)

    def run(self, batch: DataFrame, epoch: int) -> None:
        """Execute the batch, seal its epoch, release it, keep its cut."""
        attempt = uuid.uuid4().hex
        task = PartTask(self._written(), epoch, attempt)
        work = None if self._connectors is None else self._connectors.begin(epoch)
        try:
            rows = batch.mapInArrow(task, PACKED).toArrow().to_pylist()
        except Exception as error:
            if (found := _RESULTS_TOO_LARGE.search(str(error))) is None:
                raise
            raise self._too_large(epoch, found) from error
        self._failpoints.hit("batch.executed")
        facts = [msgspec.json.decode(row["data"], type=TaskFacts) for row in rows if row["what"] == What.FACTS]
        if self._connectors is not None:
            self._connectors.executed()
        if self._driver is not None:
            self.files.check_driver(self._driver)
        if self._spark_files is not None:
            self._spark_files.sync()
        record = self._record(epoch, facts, work)
        sealed = self.seal(epoch, attempt, rows, record)
        if sealed is not None:
            self.finish(sealed)
        self._failpoints.hit("batch.kept")
        if self._connectors is not None:
            self._connectors.finished(record.cut)
        if self._on_batch is None:
            return
        partitions = [fact for task in facts for fact in task.partitions]
        self._on_batch(
            BatchOutcome(
                epoch=epoch,
                cut=record.cut,
                rows_in=sum(fact.rows for fact in partitions),
                rows_out=0 if sealed is None else sealed.rows_out,
                rows_late=sum(task.rows_late for task in facts),
                late_by_us=max((task.late_by_us for task in facts), default=0),
                rows_rejected=sum(fact.rejected for fact in partitions),
                rows_failed=sum(task.rows_failed for task in facts),
                state_bytes=sum(task.state_bytes for task in facts),
                written_bytes=sum(task.written_bytes for task in facts),
            )
        )

    def seal(
        self, epoch: int, attempt: str, rows: Sequence[Mapping[str, Any]], record: EpochRecord
    ) -> SealedEpoch | None:
        """Record what the tasks of this try gave. If an earlier try is recorded, that one counts; None: all sinks have it.

        Raises `DamagedError` if the recorded batch is another than the one that was executed.
        """
        released, known = self.files.released(epoch), self.files.sealed(epoch)
        if released is not None:
            self._check_same(epoch, released, record)
            log.warning("epoch executed again for Spark's state", extra={"epoch": epoch})
            return None
        if known is not None:
            self._check_same(epoch, known.record, record)
            return known
        parts: dict[str, tuple[Part, ...]] = {}
        frames: dict[str, pl.DataFrame] = {}
        for tag, spec in enumerate(self._specs):
            mine = [row for row in rows if row["tag"] == tag]
            written = tuple(msgspec.json.decode(row["data"], type=Part) for row in mine if row["what"] == What.PART)
            held = [decode(row["data"]) for row in mine if row["what"] == What.OUT]
            parts |= {spec.stream.step: written} if written else {}
            frames |= {spec.stream.step: pl.concat(held)} if held else {}
        counts = {sink: frame.height for sink, frame in frames.items()}
        sealed = SealedEpoch(epoch=epoch, attempt=attempt, parts=parts, rows=counts, record=record)
        self.files.seal(sealed, frames)
        self._failpoints.hit("batch.sealed")
        return sealed

    def finish(self, sealed: SealedEpoch) -> None:
        """Release a sealed epoch at every sink, where those that have it already leave it, and write its cut."""
        self._check_plan(sealed)
        for spec, sink in zip(self._specs, self._sinks, strict=True):
            name = spec.stream.step
            if isinstance(sink, PartedSink) and name not in sealed.rows:
                sink.release_parts(sealed.epoch, sealed.attempt, sealed.parts.get(name, ()))
            else:
                kept = [self.files.sealed_rows(sealed, name)] if name in sealed.rows else []
                sink.release(sealed.epoch, pl.concat([spec.empty(), *kept]))
            self._failpoints.hit("sink.released")
        self._failpoints.hit("batch.released")
        self.files.write_released(sealed.record)

    def release_seed(self, epoch: int, frames: Mapping[str, Sequence[pl.DataFrame]]) -> None:
        """Release what the checkpoint that the query begins from had sealed, in case its process died before it did."""
        for spec, sink in zip(self._specs, self._sinks, strict=True):
            if spec.stream.step in frames:
                sink.release(epoch, pl.concat([spec.empty(), *frames[spec.stream.step]]))

    def close(self) -> None:
        """Close the sinks. Called when the query has ended."""
        with ExitStack() as closing:
            for sink in self._sinks:
                closing.callback(sink.close)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {
            "_on_batch": None,
            "_failpoints": NoFailpoints(),
            "_sinks": (),
            "_spark_files": None,
            "_connectors": None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._sinks = self._opened()
        self._spark_files = spark_files(self.files.root)

    def _opened(self) -> tuple[Sink, ...]:
        newest = self.files.newest_sealed()
        attempt, epoch = (None, self.first_epoch - 1) if newest is None else (newest.attempt, newest.epoch)
        return tuple(
            open_sink(
                spec.connector,
                replace(
                    spec.stream,
                    sealed=attempt,
                    resumes_after=epoch if spec.stream.owner else None,
                    discard_later=self._discard_later,
                ),
            )
            for spec in self._specs
        )

    def _written(self) -> list[SinkSpec]:
        """The sinks as the tasks of the next batch write them. Decided here, so that all tasks do the same."""
        return [
            replace(spec, parted=spec.parted and isinstance(sink, PartedSink) and sink.takes_parts())
            for spec, sink in zip(self._specs, self._sinks, strict=True)
        ]

    def _check_plan(self, sealed: SealedEpoch) -> None:
        """Refuse to release what was sealed for sinks that no longer exist, or that have other columns now."""
        columns = {spec.stream.step: spec.empty().schema for spec in self._specs}
        gone = sorted({*sealed.parts, *sealed.rows} - columns.keys())
        changed = [
            name
            for name in sealed.rows
            if name in columns and self.files.sealed_rows(sealed, name).schema != columns[name]
        ]
        if gone or changed:
            what = (
                f"sink {gone[0]}, which the plan no longer has"
                if gone
                else f"sink {changed[0]}, whose columns are others now"
            )
            raise PlanMismatchError(
                f"epoch {sealed.epoch} is sealed, but not all of it has been released: it has rows for {what}. "
                "Run the plan as it was once more (--available-now), then change it."
            )

    def _check_same(self, epoch: int, known: EpochRecord, executed: EpochRecord) -> None:
        """Refuse to count a batch under the record of another one: the next batch would read some rows twice, or never."""
        if known == executed:
            return
        what = "the batch that Spark executed" if known.work != executed.work else "what that batch found in its input"
        batch = epoch - self.first_epoch
        raise DamagedError(
            f"epoch {epoch} is sealed in {self.files.root}, but {what} is not what its record says. Nothing was released. If the input "
            f"has changed, restore it. Else Spark's logs are those of another time: set aside offsets/{batch} and commits/{batch} and "
            "those after them, and start again, or restore the checkpoint location as a whole."
        )

    def _too_large(self, epoch: int, found: re.Match[str]) -> SinkError:
        gathered = [spec.stream.step for spec in self._written() if not spec.parted]
        names = ", ".join(re.sub(f"^{re.escape(DEAD_LETTERS)}", "dead letters of ", name) for name in gathered)
        return SinkError(
            f"epoch {epoch}: the output that goes through the driver has {found[1]} or more, and at most {found[2]} may "
            f"({RESULTS_SETTING}). Through the driver go the rows of: {names}. Nothing was released. Give the driver more memory "
            f"and set {RESULTS_SETTING} (--conf) to a larger value. Of batches that have not started yet, --rows-max (rows_max=) makes "
            "smaller ones. Or write to files in a directory (format='parquet'), which tasks write: of upserts they are a changelog."
        )

    def _record(self, epoch: int, facts: Sequence[TaskFacts], given: Work | None) -> EpochRecord:
        """`given`: the work of the batch, where it was given to its tasks and does not come from one of them."""
        works: list[Work] = [task.work for task in facts if task.work is not None] if given is None else [given]
        if len(works) != 1 or works[0].epoch != epoch:
            epochs = ", ".join(str(work.epoch) for work in works) or "none"
            raise DamagedError(
                f"Spark's batch for epoch {epoch} contains the plan of another epoch ({epochs}): the checkpoint location is mixed with "
                "that of another query. Restore it from a copy."
            )
        before = self._seed_cut if epoch == self.first_epoch else self.files.cut(epoch - 1)
        partitions = [fact for task in facts for fact in task.partitions]
        if self._connectors is not None:
            partitions = self._connectors.facts(works[0], partitions)
        return EpochRecord(work=works[0], cut=cut_after(before, works[0], partitions, self._lateness_us))
