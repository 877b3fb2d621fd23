"""Run a whole engine under a seed: random interleavings, crashes at any step and in any disk operation, then judge.

The engine is the real one, with tasks, gates, coordinator, writer and store; clock, disk and scheduler are the
simulation's. What is judged are the invariants in docs/architecture.md: consistent cuts, whole checkpoints, and per
guarantee nothing lost, nothing doubled, or neither.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from random import Random
from typing import Final

import msgspec
import polars as pl
from tests.simulation.judge import judge
from tests.simulation.rows import ROWS_BEGIN_US, Row, SimulationError, partition_name
from tests.simulation.scenario import Scenario, World, build, passes
from tests.simulation.sink_files import FilesOpener, collect
from tests.simulation.tails import LETTERS
from tests.simulation.tails import STEP as TAIL

from fordstone.connectors.base import Sink
from fordstone.connectors.memory import MemorySink
from fordstone.edge.config import RunConfig
from fordstone.edge.engine.engine import Engine, Environment
from fordstone.edge.run import recovered_engine
from fordstone.epochs.manifest import Cut, Manifest
from fordstone.epochs.store import CheckpointStore
from fordstone.errors import CheckpointError, FordstoneError, SinkError, StorageError
from fordstone.operators.aggregate.partial import ROWS
from fordstone.testing.memory_disk import MemoryDisk, PowerCut

STEPS_MAX: Final = 150_000
KEEP = 2
"""How many checkpoints are kept."""
DAMAGED = 1
"""How many of the newest ones are damaged, where a scenario damages any; with more than one, their manifests."""
FILLS_MAX: Final = 6
IDLE_ADVANCE_US: Final = 2_000
YEAR_US: Final = 365 * 24 * 3600 * 1_000_000
JUMP_RATE: Final = 0.01
"""How often the machine's clock is set, so that rows come within what is believed (rule 7)."""
JUMP_MAX_US: Final = 4_000_000
JUMP_BACK_MAX_US: Final = 12_000_000
FAILURES_MAX: Final = 8
FAILURES_AT_THE_END: Final = 0.05
"""How often a task fails, at each step, after all input was read and before the last epoch is sealed, where tasks fail at all."""
STEPS_AFTER_FAILURE: Final = (0, 5, 40, 200)
"""Number of steps of the other tasks, the coordinator and the writer after a task has failed: they have threads of their own."""
STALE_RATE: Final = 0.3
"""How often a damaged file that was another before is read as it was then."""
RECOVERY_CRASH_RATE: Final = 0.3
"""How often a start with a damaged checkpoint meets a power cut."""


class SimClock:
    """Moves when the simulation says so."""

    def __init__(self, now_us: int = ROWS_BEGIN_US + YEAR_US) -> None:
        self.now_us = now_us
        self.set_us = 0
        """By how much somebody has set the machine's clock."""

    def wall_us(self) -> int:
        """The simulated time, as the machine's clock shows it."""
        return self.now_us + self.set_us

    def monotonic_us(self) -> int:
        """The simulated time."""
        return self.now_us

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.now_us += int(seconds * 1e6)


@dataclass(slots=True)
class Tally:
    """What was tried: part of the result."""

    seeds: int = 0
    steps: int = 0
    power_cuts: int = 0
    kills: int = 0
    failures: int = 0
    checkpoints: int = 0
    given_up: int = 0
    replayed: int = 0
    rescaled: int = 0
    """Starts from a checkpoint with another parallelism."""
    full_disks: int = 0
    damaged: int = 0
    """Newest checkpoints in which a byte was flipped, or whose manifests were replaced."""
    rotten: int = 0
    """How often files of the state were damaged between two starts."""
    stale: int = 0
    """Files of which an earlier version was read."""
    misdirected: int = 0
    """Files of which the content of another was read."""
    refused: int = 0
    """Starts with damaged files that ended with an error."""
    set_forward: int = 0
    set_back: int = 0
    """How often the machine's clock was set."""

    @property
    def crashes(self) -> int:
        return self.power_cuts + self.kills

    def add(self, other: Tally) -> None:
        """Sum up."""
        for name in Tally.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def __str__(self) -> str:
        return ", ".join(f"{getattr(self, name):,} {name.replace('_', ' ')}" for name in self.__slots__)


class NoDeadLetters(Sink):
    """Takes dead letters of steps that have none."""

    def release(self, epoch: int, frame: pl.DataFrame) -> None:
        if frame.height:
            raise SimulationError(f"dead letters in epoch {epoch}: {frame}")

    def write(self, frame: pl.DataFrame) -> None:
        raise SimulationError(f"dead letters written at once: {frame}")

    def close(self) -> None:
        """Nothing to close."""


class TailLetters(Sink):
    """Takes the dead letters of the tail's function, once per epoch."""

    def __init__(self, kept: MemorySink) -> None:
        self._kept = kept

    def release(self, epoch: int, frame: pl.DataFrame) -> None:
        if not self._kept.released.setdefault(epoch, frame).equals(frame):
            raise SimulationError(f"the dead letters of epoch {epoch} became others: {frame}")

    def write(self, frame: pl.DataFrame) -> None:
        raise SimulationError(f"dead letters written at once: {frame}")

    def close(self) -> None:
        """Nothing to close."""


@dataclass(slots=True)
class _Run:
    scenario: Scenario
    world: World
    rng: Random
    disk: MemoryDisk = field(default_factory=MemoryDisk)
    clock: SimClock = field(default_factory=lambda: SimClock(ROWS_BEGIN_US))
    tally: Tally = field(default_factory=lambda: Tally(seeds=1))
    jumps: Random = field(default_factory=Random)
    kinds: Random = field(default_factory=Random)
    parallelism: int = 1
    damaged: bool = False
    rotten: bool = False
    """Some file was damaged, and the run has not been started since."""
    whole: MemoryDisk | None = None
    """The disk before that."""
    earlier: list[dict[str, bytes]] = field(default_factory=list)
    """The files at each crash so far."""
    stopped: bool = False
    failed: bool = False
    """A task has failed. Nothing is lost but what was in memory."""
    fills: int = 0
    fed: list[list[int]] = field(default_factory=list)
    """For each source, for each partition that has turned up, how many rows have."""
    cuts: dict[int, Cut] = field(default_factory=dict)
    """Of each epoch that was ever sealed: where it ended."""
    uneven: set[int] = field(default_factory=set)
    """Epochs in which an attempt to seal them was given up: barriers went through the pipeline before the one that counted."""

    @property
    def unfed(self) -> bool:
        """Whether rows are still to turn up."""
        return self.scenario.live and any(
            len(fed) < len(partitions) or any(count < len(rows) for count, rows in zip(fed, partitions, strict=False))
            for fed, partitions in zip(self.fed, self.scenario.partitions, strict=True)
        )

    def note_cuts(self, store: CheckpointStore) -> None:
        """Remember where the epochs that are there ended."""
        for epoch in store.epochs():
            with suppress(CheckpointError) if self.damaged else nullcontext():
                self.cuts[epoch] = store.cut(epoch)

    def epochs(self) -> dict[int, int]:
        """By id of a row: the epoch that it was read in."""
        found: dict[int, int] = {}
        for epoch in sorted(self.cuts):
            for row in rows_before(self.scenario, self.cuts[epoch]):
                found.setdefault(row.id, epoch)
        return found

    def feed(self) -> None:
        """Let a partition, or some rows of one, turn up."""
        number = self.rng.randrange(len(self.fed))
        fed, partitions, source = self.fed[number], self.scenario.partitions[number], self.world.sources[number]
        if len(fed) < len(partitions) and (not fed or self.rng.random() < 0.3):
            fed.append(0)
            source.add_partition()
        elif fed:
            index = self.rng.randrange(len(fed))
            rows = partitions[index][fed[index] : fed[index] + self.rng.randint(1, 6)]
            source.append(index, [row.record() for row in rows])
            fed[index] += len(rows)


def simulate(scenario: Scenario, *, check: Callable[[Engine], None] | None = None) -> Tally:
    """Run a scenario to its end and judge it; raises `SimulationError` with the seed if an invariant does not hold."""
    run = _Run(scenario, build(scenario), Random(scenario.seed ^ 0x5EED), parallelism=scenario.parallelism)
    run.jumps, run.kinds = Random(scenario.seed ^ 0xC10C), Random(scenario.seed ^ 0x57A7)
    run.fed = [[] for _ in scenario.partitions]
    try:
        while not _until_crash_or_end(run, check):
            if not (run.stopped or run.failed):
                _crash(run)
            run.stopped = run.failed = False
        if scenario.in_files:
            collect(run.disk, run.world.sinks)
        judge(scenario, run.world, run.epochs(), run.uneven)
    except (SimulationError, SinkError) as error:  # nothing damages the files of a sink but a power cut
        raise SimulationError(f"{scenario.title()}: {error}") from error
    except Exception as error:
        error.add_note(scenario.title())
        raise
    return run.tally


def _store(run: _Run) -> CheckpointStore:
    return CheckpointStore(run.disk, pipeline=run.world.plan.pipeline, node="sim", compression="none", keep=KEEP)


def _until_crash_or_end(run: _Run, check: Callable[[Engine], None] | None) -> bool:
    """Step a fresh engine; False: it crashed."""
    scenario, rng = run.scenario, run.rng
    config = RunConfig(
        node="sim",
        bounded=not run.unfed,
        parallelism=run.parallelism,
        interval=f"{scenario.interval_us}us",
        checkpoint_timeout=f"{scenario.timeout_us}us",
        keep=KEEP,
        batch_rows=scenario.batch_rows,
        channel_rows_max=scenario.channel_rows,
        waiting_bytes_max=scenario.waiting_bytes,
    )
    environment = Environment(
        clock=run.clock,
        disk=run.disk,
        choose=rng.randrange,
        dead_letters=lambda step: TailLetters(run.world.sinks[LETTERS]) if step == TAIL else NoDeadLetters(),
        opener=FilesOpener if scenario.in_files else None,
        wait=run.clock.wait,
    )
    try:
        store = _store(run)
        _check_whole(run, store)
        run.note_cuts(store)
        if run.damaged and run.tally.crashes < scenario.crashes_max and rng.random() < RECOVERY_CRASH_RATE:
            # In the middle of setting aside and replaying, or a little later.
            run.disk.cut_after = run.disk.changes + rng.randrange(40)
        before = copied(run.disk) if run.rotten else None
        try:
            plan = msgspec.structs.replace(run.world.plan, state=run.kinds.choice(scenario.states))
            engine = recovered_engine(plan, {}, config, environment, store, None)
        except StorageError:
            return False  # the disk is full, and a start has to be counted first: it is started again
        except FordstoneError:
            if before is None:
                raise
            # It says that something is damaged: somebody brings the state back from a copy.
            run.tally.refused += 1
            run.disk, run.damaged, run.rotten = run.whole or before, False, False
            return False
        run.rotten = False
        if engine.time_has_ended:
            return True
        run.tally.replayed += len(engine.resumption.replay)
        return _step_through(run, engine, store, check)
    except PowerCut:
        return False


def _step_through(run: _Run, engine: Engine, store: CheckpointStore, check: Callable[[Engine], None] | None) -> bool:
    scenario, rng = run.scenario, run.rng
    steppables = engine.steppables()
    sealed, idle, given_up = engine.writer.epoch, 0, 0
    # Damage needs a checkpoint before the one that it hits.
    first_crash = sealed + 1 + (scenario.damages and not sealed) if scenario.crashes_late else 0
    may_crash = run.tally.crashes < scenario.crashes_max
    goes_on: int | None = None
    for _ in range(STEPS_MAX):
        run.tally.steps += 1
        run.clock.now_us += rng.randrange(200)
        is_time = rng.random() < scenario.crash_rate if may_crash else False
        if is_time and engine.writer.epoch >= first_crash:
            if rng.random() < 0.5:
                return False
            run.disk.cut_after = run.disk.changes + rng.randrange(12)
            may_crash = False
        if scenario.failure_rate and goes_on is None and run.tally.failures < FAILURES_MAX:
            ends = engine.ended and rng.random() < FAILURES_AT_THE_END
            if ends or rng.random() < scenario.failure_rate:
                failed = rng.choice(engine.tasks)
                steppables = [one for one in steppables if one is not failed]
                goes_on = rng.choice(STEPS_AFTER_FAILURE)
        if goes_on is not None:
            goes_on -= 1
            if goes_on < 0 or engine.over:
                run.failed = True
                run.tally.failures += 1
                run.tally.given_up += engine.coordinator.given_up
                engine.close()
                return False
        _disturb(run, engine)
        idle = 0 if rng.choice(steppables).step() else idle + 1
        if engine.coordinator.given_up != given_up:
            given_up = engine.coordinator.given_up
            run.uneven.add(engine.writer.epoch + 1)
        if idle > 2 * len(steppables):
            run.clock.now_us += IDLE_ADVANCE_US
        if engine.writer.epoch != sealed:
            sealed = engine.writer.epoch
            run.tally.checkpoints += 1
            run.note_cuts(store)
            _check_cut(run, store, sealed)
            _check_clock(run, sealed)
            if check is not None:
                check(engine)
        if engine.over and goes_on is None:
            run.tally.given_up += engine.coordinator.given_up
            run.stopped = not engine.config.bounded
            return engine.config.bounded
    raise SimulationError(f"did not end within {STEPS_MAX} steps: {engine.progress()}")


def _disturb(run: _Run, engine: Engine) -> None:
    """What comes from outside: a full disk, a clock that is set, and rows that turn up, until there are none left and the run is stopped."""
    scenario, rng = run.scenario, run.rng
    if scenario.fills and run.fills < FILLS_MAX and rng.random() < 0.01:
        run.fills += 1
        run.tally.full_disks += 1
        run.disk.fail_next(rng.choice(("create", "append")), "full")
    if engine.config.bounded:
        return
    if run.jumps.random() < JUMP_RATE:
        forward = run.jumps.random() < 0.5
        run.clock.set_us += run.jumps.randrange(JUMP_MAX_US) if forward else -run.jumps.randrange(JUMP_BACK_MAX_US)
        run.tally.set_forward += forward
        run.tally.set_back += not forward
    if run.unfed:
        if rng.random() < 0.05:
            run.feed()
    elif rng.random() < 0.01:
        engine.stop()


def _crash(run: _Run) -> None:
    if run.rng.random() < 0.5:
        run.tally.power_cuts += 1
        run.disk.crash(run.rng)
    else:
        run.tally.kills += 1
        run.disk.kill()
    if run.scenario.rescales:
        before, run.parallelism = run.parallelism, run.rng.choice((1, 2, 3))
        run.tally.rescaled += bool(run.cuts) and run.parallelism != before
    if run.scenario.damages and not run.damaged:
        run.damaged = _damage(run)
        run.tally.damaged += run.damaged
    if run.scenario.rots and not run.rotten and _rot(run):
        run.damaged = run.rotten = True
    if run.scenario.rots:
        run.earlier.append({path: run.disk.read(path) for path in files_of(run.disk)})


def _damage(run: _Run) -> bool:
    """Flip a byte of the newest checkpoint: of its manifest, or of a run that only it names."""
    store = _store(run)
    epochs = store.epochs()
    if len(epochs) <= DAMAGED or run.scenario.cannot_repeat(uneven=not run.uneven.isdisjoint(epochs[-DAMAGED:])):
        return False
    base = f"{store.pipeline}/{store.node}"
    if DAMAGED > 1:
        for epoch in epochs[-DAMAGED:]:
            run.disk.damage(f"{base}/manifests/{epoch:012}.json", b"not a manifest")
        return True
    newest, before = store.manifest(epochs[-1]), store.manifest(epochs[-2])
    spared = {ref.digest for ref in before.runs()}
    if newest.cut.overtaking:
        # With its output gone too, what an unaligned epoch released cannot be known: that stops with an error, rightly.
        spared |= {ref.digest for segment in newest.segments for ref in segment.runs}
    only = sorted({ref.digest for ref in newest.runs()} - spared)
    path = f"{base}/manifests/{epochs[-1]:012}.json"
    if only and run.rng.random() < 0.7:
        path = f"{base}/runs/{run.rng.choice(only)}"
    data = bytearray(run.disk.read(path))
    data[run.rng.randrange(len(data))] ^= 1 << run.rng.randrange(8)
    run.disk.damage(path, bytes(data))
    return True


def _rot(run: _Run) -> bool:
    """Damage any files of the state, also such that older checkpoints need."""
    paths = sorted(files_of(run.disk))
    if not paths:
        return False
    run.whole = copied(run.disk)
    for path in run.rng.choices(paths, k=run.rng.choice((1, 1, 4))):
        run.disk.damage(path, _rotten(run, path, run.rng.choice(paths)))
    run.tally.rotten += 1
    return True


def _rotten(run: _Run, path: str, other: str) -> bytes:
    """What is read of a file: bytes are flipped, zeroed or gone, its last line was never written, it is as it was, or is another file."""
    data, rng = run.disk.read(path), run.rng
    earlier = [files[path] for files in run.earlier if files.get(path, data) != data]
    place = rng.randrange(len(data)) if data else 0
    if earlier and rng.random() < STALE_RATE:
        run.tally.stale += 1
        return rng.choice(earlier)
    match rng.randrange(5):
        case 0:
            flipped = bytes([(data[place] if data else 0) ^ 1 << rng.randrange(8)])
            return data[:place] + flipped + data[place + 1 :]
        case 1:
            return data[:place] + bytes(len(data) - place)
        case 2:
            return data[:place]
        case 3:
            run.tally.misdirected += 1
            return run.disk.read(other)
        case _:
            return data[: data.rstrip(b"\n").rfind(b"\n") + 1]


def files_of(disk: MemoryDisk, folder: str = "") -> Iterator[str]:
    """The paths of all files."""
    for name in disk.list(folder):
        path = f"{folder}/{name}".lstrip("/")
        try:
            disk.size(path)
        except FileNotFoundError:
            yield from files_of(disk, path)
        else:
            yield path


def copied(disk: MemoryDisk) -> MemoryDisk:
    """A disk with the same files, all of them durable."""
    copy = MemoryDisk()
    for path in files_of(disk):
        folder = path.rpartition("/")[0]
        copy.make_dirs(folder)
        copy.create(path, disk.read(path))
        copy.fsync(path)
        copy.fsync_dir(folder)
    copy.kill()
    return copy


# Invariants.


def _check_whole(run: _Run, store: CheckpointStore) -> None:
    """Every sealed checkpoint is whole, whatever the crash (unless we damaged it ourselves)."""
    if run.damaged:
        return
    for fact in store.survey(deep=True).checkpoints:
        if fact.problem is not None:
            raise SimulationError(f"sealed checkpoint {fact.epoch} is not whole after a crash: {fact.problem}")


def _check_cut(run: _Run, store: CheckpointStore, epoch: int) -> None:
    """State in the manifest = rows up to its positions, less what is in flight; every named run is there."""
    # Older ones may be damaged where the scenario damages any: that is found when they are needed.
    for kept in (epoch,) if run.scenario.rots else store.epochs():
        for ref in store.manifest(kept).runs() if kept in store.epochs() else ():
            fault = store.run_fault(ref)
            if fault is not None:
                raise SimulationError(f"checkpoint {kept} names a run that is not there: {fault}")
    if run.scenario.guarantee != "exactly_once" or epoch not in store.epochs():
        return
    manifest = store.manifest(epoch)
    expected = _prefix_counts(run.scenario, manifest)
    counted = _state_counts(store, manifest) + _in_flight_counts(run, store, manifest)
    if counted != expected:
        raise SimulationError(
            f"checkpoint {epoch} is not a consistent cut: counted {dict(counted)}, input holds {dict(expected)}"
        )


def _check_clock(run: _Run, epoch: int) -> None:
    """The operators' clock never goes back, whatever becomes of the machine's."""
    before, now = run.cuts.get(epoch - 1), run.cuts.get(epoch)
    if before is not None and now is not None and now.now_us < before.now_us:
        raise SimulationError(f"the operators' clock went back in epoch {epoch}, from {before.now_us} to {now.now_us}")


def _prefix_counts(scenario: Scenario, manifest: Manifest) -> Counter[int]:
    return Counter(row.k for row in rows_before(scenario, manifest.cut) if passes(scenario.shape, row))


def rows_before(scenario: Scenario, cut: Cut) -> Iterator[Row]:
    """The rows that were read before a cut."""
    for number, partitions in enumerate(scenario.partitions):
        cuts = cut.sources[f"source{number}"].partitions
        for index, rows in enumerate(partitions):
            at = cuts.get(partition_name(index))
            yield from rows[: at.position if at is not None else 0]


def _state_counts(store: CheckpointStore, manifest: Manifest) -> Counter[int]:
    counts: Counter[int] = Counter()
    for state in manifest.states:
        if state.step == "count_by_k":
            latest: dict[int, int] = {}
            for ref in state.runs:
                latest |= dict(store.read_run(ref).select("k", ROWS).iter_rows())
            counts.update(latest)
    return +counts


def _in_flight_counts(run: _Run, store: CheckpointStore, manifest: Manifest) -> Counter[int]:
    """Rows on their way to the counting step."""
    counts: Counter[int] = Counter()
    for log in manifest.channels:
        if any(f"-{step}" in log.channel for step in ("windows_by_k/", "smooth_by_k/", "first_by_k/", TAIL)):
            continue
        for item in log.items:
            if item.run is None:
                continue
            frame = store.read_run(item.run)
            weights = frame[ROWS].to_list() if ROWS in frame.columns else [1] * frame.height
            keep = [True] * frame.height
            if run.scenario.shape == "union" and ROWS not in frame.columns:
                keep = [number % 7 != 3 for number in frame["id"].to_list()]
            for k, weight, kept in zip(frame["k"].to_list(), weights, keep, strict=True):
                counts[k] += weight if kept else 0
    return +counts
