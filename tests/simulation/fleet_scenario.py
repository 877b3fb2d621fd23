"""Random fleets under a seed: nodes with their rows, the pipeline for two tiers, and how unkind the world is to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Final

import msgspec
from tests.simulation.query_tails import VALUES
from tests.simulation.rows import LATENESS_S, Row
from tests.simulation.scenario import timed_source

from fordstone.api.pipeline import Pipeline
from fordstone.api.windows import tumbling
from fordstone.connectors.memory import MemorySink, MemorySource, memory
from fordstone.hub.server.handlers import SMALL_BYTES_MAX
from fordstone.plan.plan import Mode, Plan, Source

PIPELINE: Final = "fleet"
CUT: Final = "cut"
"""The stream that crosses."""
CONTROL: Final = "bounds"
SOURCE: Final = "source0"
SINKS: Final = ("rows", "windows", "late")
WINDOW_S: Final = 10
HOUR_US: Final = 3_600_000_000
ROWS_BEGIN_US: Final = 1_767_225_600_000_000
"""2026 began: the zero of the rows' seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetScenario:
    """Everything that a seed decides before the first step."""

    seed: int
    nodes: tuple[tuple[tuple[Row, ...], ...], ...]
    """For each node, for each partition of its source, the rows."""
    mode: Mode
    center: bool
    """A center runs; else rows end at the hub, where a plain reader takes them."""
    pushes: bool
    """Partial aggregates cross instead of rows."""
    controls: bool
    """Rows carry what a control table says of their key."""
    hub_state: bool
    batch_rows: int
    interval_us: int
    center_interval_us: int
    chaos_steps: int
    """How long things go wrong; then the network is whole and nothing crashes any more."""
    lost: float
    """How often a request or an answer is lost, or a request comes late, or twice."""
    crash_rate: float
    crashes_max: int
    takes_over: bool
    """Another machine takes a node over while the old one may go on."""
    jump_rate: float
    """How often the clock moves on by hours."""
    cut_rate: float
    """How often a node cannot reach the hub for long."""
    offline_hours: int
    rescales: bool
    """Every start has another parallelism."""
    damages: bool
    """The newest checkpoint of a node is damaged once: it is computed again, or fetched from the hub."""
    fills: bool
    """The disks of nodes are full now and then."""
    outbox_bytes: int
    """How much fits into an outbox."""
    small: bool
    """Bounds that are rarely reached are small: ranges, files of control tables, what the hub remembers."""
    hub_skew_us: int
    """How far the hub's clock is ahead of the nodes'."""
    small_blob_bytes: int = 0
    """Blobs up to this size are in the hub's log, and not in its blob store."""
    wal_pages: int = 4_000
    """After how many pages the hub's write-ahead log is copied into its file."""
    set_rate: float = 0.0
    """How often somebody sets the clock of a machine or of the hub, forward or back."""
    restores: float = 0.0
    """How often a copy of the hub's data is made, and how often the last one is put in its place."""
    copies: float = 0.0
    """How often the disk of a machine is copied, and how often a machine is started from such a copy."""
    feed_max: int = 3
    """How many rows turn up at a time, at most."""

    @classmethod
    def of(cls, seed: int) -> FleetScenario:
        """The scenario of a seed."""
        rng = Random(seed)
        ids = iter(range(1_000_000))
        nodes = tuple(
            tuple(_rows(rng, ids, rng.randint(1, 10)) for _ in range(rng.choice((1, 1, 2))))
            for _ in range(rng.choice((1, 2, 2, 3)))
        )
        pushes = rng.random() < 0.25
        controls = not pushes and rng.random() < 0.5
        hub_state = rng.random() < 0.8
        damages = not controls and rng.random() < 0.2
        # No other: what is sent to the center must be whole at a barrier, so `to_center` refuses unaligned mode.
        mode: Mode = rng.choice(("aligned", "aligned", "blocking"))
        return cls(
            seed=seed,
            nodes=nodes,
            mode=mode,
            center=pushes or rng.random() < 0.5,
            pushes=pushes,
            controls=controls,
            hub_state=hub_state,
            batch_rows=rng.choice((1, 2, 5)),
            interval_us=rng.choice((2_000, 6_000, 20_000)),
            center_interval_us=rng.choice((5_000, 15_000)),
            chaos_steps=rng.choice((150, 300, 600)),
            lost=rng.choice((0.0, 0.05, 0.2)),
            crash_rate=rng.choice((0.0, 0.01, 0.03)),
            crashes_max=rng.choice((2, 6)),
            takes_over=hub_state and rng.random() < 0.4,
            # After a jump attempts are given up, and what went by their barriers could not be computed again exactly.
            jump_rate=0.0 if damages else rng.choice((0.0, 0.008)),
            cut_rate=rng.choice((0.0, 0.01)),
            offline_hours=100_000 if pushes else rng.choice((10, 100_000)),
            rescales=rng.random() < 0.3,
            damages=damages,
            fills=rng.random() < 0.2,
            outbox_bytes=rng.choice((1_500, 10**9, 10**9)),
            small=rng.random() < 0.5,
            hub_skew_us=rng.choice((0, 0, 24, -2)) * HOUR_US,
            set_rate=rng.choice((0.0, 0.02)),
            wal_pages=rng.choice((8, 8, 4_000)),
            # What a table said before the hub was restored may be said by no version any more.
            restores=0.01 if not (pushes or controls) and rng.random() < 0.5 else 0.0,
            copies=0.01 if rng.random() < 0.25 else 0.0,
            small_blob_bytes=rng.choice((0, 1_500, SMALL_BYTES_MAX)),
        )

    @classmethod
    def large(cls, seed: int) -> FleetScenario:
        """A fleet of ten nodes with hundreds of rows each, under more faults at once than a small one mostly has."""
        rng = Random(seed)
        ids = iter(range(1_000_000))
        nodes = tuple(tuple(_rows(rng, ids, rng.randint(100, 200)) for _ in range(2)) for _ in range(10))
        small = cls.of(seed)
        return replace(
            small,
            nodes=nodes,
            center=small.pushes or rng.random() < 0.8,
            takes_over=small.hub_state and rng.random() < 0.7,
            batch_rows=20,
            feed_max=40,
            chaos_steps=3_000,
            lost=rng.choice((0.05, 0.1)),
            crash_rate=rng.choice((0.01, 0.02)),
            crashes_max=30,
            cut_rate=0.003,
            set_rate=0.01,
            outbox_bytes=max(small.outbox_bytes, 20_000),
        )

    @property
    def aggregates(self) -> dict[str, str]:
        """Those of the windows at the center. Lists of values cross only for some seeds: a replay compares how many rows have them."""
        counts = {"n": "count(*)", "total": "sum(id)"}
        return counts | VALUES if self.seed % 2 else counts

    def title(self) -> str:
        """How a failure names it."""
        words = [
            name for name in ("center", "pushes", "controls", "takes_over", "restores", "copies") if getattr(self, name)
        ]
        return f"fleet seed {self.seed} ({len(self.nodes)} nodes, {', '.join([self.mode, *words])})"

    def rows(self) -> list[Row]:
        """Every row."""
        return [row for node in self.nodes for partition in node for row in partition]


def node_name(number: int) -> str:
    """The id of a node."""
    return f"node{number}"


def passes(row: Row) -> bool:
    """Whether a row comes out of the filter below the cut."""
    return row.id % 7 != 3


def build_plan(scenario: FleetScenario, source: MemorySource, sinks: Mapping[str, MemorySink]) -> Plan:
    """The pipeline, whole: both halves are cut out of it."""
    pipeline = Pipeline(PIPELINE, mode=scenario.mode)
    rows = timed_source(
        pipeline, SOURCE, memory(source), {"lateness": f"{LATENESS_S}s"}, assigned=scenario.seed % 3 == 1
    )
    stream = rows.filter("id % 7 <> 3")
    if scenario.controls:
        table = pipeline.control(CONTROL, schema={"k": "bigint", "bound": "bigint"}, key="k")
        stream = stream.join_control(table, on="k")
    above = stream.to_center(name=CUT, offline=f"{scenario.offline_hours}h")
    windows = above.group_by("k").window(tumbling(f"{WINDOW_S}s")).agg(name="windows_by_k", **scenario.aggregates)
    windows.final().sink("windows", memory(sinks["windows"]))
    if not scenario.pushes:
        windows.late.sink("late", memory(sinks["late"]))
        above.sink("rows", memory(sinks["rows"]))
    if scenario.controls:
        counts = above.group_by("k").agg(name="count_by_k", n="count(*)")
        counts.select("k", "n AS bound").to_edges(CONTROL)
    return pipeline.plan()


def reading(edge: Plan, source: MemorySource) -> Plan:
    """The nodes' half, for a node with this input."""
    steps = (
        msgspec.structs.replace(step, connector=memory(source))
        if isinstance(step, Source) and step.name == SOURCE
        else step
        for step in edge.steps
    )
    return msgspec.structs.replace(edge, steps=tuple(steps))


def _rows(rng: Random, ids: object, count: int) -> tuple[Row, ...]:
    """Rows whose time moves on with some disorder, a few of them late."""
    now, rows = rng.randint(0, 20), []
    for _ in range(count):
        now += rng.choice((0, 1, 2, 7))
        back = rng.choice((0, 0, 0, 1, LATENESS_S, LATENESS_S + 1, 25))
        rows.append(Row(id=next(ids), k=rng.randrange(4), second=now - back, n=0))  # type: ignore[call-overload]
    return tuple(rows)
