"""A center on the edge engine, over a hub in memory, stepped by the test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import polars as pl
import pytest
from tests.connectors.fake_hub import PIPELINE, STREAM, Epoch, FakeHub, wait_until_listed
from tests.simulation.simulator import SimClock

from fordstone import Pipeline, tumbling
from fordstone.connectors import MemorySink, MemorySource, memory
from fordstone.connectors import hub as hub_connector
from fordstone.connectors.base import ConnectorSpec, Sink
from fordstone.connectors.hub import HubSource
from fordstone.edge.config import RunConfig
from fordstone.edge.engine.engine import Engine, Environment
from fordstone.edge.run import recovered_engine
from fordstone.epochs.store import CheckpointStore
from fordstone.operators.base import ROW_WATERMARK
from fordstone.plan import plan as p
from fordstone.testing.memory_disk import MemoryDisk

SCHEMA = {"k": "string", "ts": "timestamp", "id": "bigint"}
SECOND_US = 1_000_000
OFFLINE_US = 3600 * SECOND_US
ROUNDS = 300
KEEP = 2
AT = {"url": "http://hub.test:7411"}


def rows(*found: tuple[str | None, float | None, int], late: Mapping[int, float] | None = None) -> pl.DataFrame:
    """Rows of key, second and id, as they cross; `late`: by id, the watermark in seconds of those below it."""
    times = [None if second is None else round(second * SECOND_US) for _, second, _ in found]
    columns = {"k": [k for k, _, _ in found], "ts": times, "id": [n for _, _, n in found]}
    seconds = [(late or {}).get(n) for _, _, n in found]
    watermarks = [None if second is None else round(second * SECOND_US) for second in seconds]
    return (
        pl.DataFrame(columns, schema={"k": pl.String, "ts": pl.Int64, "id": pl.Int64})
        .with_columns(pl.col("ts").cast(pl.Datetime("us", "UTC")))
        .with_columns(pl.Series(ROW_WATERMARK, watermarks, dtype=pl.Int64))
    )


def epoch(
    second: float, *found: tuple[str | None, float | None, int], late: Mapping[int, float] | None = None
) -> Epoch:
    """An epoch with rows, after which the node's time has come to `second`."""
    runs = [rows(*found, late=late)] if found else []
    return Epoch(runs=runs, watermark_us=round(second * SECOND_US))


@dataclass
class Outputs:
    """What comes out of the plan: windows of ten seconds, late rows, and all rows in time."""

    windows: MemorySink = field(default_factory=MemorySink)
    late: MemorySink = field(default_factory=MemorySink)
    rows: MemorySink = field(default_factory=MemorySink)

    def found(self) -> dict[tuple[str | None, int], list[int]]:
        """The ids of each window, by key and second."""
        found = {}
        for k, start, ids in (
            self.windows.rows().select("k", "window_start", "ids").iter_rows() if self.windows.released else ()
        ):
            at = (k, round(start.timestamp()))
            assert at not in found, f"window {at} came out twice"
            found[at] = sorted(ids)
        return found

    def ids(self, name: str) -> list[int]:
        """The ids at a sink."""
        sink: MemorySink = getattr(self, name)
        return sorted(sink.rows()["id"].to_list()) if sink.released else []


def center_plan(out: Outputs, *, guarantee: p.Guarantee = "exactly_once", place: dict[str, str] = AT) -> p.Plan:
    """The center's half of a plan, as splitting gives it."""
    pipeline = Pipeline(PIPELINE, guarantee=guarantee)
    stream = pipeline.source(STREAM, memory(MemorySource([[]])), schema=SCHEMA, time="ts")
    made = stream.group_by("k").window(tumbling("10s")).agg(ids="collect(id)")
    made.sink("windows", memory(out.windows))
    made.late.sink("late", memory(out.late))
    stream.sink("rows", memory(out.rows))
    return over_hub(pipeline.plan(), place)


def over_hub(plan: p.Plan, place: dict[str, str], **changes: Any) -> p.Plan:
    """The plan with its source replaced by the hub's stream."""

    def replaced(step: p.Step) -> p.Step:
        if not isinstance(step, p.Source):
            return step
        connector = ConnectorSpec("hub", {"pipeline": plan.pipeline, "stream": step.name}, at=place)
        return msgspec.structs.replace(
            step, connector=connector, declares_time=True, idle_after_us=OFFLINE_US, **changes
        )

    return msgspec.structs.replace(plan, steps=tuple(map(replaced, plan.steps)))


class Letters(Sink):
    """Keeps dead letters."""

    def __init__(self) -> None:
        self.epochs: dict[int, pl.DataFrame] = {}

    def release(self, epoch: int, frame: pl.DataFrame) -> None:
        self.epochs[epoch] = frame

    def write(self, frame: pl.DataFrame) -> None:
        raise AssertionError("dead letters wait for the seal")

    def close(self) -> None:
        pass

    @property
    def count(self) -> int:
        return sum(frame.height for frame in self.epochs.values())


@dataclass
class Center:
    """An engine, stepped; it can be killed and begun again from what it left."""

    hub: FakeHub
    plan: p.Plan
    parallelism: int = 1
    batch_rows: int = 1000
    bounded: bool = False
    clock: SimClock = field(default_factory=SimClock)
    disk: MemoryDisk = field(default_factory=MemoryDisk)
    letters: Letters = field(default_factory=Letters)
    engine: Engine | None = None

    def start(self, *, damage_newest: bool = False) -> Engine:
        store = CheckpointStore(self.disk, pipeline=PIPELINE, node="center", compression="none", keep=KEEP)
        if damage_newest:
            store.set_aside(store.epochs()[-1], "a test says so")
        config = RunConfig(
            node="center",
            bounded=self.bounded,
            parallelism=self.parallelism,
            interval="2ms",
            batch_rows=self.batch_rows,
            keep=KEEP,
        )
        environment = Environment(
            clock=self.clock, disk=self.disk, choose=lambda _: 0, dead_letters=lambda _: self.letters
        )
        self.engine = recovered_engine(self.plan, {}, config, environment, store, None)
        return self.engine

    @property
    def source(self) -> HubSource:
        assert self.engine is not None
        source = self.engine.sources[STREAM]
        assert isinstance(source, HubSource)
        return source

    def heard(self) -> None:
        """Wait until the source has heard of everything that the hub has."""
        if self.bounded:
            return
        self.source.partitions()
        for entry in self.hub.entries:
            assert self.source._facts is not None
            wait_until_listed(self.source._facts, entry.node, entry.epoch)

    def run(self, rounds: int = ROUNDS) -> Center:
        """Begin if need be, hear the news, and take `rounds` steps."""
        engine = self.engine or self.start()
        self.heard()
        for _ in range(rounds):
            self.clock.now_us += 100
            for steppable in engine.steppables():
                steppable.step()
        return self

    def kill(self) -> None:
        """End without a word."""
        if self.engine is not None:
            self.source.close()
        self.engine = None

    @property
    def watermark_s(self) -> float | None:
        assert self.engine is not None
        found = self.engine.progress().watermark_us
        return None if found is None else found / SECOND_US


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """The hub that every address leads to."""
    made = FakeHub(now_us=365 * 24 * 3600 * SECOND_US)
    monkeypatch.setattr(hub_connector, "client_of", lambda _: made)
    return made
