"""Random pipelines, rows and faults under a seed, and what must come of them.

The oracle works row by row in plain Python on the generated rows: it shares nothing with the operators that it judges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Final, Literal, get_args

from tests.simulation.rows import LATENESS_S, SCHEMA, Row, in_order, late_of
from tests.simulation.tail_choice import draw_tail
from tests.simulation.tails import TAIL_SINKS, Tail

from fordstone.api.pipeline import Pipeline
from fordstone.api.stream import Stream
from fordstone.api.windows import tumbling
from fordstone.connectors.memory import MemorySink, MemorySource, memory
from fordstone.plan.plan import ConnectorSpec, Guarantee, Mode, Plan, StateKind

Shape = Literal["chain", "diamond", "loop", "union"]
SHAPES: Final[tuple[Shape, ...]] = ("chain", "diamond", "loop", "union")
GUARANTEES: Final[tuple[Guarantee, ...]] = (
    "exactly_once",
    "exactly_once",
    "exactly_once",
    "at_least_once",
    "at_most_once",
)
"""What seeds draw from: exactly-once has the most to go wrong."""
WINDOW_S: Final = 10
CRASHES_LATE_RATE: Final = 0.75
IDLE_US: Final = 30_000
"""In the simulation's time."""
ALPHA: Final = 0.3
WITHIN_S: Final = 9
MAX_AHEAD: Final = ("1h", "5s", "20s", None)
"""Counts only for live scenarios: in them, whether a row is believed depends on the clock."""
SINKS: Final = ("rows", "running", "windows", "late", "means", "overtaken", "firsts", "missed", *TAIL_SINKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything that a seed decides before the first step."""

    seed: int
    shape: Shape
    guarantee: Guarantee
    mode: Mode
    parallelism: int
    partitions: tuple[tuple[tuple[Row, ...], ...], ...]
    """For each source, for each of its partitions, the rows."""
    batch_rows: int
    channel_rows: int
    interval_us: int
    timeout_us: int
    crashes_max: int
    crash_rate: float
    rescales: bool
    damages: bool
    late_sink: bool
    waiting_bytes: int
    fills: bool
    """The disk is full now and then."""
    crashes_late: bool = False
    """No crash before an epoch is sealed: a restart has something to resume from."""
    rots: bool = False
    """Any file of the state may be damaged between two starts: the run goes on exactly, or is refused."""
    live: bool
    """Rows and partitions turn up while the pipeline runs; silent partitions fall idle."""
    smooths: bool
    """Rows are smoothed, too: a step that depends on their order."""
    deduplicates: bool
    """Rows that repeat another are dropped, too: a step that forgets keys by time."""
    tail: Tail | None
    """One more step."""
    states: tuple[StateKind, ...] = ("memory",)
    """Where state may be kept: each start chooses one of them, and takes up what another left."""
    failure_rate: float = 0.0
    """How often a task fails, at each step: the others go on for a while, and then the engine is made again in the same process."""

    @classmethod
    def of(
        cls, seed: int, *, guarantee: Guarantee | None = None, mode: Mode | None = None, shape: Shape | None = None
    ) -> Scenario:
        """The scenario of a seed; what is given is fixed, the rest is drawn."""
        rng = Random(seed)
        drawn_guarantee = rng.choice(GUARANTEES) if guarantee is None else guarantee
        drawn_shape = rng.choice(SHAPES) if shape is None else shape
        modes: tuple[Mode, ...] = (
            ("aligned", "blocking") if drawn_shape == "loop" else ("aligned", "unaligned", "blocking")
        )
        drawn_mode = rng.choice(modes) if mode is None else mode
        sources = 2 if drawn_shape == "union" else 1
        # Where barriers overtake rows, an epoch cannot always be computed again: then damage is refused, and nothing is tried.
        rots = seed % 8 == 5 and drawn_guarantee == "exactly_once" and drawn_mode != "unaligned"
        rots = rots and guarantee is None and mode is None and shape is None
        ids = iter(range(1_000_000))
        partitions = tuple(
            tuple(_rows(rng, ids, rng.randint(0, 24)) for _ in range(rng.randint(1, 3))) for _ in range(sources)
        )
        drawn = cls(
            seed=seed,
            states=get_args(StateKind) if seed % 8 == 3 else ("memory",),
            shape=drawn_shape,
            guarantee=drawn_guarantee,
            mode=drawn_mode,
            parallelism=rng.choice((1, 1, 2, 3)),
            partitions=partitions,
            batch_rows=rng.choice((1, 2, 5, 20)),
            channel_rows=rng.choice((1, 4, 1000)),
            interval_us=rng.choice((2_000, 10_000, 40_000)),
            timeout_us=rng.choice((15_000, 60_000_000, 60_000_000)),
            crashes_max=rng.choice((0, 1, 3)),
            crash_rate=rng.choice((0.002, 0.01, 0.03)),
            crashes_late=Random(seed ^ 0x1A7E).random() < CRASHES_LATE_RATE,
            rescales=drawn_guarantee == "exactly_once" and drawn_mode != "unaligned" and rng.random() < 0.6,
            damages=drawn_guarantee == "exactly_once" and rng.random() < 0.2 and not rots,
            rots=rots,
            late_sink=rng.random() < 0.3,
            waiting_bytes=rng.choice((300, 10**9, 10**9)),
            fills=rng.random() < 0.2,
            live=drawn_guarantee == "exactly_once" and drawn_shape != "loop" and rng.random() < 0.3,
            smooths=drawn_shape != "loop" and rng.random() < 0.4,
            deduplicates=drawn_shape != "loop" and rng.random() < 0.4,
            tail=draw_tail(rng, drawn_mode) if drawn_shape != "loop" else None,
        )
        # Damage needs a crash after some checkpoints.
        return replace(drawn, crashes_max=4, crash_rate=0.003, interval_us=2_000) if rots else drawn

    @classmethod
    def failing(cls, seed: int) -> Scenario:
        """Bounded input, tasks that fail now and then, most of all at the end, and attempts that mostly take too long."""
        rng = Random(seed ^ 0xFA11)
        mode: Mode = rng.choice(("aligned", "unaligned", "unaligned", "blocking"))
        shape: Shape = rng.choice(("chain", "diamond", "union"))
        return replace(
            cls.of(seed, guarantee="exactly_once", mode=mode, shape=shape),
            live=False,
            damages=False,
            rescales=False,
            crashes_max=0,
            batch_rows=rng.choice((1, 5)),
            interval_us=rng.choice((1_000, 5_000)),
            timeout_us=rng.choice((12_000, 20_000, 40_000)),
            failure_rate=rng.choice((0.001, 0.004)),
        )

    @property
    def assigns(self) -> bool:
        """Whether steps after the sources assign event time."""
        return self.seed % 3 == 1

    @property
    def in_files(self) -> bool:
        """Whether some sinks are files on the disk of the state, which a power cut hits with it."""
        return self.seed % 2 == 0 and self.guarantee == "exactly_once" and not self.rots

    def title(self) -> str:
        """How a failure names it."""
        return f"seed {self.seed} ({self.shape}, {self.guarantee}, {self.mode}, {self.tail or 'no tail'})"

    def cannot_repeat(self, *, uneven: bool) -> bool:
        """Whether an epoch may come out different when it is computed again, which stops the run with an error.

        Where barriers overtake rows, so they do the news that a task is idle or busy again: how the rows of others stood to it
        is not recorded. Nor is it at barriers whose attempt was given up (`uneven`), of which a cut knows only where each source
        stood: not how its rows stood to those of another, nor what waited for a barrier.
        """
        if self.live and (self.mode == "unaligned" or (uneven and len(self.partitions) > 1)):
            return True
        return uneven and self.tail is not None and self.tail.goes_by_barriers

    def rows(self) -> list[Row]:
        """Every row."""
        return [row for source in self.partitions for partition in source for row in partition]


def _rows(rng: Random, ids: object, count: int) -> tuple[Row, ...]:
    """Rows whose time moves on with some disorder, a few of them late."""
    now, rows = rng.randint(0, 20), []
    for _ in range(count):
        now += rng.choice((0, 1, 1, 2, 7))
        back = rng.choice((0, 0, 0, 1, 3, LATENESS_S, LATENESS_S + 1, 25))
        rows.append(Row(id=next(ids), k=rng.randrange(5), second=now - back, n=rng.randrange(4)))  # type: ignore[call-overload]
    return tuple(rows)


@dataclass(frozen=True, slots=True)
class World:
    """The outside of a pipeline: it survives every crash."""

    plan: Plan
    sinks: dict[str, MemorySink]
    sources: list[MemorySource]


def build(scenario: Scenario) -> World:
    """The pipeline of a scenario, with its sources and sinks."""
    pipeline = Pipeline(f"sim-{scenario.shape}", guarantee=scenario.guarantee, mode=scenario.mode)
    sinks = {name: MemorySink() for name in SINKS}
    sources = [_rows_of(partitions, live=scenario.live) for partitions in scenario.partitions]
    timing: dict[str, Any] = {
        "lateness": f"{LATENESS_S}s",
        "max_ahead": MAX_AHEAD[scenario.seed % len(MAX_AHEAD)],
        "idle_after": f"{IDLE_US}us" if scenario.live else None,
    }
    streams = [
        timed_source(pipeline, f"source{number}", memory(rows), timing, assigned=scenario.assigns)
        for number, rows in enumerate(sources)
    ]
    stream = _shaped(scenario.shape, streams)
    stream.sink("rows", memory(sinks["rows"]))
    stream.group_by("k").agg(name="count_by_k", n="count(*)", top="max(id)").sink("running", memory(sinks["running"]))
    if scenario.shape != "loop":
        window = tumbling(f"{WINDOW_S}s")
        windows = stream.group_by("k").window(window).agg(name="windows_by_k", n="count(*)", total="sum(id)")
        windows.sink("windows", memory(sinks["windows"]))
        if scenario.late_sink or scenario.live:
            windows.late.sink("late", memory(sinks["late"]))
    if scenario.smooths:
        smooth = stream.group_by("k").ewma(name="smooth_by_k", mean="id", alpha=ALPHA)
        smooth.sink("means", memory(sinks["means"]))
        if scenario.live:
            smooth.late.sink("overtaken", memory(sinks["overtaken"]))
    if scenario.deduplicates:
        firsts = stream.deduplicate("n", "k", within=f"{WITHIN_S}s", name="first_by_k")
        firsts.sink("firsts", memory(sinks["firsts"]))
        if scenario.live:
            firsts.late.sink("missed", memory(sinks["missed"]))
    if scenario.tail is not None:
        scenario.tail.attach(stream, streams, sinks)
    return World(pipeline.plan(), sinks, sources)


def timed_source(
    pipeline: Pipeline, name: str, connector: ConnectorSpec, timing: dict[str, Any], *, assigned: bool
) -> Stream:
    """A source with event time. `assigned`: it has none of its own, and a step after it assigns the same times."""
    if not assigned:
        return pipeline.source(name, connector, schema=SCHEMA, time="ts", **timing)
    stream = pipeline.source(name, connector, schema=SCHEMA)
    moved = stream.filter("id >= 0", name=f"{name}_all").with_columns("unix_micros(ts) AS us", name=f"{name}_us")
    return moved.with_time("timestamp_micros(us) AS ts", **timing, name=f"{name}_time").select(
        *SCHEMA, name=f"{name}_rows"
    )


def _rows_of(partitions: Sequence[Sequence[Row]], *, live: bool) -> MemorySource:
    return MemorySource([] if live else [[row.record() for row in partition] for partition in partitions])


def _shaped(shape: Shape, streams: Sequence[Stream]) -> Stream:
    first = streams[0]
    match shape:
        case "chain":
            return first.filter("id % 7 <> 3")
        case "diamond":
            return first.filter("id % 2 = 0", name="even").union(first.filter("id % 2 <> 0", name="odd"))
        case "union":
            return first.union(*streams[1:]).filter("id % 7 <> 3")
        case "loop":
            return first.iterate(
                lambda s: (s.filter("n > 0", name="again").with_columns("n - 1 AS n"), s.filter("n = 0", name="out"))
            )


@dataclass(frozen=True, slots=True)
class Expected:
    """What must come of a scenario, worked out row by row."""

    ids: Counter[int]
    counts: Counter[int]
    """Rows by key."""
    windows: dict[tuple[int, int], tuple[int, int]]
    """By key and window start: how many rows, and the sum of their ids."""
    late: Counter[int]


def expect(scenario: Scenario) -> Expected:
    """The oracle."""
    ids: Counter[int] = Counter()
    counts: Counter[int] = Counter()
    late: Counter[int] = Counter()
    windows: dict[tuple[int, int], tuple[int, int]] = {}
    all_late = late_of([partition for source in scenario.partitions for partition in source], WINDOW_S)
    for row in scenario.rows():
        if not passes(scenario.shape, row):
            continue
        ids[row.id] += 1
        counts[row.k] += 1
        if row.id in all_late:
            late[row.id] += 1
            continue
        window = (row.k, row.second // WINDOW_S * WINDOW_S)
        n, total = windows.get(window, (0, 0))
        windows[window] = (n + 1, total + row.id)
    return Expected(ids, counts, windows, late)


def means_of(rows: Iterable[Row]) -> dict[int, float]:
    """The mean of each row's key after it, by the row's id."""
    latest: dict[int, float] = {}
    found = {}
    for row in in_order(rows):
        before = latest.get(row.k)
        latest[row.k] = row.id if before is None else ALPHA * row.id + (1 - ALPHA) * before
        found[row.id] = latest[row.k]
    return found


def firsts_of(rows: Iterable[Row]) -> Counter[int]:
    """The ids of rows that none with the same `k` and `n` lies shortly before, except those that are left out themselves."""
    kept: dict[tuple[int, int], int] = {}
    found: Counter[int] = Counter()
    for row in in_order(rows):
        before = kept.get((row.k, row.n))
        if before is None or row.second - before >= WITHIN_S:
            kept[row.k, row.n] = row.second
            found[row.id] += 1
    return found


def passes(shape: Shape, row: Row) -> bool:
    """Whether a row comes out of the stateless part of the pipeline."""
    return row.id % 7 != 3 if shape in {"chain", "union"} else True
