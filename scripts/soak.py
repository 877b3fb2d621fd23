"""Run a fleet for long: three gateways, a hub and a center as real processes, and judge rows, memory and open files.

`--minutes 60`: in the first half processes are killed (SIGKILL) and paused, networks are cut; in the second half networks are cut and processes paused,
but none is killed, so that each lives for long enough to see whether its memory grows. `--overload`: the lines carry a tenth of what the
gateways have to send, and their outboxes are small; then the center is away for as long; then all is whole, and everything has to arrive.
Either way no row may be lost, doubled or late, memory must be bounded, and memory and open files flat. Exits with 1 otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import polars as pl
from demo import feeding
from demo_fleet import Command, DemoError, Fleet, make_fleet
from demo_oracle import json_rows, judge_alarms, judge_windows
from demo_watch import Watch
from soak_usage import MIB, OF_JAVA, Growth, Usage, family

from fordstone.hub.store.log_schema import CACHE_BYTES
from fordstone.hub.store.sqlite import LOG_NAME

PIPELINE = Path(__file__).with_name("soak_pipeline.py")
READY_SECONDS_MAX = 600.0
CATCH_UP_SECONDS_MAX = 1_800.0
LOOK_SECONDS = 1.0
SAMPLE_SECONDS = 5.0
FAULT_SECONDS = 10.0
"""Something goes wrong as often on average; more often in a short run, so that each kind of fault comes."""
FAULTS_PER_HALF = 16
GROWTH_MAX, SPARE_BYTES, SPARE_FILES = 1.1, 24 << 20, 16
BOUND_BYTES = {"the hub": 700 << 20, "the center": 2 << 30, f"the center{OF_JAVA}": 3 << 30}
"""The heap of a local Spark has 2 GiB."""
GATEWAY_BOUND_BYTES = 700 << 20
OUTBOX_MAX = "1MB"
"""Of a gateway under overload: full after a minute, so that it stops reading."""
FULL = b"the outbox is full"
LEVEL_SECONDS = 60.0
"""A center is level again when it has counted all rows but those of the last 60 seconds."""


class Soak:
    """One run."""

    def __init__(self, fleet: Fleet, *, seed: int, on_spark: bool) -> None:
        self.fleet = fleet
        self.watch = Watch(fleet)
        self.usage = Usage()
        self.faults: Counter[str] = Counter()
        self._rng = random.Random(seed)
        self._on_spark = on_spark
        self._sampled = 0.0
        self.recovery = ""
        self._began = self._fed = time.monotonic()

    def start(self) -> None:
        fleet = self.fleet
        fleet.hub.start()
        self.until(lambda: fleet.client().healthz(), READY_SECONDS_MAX, "the hub answers")
        for gateway in fleet.gateways:
            gateway.command.start()
        fleet.center.start()
        self.until(lambda: self._progress() > 0, READY_SECONDS_MAX, "the center runs")
        self.say("all processes run; the devices begin")
        self.watch.start()
        self._fed = time.monotonic()

    def faults_for(self, seconds: float, *, kills: bool) -> None:
        """Kill each kind of process, cut and pause once; then something random goes wrong every ten seconds or so."""
        until = time.monotonic() + seconds
        rate = 1 / min(FAULT_SECONDS, seconds / FAULTS_PER_HALF)
        some = [self.cut, self.freeze, *([self.kill, self.kill] if kills else [])]
        first = [self.cut, self.freeze]
        if kills:
            gateway = self._rng.choice(self.fleet.gateways).command
            first += [partial(self.kill, command) for command in (self.fleet.hub, self.fleet.center, gateway)]
        self._rng.shuffle(first)
        while time.monotonic() < until:
            self.pause(min(self._rng.expovariate(rate), max(0.0, until - time.monotonic())))
            if time.monotonic() < until:
                (first.pop() if first else self._rng.choice(some))()

    def kill(self, command: Command | None = None) -> None:
        if command is None:
            # Spark takes ten seconds to start again, so that it is killed less often than the others.
            weights = [2, 1 if self._on_spark else 3, *(3 for _ in self.fleet.gateways)]
            command = self._rng.choices(self.fleet.commands, weights)[0]
        command.kill()
        self.note(f"kill {command.name}")
        self.pause(self._rng.uniform(0.0, 4.0))
        command.start()
        if command is self.fleet.hub:
            self.until(lambda: self.fleet.client().healthz(), READY_SECONDS_MAX, "the hub answers again")

    def cut(self) -> None:
        gateway = self._rng.choice(self.fleet.gateways)
        gateway.network.cut()
        self.note(f"cut {gateway.name}")
        self.pause(self._rng.choice((0.5, 3.0, 20.0)))
        gateway.network.restore()

    def freeze(self) -> None:
        """Stop a process in the middle of what it does, as a machine without processor time would."""
        command = self._rng.choice(self.fleet.commands)
        processes = family(command.pid) if command.pid is not None else []
        send(processes, signal.SIGSTOP)
        self.note(f"pause {command.name}")
        self.pause(self._rng.choice((0.3, 2.0, 8.0)), check=False)
        send(processes, signal.SIGCONT)

    def overload(self, seconds: float, bytes_per_s: float) -> None:
        """The lines carry less than there is to send; then there is nobody to read at the hub."""
        for gateway in self.fleet.gateways:
            gateway.network.bytes_per_s = bytes_per_s / 10
        self.say(f"each line carries {bytes_per_s / 10:,.0f} of {bytes_per_s:,.0f} bytes per second")
        self.pause(seconds)
        self.fleet.center.kill()
        self.say("the center is away")
        for gateway in self.fleet.gateways:
            gateway.network.bytes_per_s = None
        self.pause(seconds)
        self.fleet.center.start()
        counted, began = self.watch.counted, time.monotonic()
        backlog = sum(gateway.devices.rows for gateway in self.fleet.gateways) - counted
        self.say(f"the center is back, and the lines are whole; {backlog:,} rows wait")
        self.until(self._is_level, CATCH_UP_SECONDS_MAX, f"at most the input of {LEVEL_SECONDS:.0f} s waits")
        took = time.monotonic() - began
        self.recovery = f"{backlog:,} rows waited; level again after {took:.0f} s, {(self.watch.counted - counted) / took:,.0f} rows/s"
        self.say(self.recovery)

    def finish(self) -> None:
        produced = sum(gateway.devices.rows for gateway in self.fleet.gateways)
        self.say(f"the devices have stopped, after {produced:,} rows")
        began = time.monotonic()
        self.until(lambda: self.watch.counted >= produced, CATCH_UP_SECONDS_MAX, "the center has counted every row")
        self.say(f"the center has caught up, after {time.monotonic() - began:.0f} s")
        for gateway in self.fleet.gateways:
            gateway.command.stop()
        self.fleet.center.stop()
        self.fleet.hub.stop()

    # Waiting and watching.

    def pause(self, seconds: float, *, check: bool = True) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._look(check=check)
            time.sleep(min(left, LOOK_SECONDS))

    def until(self, reached: Callable[[], bool], seconds_max: float, what: str) -> None:
        until = time.monotonic() + seconds_max
        while not reached():
            if time.monotonic() > until:
                raise DemoError(
                    f"timed out after {seconds_max:.0f} s while waiting until {what}. Logs: {self.fleet.folder}"
                )
            self._look(check=True)
            time.sleep(LOOK_SECONDS / 2)

    def _is_level(self) -> bool:
        """Whether rows wait only for the time that windows, lateness and checkpoints take."""
        produced, seconds = sum(one.devices.rows for one in self.fleet.gateways), time.monotonic() - self._fed
        return produced - self.watch.counted <= LEVEL_SECONDS * produced / seconds

    def note(self, what: str) -> None:
        self.faults[what] += 1
        self.say(what)

    def say(self, what: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
        print(f"{minutes:4d}:{seconds:02d}  {self.watch.counted:>12,} rows counted  {what}", flush=True)

    def _look(self, *, check: bool) -> None:
        if check:
            self.fleet.check()
            self.watch.look()
        if time.monotonic() - self._sampled >= SAMPLE_SECONDS:
            self._sampled = time.monotonic()
            self.usage.look(self.fleet.commands, self._sampled)

    def _progress(self) -> int:
        lines = self.fleet.center.log.read_bytes().splitlines()
        return sum(line.startswith(b'{"event":"progress"') and b'"epoch":0,' not in line for line in lines)


def send(processes: list[int], number: int) -> None:
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def judge(fleet: Fleet, soak: Soak, *, overload: bool) -> bool:
    """Print what was found, and return whether all of it is right."""
    written = pl.concat([gateway.devices.written() for gateway in fleet.gateways])
    verdict = judge_windows(written, fleet.center.folder / "out" / "per_device")
    alarms = judge_alarms(written, [gateway.command.folder / "out" / "alarms" for gateway in fleet.gateways])
    late = sum(1 for _ in json_rows(fleet.center.folder / "out" / "late", "*.jsonl"))
    print(f"faults: {', '.join(f'{count} x {name}' for name, count in sorted(soak.faults.items())) or 'overload only'}")
    print(
        f"rows: {verdict.produced:,} written, {verdict.counted:,} counted, {verdict.lost:,} lost, {verdict.doubled:,} doubled, {late:,} late; "
        f"{verdict.wrong:,} of {verdict.windows:,} windows wrong; {alarms.unfounded:,} of {alarms.alarms:,} alarms wrong"
    )
    judged = [
        describe(growth, cache_bytes=log_cache_bytes(fleet) if growth.name == fleet.hub.name else 0)
        for growth in soak.usage.growth()
    ]
    good = verdict.good and not late and not alarms.unfounded and all(judged)
    if overload:
        full = sum(FULL in gateway.command.log.read_bytes() for gateway in fleet.gateways)
        print(f"outboxes: {full} of {len(fleet.gateways)} were full. {soak.recovery}")
        return good and full == len(fleet.gateways)  # otherwise it was no overload
    missing = missing_faults(soak.faults, [command.name for command in (fleet.hub, fleet.center)])
    if missing:
        print(f"never happened: {', '.join(missing)}")
    return good and not missing


def missing_faults(faults: Mapping[str, int], killed: Sequence[str]) -> list[str]:
    """What a run of random faults lacks: each kind of process is killed, some network is cut, some process paused."""
    wanted = [*(f"kill {name}" for name in killed), "kill gateway", "cut gateway", "pause"]
    return [one for one in wanted if not any(name.startswith(one) for name in faults)]


def log_cache_bytes(fleet: Fleet) -> int:
    """Return the most that the hub keeps of its log in memory: that grows with the log, up to a bound."""
    return min(CACHE_BYTES, (fleet.hub.folder / "data" / LOG_NAME).stat().st_size)


def describe(growth: Growth, *, cache_bytes: int = 0) -> bool:
    """Print the growth of one process, and return whether it is within its bounds. `cache_bytes`: of a cache that it may fill."""
    bound = BOUND_BYTES.get(growth.name, GATEWAY_BOUND_BYTES)
    flat = not growth.judged or growth.flat(
        share=GROWTH_MAX, spare_bytes=SPARE_BYTES + cache_bytes, spare_files=SPARE_FILES
    )
    words = "too young to judge" if not growth.judged else "flat" if flat else "GROWS"
    if growth.fills_heap and flat:
        words = "within its bound"
    if cache_bytes:
        words += f" (up to {cache_bytes / MIB:.0f} MiB are a cache)"
    if growth.memory_peak > bound:
        words += f", BEYOND its bound of {bound // MIB} MiB"
    print(
        f"{growth.name}: {growth.memory_before // MIB} -> {growth.memory_after // MIB} MiB (peak {growth.memory_peak // MIB}, "
        f"{growth.mib_per_hour:+.0f} MiB per hour), {growth.files_before} -> {growth.files_after} open files, "
        f"in {growth.minutes:.1f} min: {words}"
    )
    return flat and growth.memory_peak <= bound


def run(soak: Soak, given: argparse.Namespace) -> None:
    seconds = given.minutes * 60
    soak.start()
    with feeding(soak.fleet) as end_feeding:
        if given.overload:
            soak.pause(min(60.0, seconds / 4))
            sent = [gateway.network.sent_bytes for gateway in soak.fleet.gateways]
            soak.pause(min(30.0, seconds / 8))
            each = [g.network.sent_bytes - before for g, before in zip(soak.fleet.gateways, sent, strict=True)]
            soak.overload(seconds / 3, max(each) / min(30.0, seconds / 8))
            soak.pause(seconds / 3)
        else:
            soak.faults_for(seconds / 2, kills=True)
            soak.faults_for(seconds / 2, kills=False)
        end_feeding()
    soak.finish()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/fordstone-soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="time for which devices write (60)")
    parser.add_argument(
        "--overload", action="store_true", help="overload the lines and the hub instead of random faults"
    )
    parser.add_argument("--seed", type=int, default=int(time.time()) % 10_000, help="seed of readings and faults")
    parser.add_argument("--devices", type=int, default=100, help="number of devices of each gateway (100)")
    parser.add_argument("--rate", type=float, default=10.0, help="readings per second of each device (10)")
    parser.add_argument("--center", choices=["spark", "local"], default="spark", help="engine of the center")
    parser.add_argument("--out", type=Path, help="a new directory for everything; a temporary one by default")
    given = parser.parse_args()
    if given.out is not None and given.out.exists():
        parser.error(f"{given.out} exists already. Name a new directory.")
    folder = (given.out or Path(tempfile.mkdtemp(prefix="fordstone-soak-"))).absolute()
    fleet = make_fleet(
        folder,
        gateways=3,
        devices=given.devices,
        rate=given.rate,
        seed=given.seed,
        local=given.center == "local",
        pipeline=PIPELINE,
        edge_options=("--outbox-max", OUTBOX_MAX) if given.overload else (),
        roll_seconds=120.0,
    )
    print(f"Seed {given.seed}. Everything is in {folder}.", flush=True)
    soak = Soak(fleet, seed=given.seed, on_spark=given.center == "spark")
    try:
        run(soak, given)
    except DemoError as error:
        print(f"The soak failed: {error}")
        return 1
    finally:
        fleet.close()
        soak.watch.close()
    good = judge(fleet, soak, overload=given.overload)
    print("All of it is right." if good else "NOT all of it is right.")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
