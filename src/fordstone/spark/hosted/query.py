"""Build a query that is ready to be started: identity checked, sinks open, stages laid out; as a stream or as a batch job.

Also prepares the plan for Spark's workers: local paths become absolute, because workers have other working directories, and
rows in this process's memory are written to files (bounded runs only), one file per partition.
"""

from __future__ import annotations

import shutil
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final
from uuid import uuid4

import msgspec
import polars as pl
import pyarrow as pa

from fordstone.connectors import files
from fordstone.connectors.base import (
    ALL_ROWS,
    Capability,
    SinkStream,
    Source,
    SourceOptions,
    SourceTrouble,
    close_sources,
)
from fordstone.connectors.files.settings import dead_letter_files
from fordstone.connectors.registry import capabilities, open_source
from fordstone.errors import CheckpointError, ConfigError, FordstoneError
from fordstone.lang.duration import positive_us
from fordstone.lang.schema import Schema
from fordstone.operators.dead_letter import DEAD_LETTERS, LETTER_SCHEMA
from fordstone.plan import plan as p
from fordstone.plan.ids import Position
from fordstone.planner.check import step_digests, stream_types
from fordstone.protocol.claim import SinkWriter
from fordstone.runtime.available import check_available_now, check_nothing_new
from fordstone.spark.config import SparkConfig
from fordstone.spark.hosted.checkpoint import IDENTITY_PATH, DriverMark, QueryFiles, QueryIdentity
from fordstone.spark.hosted.commit import Committer, OnBatch, SinkSpec, sink_specs
from fordstone.spark.hosted.connector_sources import (
    ConnectorEpochs,
    ConnectorWork,
    WakeReader,
    connector_feed,
    connector_reads,
    connectors_of,
    loaded,
)
from fordstone.spark.hosted.operator_host import batch_host, state_names
from fordstone.spark.hosted.plan_batches import Planner
from fordstone.spark.hosted.sent import PACKED, SOURCE_NAME, HostProcessor, Lazy, source_class
from fordstone.spark.hosted.source import PipelineReader, Share, batch_feed, opened, shares_of
from fordstone.spark.hosted.stages import QuerySetting, Stages, build_stages
from fordstone.spark.hosted.state_transfer import Seed, edge_seed, newest_epoch
from fordstone.spark.hosted.tables import BatchTables
from fordstone.spark.session.session import (
    check_file_system,
    check_location,
    is_connect,
    parallelism,
    prepared,
    warn_of_clear_tokens,
)
from fordstone.storage.clock import wall_clock_us
from fordstone.storage.failpoint import failpoints_of_process

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from fordstone.operators.base import Functions


SESSION_SETTINGS: Final = {
    # The size of a batch that goes to a Python worker. Spark's own bound is by rows, and ours are long: it would gather all of them.
    "spark.sql.execution.arrow.maxBytesPerBatch": str(4 * 1024 * 1024),
    # With it, readers and stateful steps could not use the same Python workers; `session.worker_trace` finds what is to be shown.
    "spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled": "false",
}


@dataclass(frozen=True, kw_only=True)
class HostedQuery:
    """One pipeline as one query."""

    spark: SparkSession
    plan: p.Plan
    config: SparkConfig
    stages: Stages
    setting: QuerySetting
    identity: QueryIdentity
    seed: Seed | None
    checkpoint: str
    tasks: int
    driver: DriverMark | None = None
    """Of this process, where the location cannot be locked."""
    sources: dict[str, Source] = field(default_factory=dict)
    """Of a batch job, the sources from when it is planned; of a stream those at a hub, which the driver follows, to report their trouble, and
    those that connectors of Spark's read."""

    committers: list[Committer] = field(default_factory=list)

    @property
    def files(self) -> QueryFiles:
        return QueryFiles(self.checkpoint)

    def troubles(self) -> dict[str, SourceTrouble]:
        """What is wrong with input that is read on nonetheless. Asks nothing."""
        return {name: source.trouble() for name, source in self.sources.items()}

    def follow(self) -> None:
        """Follow the sources at a hub in this process, beside the planner, which Spark runs in another one, as long as the query is used."""
        for step in self.stages.sources:
            if Capability.AT_HUB in capabilities(step.connector):
                self.sources[step.name] = opened(step, bounded=False)
                with suppress(FordstoneError):  # the query fails with it
                    self.sources[step.name].partitions()

    def close(self) -> None:
        """Close sinks, and what this process has opened of the sources. It can still be asked what was wrong with those."""
        with ExitStack() as closing:
            closing.callback(close_sources, self.sources.values())
            for committer in self.committers:
                closing.callback(committer.close)

    def start(self, on_batch: OnBatch) -> StreamingQuery:
        setting, first_epoch = self.setting, self.identity.first_epoch
        connectors = connectors_of(self.stages, bounded=False)
        epochs: ConnectorEpochs | None = None
        reader: PipelineReader | WakeReader
        if connectors:
            self.sources.update((step.name, opened(step, bounded=False)) for step in self.stages.sources)
            epochs = ConnectorEpochs(
                self.spark,
                setting,
                connectors,
                self.sources,
                self.files,
                self.seed,
                first_epoch=first_epoch,
                ticks=not self.config.available_now,
            )
            starts = epochs.starts()
            reader = WakeReader(setting, self.files, self.seed, first_epoch=first_epoch, tasks=self.tasks)
        else:
            reader = PipelineReader(
                setting,
                self.files,
                self.seed,
                first_epoch=first_epoch,
                rows_max=self.config.rows_max,
                tasks=self.tasks,
            )
        self.spark.dataSource.register(source_class(reader))
        rows = self.spark.readStream.format(SOURCE_NAME).load()
        for name, connector in connectors.items():
            options = connector.stream_options(starts[name], self.config.rows_max)
            read = loaded(self.spark, connector, options, stream=True)
            rows = rows.union(read.mapInArrow(connector_feed(setting, name, first_epoch), PACKED))
        committer = self._committer(on_batch, epochs)
        for depth in range(1, self.stages.depth + 1):
            rows = rows.groupBy("shard").transformWithState(
                HostProcessor(setting, depth, state_names(setting, depth)),
                PACKED,
                outputMode="Append",
                timeMode="None",
            )
        writer = (
            rows.writeStream.foreachBatch(committer)
            .outputMode("append")
            .queryName(f"fordstone {self.plan.pipeline}")
            .option("checkpointLocation", self.checkpoint)
        )
        if self.config.available_now or self.config.bounded:
            return writer.trigger(availableNow=True).start()
        interval_ms = max(1, positive_us(self.config.interval, what="interval") // 1000)
        return writer.trigger(processingTime=f"{interval_ms} milliseconds").start()

    def run_batch(self, on_batch: OnBatch) -> None:
        """Run it as a batch job: each stage runs once, and ends with the input.

        One that was done already is left as it is; an error, if there is input that it did not read.
        """
        epoch = self.identity.first_epoch
        if epoch in self.files.cut_epochs():
            self.sources.update((step.name, opened(step, bounded=True)) for step in self.stages.sources)
            check_nothing_new(self.plan.pipeline, self.files.cut(epoch), self.sources)
            return
        sealed = self.files.sealed(epoch)
        if sealed is not None:
            # An earlier try came to its end, but not all of it was released.
            self._committer(on_batch).finish(sealed)
            return
        connectors = connectors_of(self.stages, bounded=True)
        steps = self.stages.sources
        self.sources.update((step.name, opened(step, bounded=True)) for step in steps)
        planner = Planner(
            steps, self.sources, rows_max=ALL_ROWS, bounded=True, clock_us=lambda: 0, wall_us=wall_clock_us
        )
        before = self.seed.cut if self.seed is not None else None
        work = planner.next_work(before, epoch, seeds=self.seed is not None)
        if work is None:
            raise AssertionError("a bounded pipeline that has not ended has its end before it")
        work = BatchTables(self.setting).planned(work, before_us=0)
        shares = shares_of(work, self.tasks)
        if connectors:
            shares = [Share(work=work), *(share for share in shares if share.seeds is not None)]
        # As Arrow: for rows Spark would start Python workers of another kind, which nothing else needs.
        table = pa.table({"place": range(len(shares)), "share": [msgspec.json.encode(share) for share in shares]})
        given = self.spark.createDataFrame(table).repartitionByRange(len(shares), "place")
        rows = given.mapInArrow(batch_feed(self.setting, self.seed), PACKED)
        for name, connector in connectors.items():
            reads = connector_reads(work, name, self.sources[name])
            if reads:
                read = loaded(self.spark, connector, connector.batch_options(reads), stream=False)
                rows = rows.union(read.mapInArrow(connector_feed(self.setting, name, epoch), PACKED))
        for depth in range(1, self.stages.depth + 1):
            rows = rows.groupBy("shard").applyInArrow(batch_host(self.setting, depth), PACKED)
        self._committer(on_batch, ConnectorWork(self.spark, work) if connectors else None).run(rows, epoch)

    def _committer(self, on_batch: OnBatch, connectors: ConnectorWork | None = None) -> Committer:
        writer = SinkWriter(
            pipeline=self.plan.pipeline,
            node=self.identity.seed_node or self.config.node,
            holder=self.identity.owner,
            start=uuid4().hex,
            hub=self.identity.seed_granted,
            local=self.files.next_start(),
        )
        specs = sink_specs(self.plan, stream_types(self.plan), writer=writer)
        by_tag = [specs.get(name) or self._dead_letters(name) for name in self.stages.sinks]
        committer = Committer(
            first_epoch=self.identity.first_epoch,
            specs=by_tag,
            files=self.files,
            seed_cut=None if self.seed is None else self.seed.cut,
            lateness_us={step.name: step.lateness_us for step in self.stages.sources},
            on_batch=on_batch,
            driver=self.driver,
            failpoints=failpoints_of_process(),
            discard_later=self.config.discard_later_output,
            connectors=connectors,
        )
        self.committers.append(committer)
        if self.seed is not None:
            committer.release_seed(self.seed.epoch, self.seed.segments())
        return committer

    def _dead_letters(self, name: str) -> SinkSpec:
        directory = f"{dead_letters_of(self.config, self.plan.pipeline)}/{name.removeprefix(DEAD_LETTERS)}"
        return SinkSpec(
            connector=dead_letter_files(directory),
            stream=SinkStream(step=name, schema=LETTER_SCHEMA),
            # They are few.
            parted=False,
        )


def dead_letters_of(config: SparkConfig, pipeline: str) -> str:
    """Where the rows go that steps set aside: beside the checkpoint, a path or a URL."""
    return f"{config.checkpoint_of(pipeline)}/fordstone/dead-letters"


def hosted_query(
    plan: p.Plan,
    functions: Functions,
    config: SparkConfig,
    spark: SparkSession,
    *,
    batch: bool,
    driver: DriverMark | None = None,
) -> HostedQuery:
    """Check everything that can be checked, and lay the query out. `batch`: it will be run as a batch job.

    `driver`: the mark of this process, if the location cannot be locked.
    """
    checkpoint = config.checkpoint_of(plan.pipeline)
    plan = absolute(_readable(plan, config, checkpoint))
    stages = build_stages(plan)
    connectors = connectors_of(stages, bounded=batch)
    if connectors and is_connect(spark):
        raise ConfigError(
            f"source {next(iter(connectors))}: spark_connector=True needs a Spark session in this process, and this one is Spark Connect's. "
            "Leave it out: the source is then read by Fordstone."
        )
    check_sinks(plan, spark, streaming=not batch)
    stored = QueryFiles(checkpoint)
    stored.repair_spark()
    check_file_system(spark, checkpoint)
    known = stored.identity() if stored.begun() else None
    seed = _seed(plan, config, known, batch=batch)
    wanted = QueryIdentity(
        pipeline=plan.pipeline,
        plan=msgspec.Raw(plan.unplaced().to_json()),
        step_digests=step_digests(plan, stream_types(plan)),
        stages=tuple(tuple(host.name for host in stages.at(depth)) for depth in range(1, stages.depth + 1)),
        shards=config.shards or parallelism(spark),
        first_epoch=1 if seed is None else seed.epoch + 1,
        seed=None if seed is None else seed.root,
        seed_node=None if seed is None else seed.manifest.node,
        seed_granted=0 if seed is None else seed.granted,
        bounded=config.bounded,
        connector_sources=tuple(connectors),
        owner=uuid4().hex,
    )
    if known is not None and known.seed is not None:
        wanted = msgspec.structs.replace(
            wanted,
            seed=known.seed,
            seed_node=known.seed_node,
            seed_granted=known.seed_granted,
            first_epoch=known.first_epoch,
        )
    identity = stored.claim(wanted)
    if config.shards is not None and config.shards != identity.shards:
        raise ConfigError(
            f"--shards {config.shards}: the state of pipeline {plan.pipeline} is divided into {identity.shards}, for its whole life. "
            "Leave it out, or carry the state over (fordstone checkpoints import-spark, then --from-checkpoint)."
        )
    if stages.depth and stored.spark_committed() and not stored.has("state"):
        raise CheckpointError(
            f"the state of pipeline {plan.pipeline} is gone: {checkpoint} has batches, but no directory state. "
            "Restore the checkpoint location as a whole, or begin with a new one."
        )
    own = prepared(spark)
    probe = check_location(own, checkpoint, IDENTITY_PATH, parallelism(own))
    if any("token" in (step.connector.at or {}) for step in plan.steps if isinstance(step, p.Source | p.Sink)):
        warn_of_clear_tokens(own)
    for name, value in {**SESSION_SETTINGS, "spark.sql.shuffle.partitions": str(identity.shards)}.items():
        own.conf.set(name, value)
    setting = QuerySetting(
        plan_json=plan.to_json(),
        root=checkpoint,
        shards=identity.shards,
        functions=Lazy(functions),
        batch_rows=config.batch_rows,
        bounded=config.bounded or batch,
        start=uuid4().hex,
        probe=probe,
    )
    return HostedQuery(
        spark=own,
        plan=plan,
        config=config,
        stages=stages,
        setting=setting,
        identity=identity,
        seed=seed,
        checkpoint=checkpoint,
        tasks=max(identity.shards, parallelism(spark)),
        driver=driver,
    )


def check_sinks(plan: p.Plan, spark: SparkSession, *, streaming: bool) -> None:
    """Refuse sinks that this Spark cannot reach."""
    for step in plan.steps:
        if not isinstance(step, p.Sink):
            continue
        can = capabilities(step.connector)
        if Capability.IN_PROCESS in can and streaming and is_connect(spark):
            raise ConfigError(
                f"sink {step.name} lives in this process's memory, and with Spark Connect a stream's output is released where the "
                "server runs. Use files(...) or delta(...)."
            )


def _readable(plan: p.Plan, config: SparkConfig, checkpoint: str) -> p.Plan:
    """The plan with sources that Spark's workers can read."""
    if config.available_now:
        check_available_now(plan)
    live = sources_in_memory(plan)
    if not live:
        return plan
    if not config.bounded or "://" in checkpoint:
        raise ConfigError(
            f"source {', '.join(step.name for step in live)} lives in this process's memory, which Spark's workers cannot read. "
            "Run it with bounded=True and a local state directory, or use files(...) or generator(...)."
        )
    return written_out(plan, Path(checkpoint) / "fordstone" / "memory")


def _seed(plan: p.Plan, config: SparkConfig, known: QueryIdentity | None, *, batch: bool) -> Seed | None:
    """The checkpoint to begin from, while the query has not begun for good."""
    asked = None if config.from_checkpoint is None else str(Path(config.from_checkpoint).expanduser().absolute())
    if known is None:
        if asked is None:
            return None
        return edge_seed(plan, asked, node=config.node, allow_new_state=config.allow_new_state)
    checkpoint = config.checkpoint_of(plan.pipeline)
    if asked is not None and (
        known.seed != asked or newest_epoch(plan, asked, node=config.node) not in {0, known.first_epoch - 1}
    ):
        raise CheckpointError(
            f"{checkpoint} has state of its own, so it cannot begin from {config.from_checkpoint}. "
            "Use another --state, or leave --from-checkpoint out to go on."
        )
    stored = QueryFiles(checkpoint)
    # A stream's first batch has its cut before Spark has committed it; executed again, it needs the state again.
    done = known.first_epoch in stored.cut_epochs() if batch else stored.spark_committed()
    if known.seed is None or done:
        return None
    return edge_seed(
        plan,
        known.seed,
        node=known.seed_node or config.node,
        epoch=known.first_epoch - 1,
        allow_new_state=config.allow_new_state,
    )


def absolute(plan: p.Plan) -> p.Plan:
    """The plan with absolute paths in its connectors."""
    return msgspec.structs.replace(plan, steps=tuple(map(_with_whole_paths, plan.steps)))


def _with_whole_paths(step: p.Step) -> p.Step:
    if isinstance(step, p.Source | p.Sink):
        return msgspec.structs.replace(step, connector=_spelt(step.connector))
    if isinstance(step, p.Lookup):
        return msgspec.structs.replace(step, table=_spelt(step.table))
    return step


def _spelt(connector: p.ConnectorSpec) -> p.ConnectorSpec:
    path = connector.options.get("path")
    if not isinstance(path, str) or "://" in path:
        return connector
    whole = str(Path(path).expanduser().absolute())
    return msgspec.structs.replace(connector, options={**connector.options, "path": whole})


_ROWS_AT_ONCE: Final = 1 << 17


def sources_in_memory(plan: p.Plan) -> tuple[p.Source, ...]:
    """The sources whose rows only this process has."""
    return tuple(
        step
        for step in plan.steps
        if isinstance(step, p.Source) and Capability.IN_PROCESS in capabilities(step.connector)
    )


def written_out(plan: p.Plan, folder: Path) -> p.Plan:
    """The plan with the rows of its sources in memory as files below `folder`."""
    for step in sources_in_memory(plan):
        place = folder / step.name
        # What an earlier try left may be more, or torn.
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        _write(step, place)
        connector = files(f"{place}/*.arrow")
        steps = tuple(msgspec.structs.replace(step, connector=connector) if one is step else one for one in plan.steps)
        plan = msgspec.structs.replace(plan, steps=steps)
    return plan


def _write(step: p.Source, place: Path) -> None:
    schema = Schema.of(step.schema)
    source = open_source(step.connector, SourceOptions(schema=schema, bounded=True))
    for number, partition in enumerate(source.partitions()):
        reader = source.open(partition, Position(0), with_positions=False)
        frames = [schema.empty()]
        while (chunk := reader.read(_ROWS_AT_ONCE)) is not None:
            if chunk.rejected:
                first = chunk.rejected[0]
                raise ConfigError(
                    f"source {step.name}: row {first.position} in memory is not a row of its schema ({first.reason}), and on Spark "
                    "only rows in files can become dead letters. Mend the row, or read it from a file."
                )
            frames.append(chunk.frame)
            if chunk.ended:
                break
        reader.close()
        pl.concat(frames).write_ipc(place / f"{number:06d}.arrow")
