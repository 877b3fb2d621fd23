"""Run a case on the edge engine and as a hosted query, and compare what came out with the oracle."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import polars as pl
from tests.simulation.simulator import SimClock
from tests.spark.micro_state import Location
from tests.spark.oracle import Oracle, Read, same
from tests.spark.pipelines import Case, File, Rows
from tests.spark.random_case import lateness_s, random_case

from fordstone.connectors import ConnectorSpec, MemorySink, latest, memory, rows
from fordstone.connectors.base import Sink
from fordstone.edge.config import RunConfig
from fordstone.edge.engine.engine import Engine, Environment
from fordstone.edge.run import recovered_engine
from fordstone.epochs.store import CheckpointStore
from fordstone.operators.base import DELETE, OP, ROW_ID, Functions
from fordstone.plan.plan import Plan
from fordstone.spark.hosted import operator_host as host
from fordstone.spark.hosted import packing
from fordstone.spark.hosted.plan_batches import read_work
from fordstone.storage.disk import Disk
from fordstone.testing.memory_disk import MemoryDisk

STEPS_MAX = 200_000
EachSeed = Callable[[Callable[[int], Counter[str]]], Counter[str]]
"""What the fixture `each_seed` gives."""
Out = dict[str, list[tuple[Any, ...]]]
"""Rows by sink; of upserts the latest ones."""


class DeadLetterBox(Sink):
    """Counts dead letters, each epoch once."""

    def __init__(self) -> None:
        self.epochs: dict[int, int] = {}

    def release(self, epoch: int, frame: pl.DataFrame) -> None:
        self.epochs.setdefault(epoch, frame.height)

    def write(self, frame: pl.DataFrame) -> None:
        raise AssertionError("dead letters wait for the seal")

    def close(self) -> None:
        """Nothing to close."""


@dataclass
class EdgeSide:
    """The edge engine on one thread, with a clock of its own."""

    plan: Plan
    functions: Functions
    disk: Disk = field(default_factory=MemoryDisk)
    dead_letters: dict[str, DeadLetterBox] = field(default_factory=dict)
    clock: SimClock = field(default_factory=SimClock)

    def run(
        self,
        *,
        bounded: bool = True,
        parallelism: int = 1,
        batch_rows: int = 16,
        stop_after: int | None = None,
        rng: Random | None = None,
    ) -> None:
        """Run to the end; or after `stop_after` steps, finish the epoch and stop."""
        config = RunConfig(
            bounded=bounded, parallelism=parallelism, interval="5ms", batch_rows=batch_rows, compression="none"
        )
        environment = Environment(clock=self.clock, disk=self.disk, dead_letters=self._dead_letters)
        store = CheckpointStore(self.disk, pipeline=self.plan.pipeline, node="node", compression="none")
        engine = recovered_engine(self.plan, self.functions, config, environment, store, None)
        try:
            self._step(engine, stop_after, rng or Random(0))
        finally:
            engine.close()

    def _step(self, engine: Engine, stop_after: int | None, rng: Random) -> None:
        parts = engine.steppables()
        for step in range(STEPS_MAX):
            if step == stop_after:
                engine.stop()
            self.clock.now_us += 100
            did = [part.step() for part in rng.sample(parts, len(parts))]
            if engine.over:
                return
            if not any(did):
                self.clock.now_us += 5_000
        raise AssertionError(f"the edge engine did not end: {engine.progress()}")

    def _dead_letters(self, source: str) -> Sink:
        return self.dead_letters.setdefault(source, DeadLetterBox())


@contextmanager
def small_values(seed: int) -> Iterator[None]:
    """For every other seed: values on Spark so small that batches and pieces of state are several."""
    if seed % 2:
        yield
        return
    with (
        mock.patch.object(packing, "PACK_BYTES", 2000),
        mock.patch.object(packing, "SLICE_BYTES_MAX", 300),
        mock.patch.object(host, "VALUE_BYTES_MAX", 500),
    ):
        yield


# What came out.


def out_of(case: Case, sinks: Mapping[str, MemorySink]) -> Out:
    """What memory sinks hold: columns as declared."""
    return {name: _rows_of(case, name, sinks[name].frames()) for name in case.kinds}


def out_of_files(case: Case, directory: Path) -> Out:
    """What file sinks hold, as a user reads them."""
    found: Out = {}
    for name, kind in case.kinds.items():
        columns = case.oracle.sinks[name].columns
        frame = latest(directory / name) if kind == "upsert" else rows(directory / name)
        found[name] = frame.select(columns).rows()
    return found


def ids_of(sinks: Mapping[str, MemorySink], name: str) -> list[tuple[Any, ...]]:
    """The rows of a sink that releases at once, with their ids."""
    return sinks[name].rows().rows() if ROW_ID in sinks[name].rows().columns else []


def _rows_of(case: Case, name: str, frames: Iterable[pl.DataFrame]) -> list[tuple[Any, ...]]:
    columns, key = list(case.oracle.sinks[name].columns), case.keys[name]
    frames = [frame for frame in frames if frame.width]
    if key is None:
        return [row for frame in frames for row in frame.select(columns).rows()]
    newest: dict[tuple[Any, ...], tuple[Any, ...] | None] = {}
    for frame in frames:
        keys = [tuple(map(repr, one)) for one in frame.select(key).rows()] if key else [()] * frame.height
        assert len(set(keys)) == len(keys), f"{name}: a key has two rows in one epoch"
        for one, op, row in zip(keys, frame[OP].to_list(), frame.select(columns).rows(), strict=True):
            newest[one] = None if op == DELETE else row
    return [row for row in newest.values() if row is not None]


def compare(found: Out, wanted: Oracle, *, what: str) -> None:
    for name, sink in wanted.sinks.items():
        difference = same(found[name], sink.rows)
        assert difference is None, f"{what}: sink {name}: {difference}"


# Cases.


@dataclass
class Trial:
    """One seed: its files, and its pipeline as often as it is wanted."""

    seed: int
    root: Path
    idle_after: str | None = None
    time: str | None = "ts"
    ids: bool = True
    files: dict[str, list[File]] = field(default_factory=dict)
    feeds: dict[str, list[Rows]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = Random(self.seed ^ 0xF11E)
        self._ids = itertools.count()
        self.files = {f"source{number}": [] for number in range(self.rng.choice((1, 1, 2)))}
        self.feeds = {name: [] for name in self.files}
        self._wild = self.rng.random() < 0.3
        self._base = self.rng.choice((-1000, 0, 1_750_000_000))

    def add_file(self, source: str, rows: int, *, second: float | None = None, ending: str | None = None) -> None:
        number, rng = len(self.files[source]), self.rng
        ending = ending or rng.choice(("jsonl", "jsonl", "csv", "parquet", "arrow"))
        # Names in an order that is not that of their coming.
        name = f"{rng.randrange(100):02d}-{number}.{ending}"
        file = File(self.root / f"in{source.removeprefix('source')}" / name)
        feed = Rows(
            rng,
            lateness_s(self.seed),
            self._base + (rng.randint(0, 20) if second is None else second),
            self._ids,
            timeless=self.time is not None,
            wild=self._wild,
        )
        self.files[source].append(file)
        self.feeds[source].append(feed)
        file.write(feed.take(rows, ending))

    def grow(self, source: str, number: int, rows: int) -> None:
        file = self.files[source][number]
        file.write(self.feeds[source][number].take(rows, file.format))

    def fill(self, rows_max: int = 40) -> None:
        """Files for every source; an empty one now and then."""
        for source in self.files:
            for _ in range(self.rng.randint(1, 3)):
                self.add_file(source, self.rng.choice((0, 1, rows_max // 2, rows_max)))

    def case(self, connector: Callable[[str], ConnectorSpec] | None = None) -> tuple[Case, dict[str, MemorySink]]:
        """The pipeline, with sinks in memory unless given otherwise."""
        sinks: dict[str, MemorySink] = {}

        def in_memory(name: str) -> ConnectorSpec:
            return memory(sinks.setdefault(name, MemorySink()))

        case = random_case(
            self.seed,
            self.root,
            connector or in_memory,
            sources=len(self.files),
            idle_after=self.idle_after,
            time=self.time,
            ids=self.ids,
        )
        return case, sinks

    def history(self, location: Location) -> list[tuple[list[Read], list[str]]]:
        """What each batch read, by the offsets that were logged: for the oracle."""
        known: set[tuple[str, str]] = set()
        return [
            self._reads(read_work(json.loads(location.offset(number))), known) for number in location.batches("offsets")
        ]

    def _reads(self, work: Any, known: set[tuple[str, str]]) -> tuple[list[Read], list[str]]:
        found = []
        by_name = {(source, file.path.name): file for source, files in self.files.items() for file in files}
        for source, changed in work.changed.items():
            for name, cut in changed.items():
                change = "idle" if cut.idle else "back" if (source, name) in known else "joins"
                known.add((source, name))
                found.append(Read(source=source, partition=name, change=change))
        for read in work.reads:
            rows_read = by_name[read.source, read.partition].between(read.position, read.until)
            found.append(Read(source=read.source, partition=read.partition, rows=rows_read, ended=read.ended))
        return found, [name for name, clock in work.clocks.items() if clock.state == "ended"]
