"""Run a fleet on this machine: three gateways with 300 devices each, a hub, and a center on Spark or, with --center local, without a JVM.

Windows are counted on the gateways and merged at the center; the center sends the limits for alarms back. While it runs, one gateway is
killed with SIGKILL and started again, the hub is killed and started again, and the network of another gateway is cut. At
the end the center's results are compared with an oracle that shares no code with Fordstone. Exits with 1 if a single row
was lost, doubled or wrong.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import polars as pl
from demo_fleet import DemoError, Fleet, make_fleet
from demo_oracle import Alarms, Verdict, judge_alarms, judge_windows
from demo_report import Fault, Figure, Line, Outcome, Plot, Sketch, write_report
from demo_view import View
from demo_watch import Watch
from rich import box
from rich.console import Console
from rich.table import Table

READY_SECONDS_MAX = 600.0
CATCH_UP_SECONDS_MAX = 600.0
FEED_SECONDS = 0.1
LOOK_SECONDS = 0.5
DEAD_SECONDS, CUT_SECONDS = 4.0, 8.0
"""How long a fault lasts, at most as long as devices write."""
KILL_GATEWAY, KILL_HUB, CUT_NETWORK = 0.40, 0.55, 0.70
"""When each fault happens, as a share of the time that devices write."""


@contextmanager
def feeding(fleet: Fleet) -> Iterator[Callable[[], None]]:
    """Let all devices write, in a thread. Yield the function that ends it."""
    over = threading.Event()
    began = time.monotonic()

    def feed() -> None:
        while not over.wait(FEED_SECONDS):
            for gateway in fleet.gateways:
                gateway.devices.write_until(time.monotonic() - began)

    thread = threading.Thread(target=feed, daemon=True)

    def end() -> None:
        over.set()
        thread.join()

    thread.start()
    try:
        yield end
    finally:
        end()


class Demo:
    """One run of the demo."""

    def __init__(self, fleet: Fleet, watch: Watch, view: View, *, seconds: float) -> None:
        self.fleet = fleet
        self.watch = watch
        self.view = view
        self.faults: list[Fault] = []
        self._seconds = seconds

    def run(self, *, keep: bool) -> None:
        """Start all processes, cause the faults, and stop when the center has counted every row."""
        fleet, view = self.fleet, self.view
        fleet.hub.start()
        self.until(self.hub_answers, READY_SECONDS_MAX, "the hub answers")
        view.show("the hub answers")
        for gateway in fleet.gateways:
            gateway.command.start()
        fleet.center.start()
        view.show(f"{len(fleet.gateways)} gateways run; the center, on {fleet.center_engine}, is starting")
        self.until(self.center_runs, READY_SECONDS_MAX, "the center runs")
        view.show("the center runs; the devices begin")
        self.watch.start()
        with feeding(fleet) as end_feeding:
            self.pause_until_share(KILL_GATEWAY)
            self.kill_gateway()
            self.pause_until_share(KILL_HUB)
            self.kill_hub()
            self.pause_until_share(CUT_NETWORK)
            self.cut_network()
            self.pause_until_share(1.0)
            if keep:
                view.show("the fleet keeps running until Ctrl-C")
                self.wait_for_interrupt()
            end_feeding()
        produced = sum(gateway.devices.rows for gateway in fleet.gateways)
        view.show(f"the devices have stopped, after {produced:,} rows")
        self.until(lambda: self.watch.counted >= produced, CATCH_UP_SECONDS_MAX, "the center has counted every row")
        view.show("the center has caught up; all processes are stopped")
        for gateway in fleet.gateways:
            gateway.command.stop()
        fleet.center.stop()
        fleet.hub.stop()

    # Faults.

    def kill_gateway(self) -> None:
        gateway = self.fleet.gateways[1 % len(self.fleet.gateways)]
        gateway.command.kill()
        self.view.show(f"[bold red]kill -9[/] {gateway.name}, with all its processes")
        begins = self.watch.writing_seconds
        self.pause(min(DEAD_SECONDS, self._seconds))
        gateway.command.start()
        self.faults.append(Fault(part=gateway.name, what="killed", begins=begins, ends=self.watch.writing_seconds))
        self.view.show(f"{gateway.name} is started again")

    def kill_hub(self) -> None:
        self.fleet.hub.kill()
        self.view.show("[bold red]kill -9[/] the hub")
        begins = self.watch.writing_seconds
        self.pause(min(DEAD_SECONDS, self._seconds))
        self.fleet.hub.start()
        self.until(self.hub_answers, READY_SECONDS_MAX, "the hub answers again")
        self.faults.append(Fault(part="hub", what="killed", begins=begins, ends=self.watch.writing_seconds))
        self.view.show("the hub is started again")

    def cut_network(self) -> None:
        gateway = self.fleet.gateways[-1]
        gateway.network.cut()
        self.view.show(f"[bold red]the network of {gateway.name} is cut[/]")
        begins = self.watch.writing_seconds
        self.pause(min(CUT_SECONDS, self._seconds))
        gateway.network.restore()
        self.faults.append(Fault(part=gateway.name, what="cut off", begins=begins, ends=self.watch.writing_seconds))
        self.view.show(f"the network of {gateway.name} is back")

    # Waiting.

    def hub_answers(self) -> bool:
        return self.fleet.client().healthz()

    def center_runs(self) -> bool:
        """Whether the center has finished its first epoch, for which Spark needs some time."""
        lines = self.fleet.center.log.read_bytes().splitlines()
        return any(line.startswith(b'{"event":"progress"') and b'"epoch":0,' not in line for line in lines)

    def pause(self, seconds: float) -> None:
        """Watch the fleet for some seconds."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.look_on(min(left, LOOK_SECONDS))

    def pause_until_share(self, share: float) -> None:
        self.pause(max(0.0, share * self._seconds - self.watch.writing_seconds))

    def until(self, reached: Callable[[], bool], seconds_max: float, what: str) -> None:
        until = time.monotonic() + seconds_max
        while not reached():
            if time.monotonic() > until:
                raise DemoError(
                    f"timed out after {seconds_max:.0f} s while waiting until {what}. Logs: {self.fleet.folder}/*/fordstone.log"
                )
            self.look_on(LOOK_SECONDS / 2)

    def wait_for_interrupt(self) -> None:
        try:
            while True:
                self.look_on(LOOK_SECONDS)
        except KeyboardInterrupt:
            self.view.show("stopped by Ctrl-C")

    def look_on(self, seconds: float) -> None:
        self.fleet.check()
        self.watch.look()
        self.view.draw()
        time.sleep(seconds)


def figures_of(demo: Demo, verdict: Verdict, alarms: Alarms) -> list[Figure]:
    """Return the rows of the table at the end."""
    fleet, watch = demo.fleet, demo.watch
    sent = sum(gateway.network.sent_bytes for gateway in fleet.gateways)
    raw = sum(gateway.devices.raw_bytes for gateway in fleet.gateways)
    epochs = sum(view.head[-1][1] for view in watch.gateways.values() if view.head)
    seconds = watch.alarm_seconds
    to_center = watch.center_seconds
    return [
        Figure(name="rows produced", value=f"{verdict.produced:,}"),
        Figure(name="rows counted at the center", value=f"{verdict.counted:,}"),
        Figure(name="lost", value=f"{verdict.lost:,}", zero=True),
        Figure(name="doubled", value=f"{verdict.doubled:,}", zero=True),
        Figure(name="windows with wrong values", value=f"{verdict.wrong:,}", zero=True),
        Figure(name="windows (device and 10 s)", value=f"{verdict.windows:,}"),
        Figure(name="bytes of raw rows (JSON lines)", value=f"{raw:,}"),
        Figure(name="bytes sent to the hub, in total", value=f"{sent:,}"),
        Figure(name="bytes sent, as a share of raw", value=f"{sent / max(raw, 1):.1%}"),
        Figure(name="alarms at the gateways", value=f"{alarms.alarms:,}"),
        Figure(name="alarms repeated, recognised by their id", value=f"{alarms.again:,}"),
        Figure(name="alarms without cause", value=f"{alarms.unfounded:,}", zero=True),
        Figure(name="reading to alarm, median / 99 %", value=f"{_quantile(seconds, 0.5)} / {_quantile(seconds, 0.99)}"),
        Figure(
            name="reading to center, median / 99 %", value=f"{_quantile(to_center, 0.5)} / {_quantile(to_center, 0.99)}"
        ),
        Figure(name="checkpoints (epochs at the hub)", value=f"{epochs:,.0f}"),
        Figure(name="kills with SIGKILL", value=f"{sum(command.kills for command in fleet.commands):,}"),
    ]


def outcome_of(demo: Demo, verdict: Verdict, alarms: Alarms) -> Outcome:
    """Return the result in one sentence: what is wrong, of how many rows, after which faults."""
    kills = sum(command.kills for command in demo.fleet.commands)
    cuts = sum(fault.what == "cut off" for fault in demo.faults)
    return Outcome(
        text=(
            f"{verdict.lost:,} lost, {verdict.doubled:,} doubled of {verdict.produced:,} rows; {verdict.wrong:,} of {verdict.windows:,} "
            f"windows and {alarms.unfounded:,} of {alarms.alarms:,} alarms wrong; {kills} kills, {cuts} network cut{'' if cuts == 1 else 's'}."
        ),
        good=verdict.good and alarms.unfounded == 0,
    )


def plots_of(demo: Demo) -> list[Plot]:
    watch = demo.watch
    each = watch.gateways.items()
    return [
        Plot(
            title="Rows per second",
            text="Rows written by the devices, and counted at the center. Rows that were delayed count when they arrive.",
            axis="rows per second",
            lines=[
                Line(name="written", points=_rates(watch.produced)),
                Line(name="counted", points=_rates(watch.counts)),
            ],
        ),
        Plot(
            title="Lag of the center",
            text="The time since as many rows had been written as the center has counted.",
            axis="seconds",
            lines=[Line(name="all gateways", points=watch.lag)],
        ),
        Plot(
            title="Epochs at the hub, per node",
            text="A gateway that was cut off sends its outbox in order when it is connected again.",
            axis="epochs",
            lines=[Line(name=name, points=view.head) for name, view in each],
        ),
        Plot(
            title="Epochs waiting in the outbox",
            text="Epochs that are sealed on the gateway's disk, and not yet at the hub.",
            axis="epochs",
            lines=[Line(name=name, points=view.outbox) for name, view in each],
        ),
        Plot(
            title="What a checkpoint costs",
            text="The time from the report of the last task to the seal, with fsync.",
            axis="milliseconds",
            lines=[Line(name=name, points=view.checkpoint_ms) for name, view in each],
        ),
    ]


def _rates(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the growth of a count per second, over about two seconds."""
    span = max(1, round(2.0 / LOOK_SECONDS))
    return [
        (now, (count - before) / max(now - then, 1e-6))
        for (then, before), (now, count) in zip(points, points[span:], strict=False)
    ]


def _quantile(ordered: list[float], share: float) -> str:
    if not ordered:
        return "-"
    seconds = ordered[min(len(ordered) - 1, int(share * len(ordered)))]
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def table_of(figures: list[Figure]) -> Table:
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(justify="right")
    for figure in figures:
        style = "" if not figure.zero else "bold green" if figure.value == "0" else "bold red"
        table.add_row(figure.name, figure.value, style=style)
    return table


def run(fleet: Fleet, console: Console, given: argparse.Namespace) -> bool:
    """Run the whole demo, and return whether all results are right."""
    watch = Watch(fleet)
    view = View(console, fleet, watch, seconds=given.seconds)
    demo = Demo(fleet, watch, view, seconds=given.seconds)
    view.start()
    try:
        demo.run(keep=given.keep)
    finally:
        view.stop()
        fleet.close()
        watch.close()
    written = pl.concat([gateway.devices.written() for gateway in fleet.gateways])
    verdict = judge_windows(written, fleet.center.folder / "out" / "per_device")
    alarms = judge_alarms(written, [gateway.command.folder / "out" / "alarms" for gateway in fleet.gateways])
    figures = figures_of(demo, verdict, alarms)
    console.print(table_of(figures))
    report = given.report or fleet.folder / "report.html"
    outcome = outcome_of(demo, verdict, alarms)
    write_report(
        report,
        title=f"Fordstone: {len(fleet.gateways)} gateways, a hub, and a center on {fleet.center_engine}",
        outcome=outcome,
        text=f"Seed {given.seed}. Every result was compared with an oracle that shares no code with Fordstone. Times begin when the devices do.",
        sketch=Sketch(
            gateways=[gateway.name for gateway in fleet.gateways], devices=given.devices, engine=fleet.center_engine
        ),
        figures=figures,
        plots=plots_of(demo),
        faults=demo.faults,
    )
    console.print(f"{outcome.text} Seed: {given.seed}.", style="bold green" if outcome.good else "bold red")
    console.print(f"Report with plots: {report}", soft_wrap=True)
    return outcome.good


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=int(time.time()) % 10_000,
        help="seed of the readings; taken from the clock by default",
    )
    parser.add_argument("--seconds", type=float, default=75.0, help="time for which devices write (75)")
    parser.add_argument("--devices", type=int, default=300, help="number of devices of each gateway (300)")
    parser.add_argument("--rate", type=float, default=10.0, help="readings per second of each device (10)")
    parser.add_argument(
        "--center",
        choices=["spark", "local"],
        default="spark",
        help="engine of the center: Spark, or the edge engine without a JVM",
    )
    parser.add_argument("--keep", action="store_true", help="keep it running until Ctrl-C")
    parser.add_argument(
        "--out", type=Path, help="a new directory for input, state, output and logs; a temporary one by default"
    )
    parser.add_argument("--report", type=Path, help="path of the report; report.html in that directory by default")
    given = parser.parse_args()
    console = Console(highlight=False)
    folder = (given.out or Path(tempfile.mkdtemp(prefix="fordstone-demo-"))).absolute()
    if given.out is not None and given.out.exists():
        parser.error(f"{given.out} exists already. Name a new directory.")
    fleet = make_fleet(
        folder, gateways=3, devices=given.devices, rate=given.rate, seed=given.seed, local=given.center == "local"
    )
    try:
        good = run(fleet, console, given)
    except DemoError as error:
        console.print(f"The demo failed: {error}", markup=False)
        good = False
    except KeyboardInterrupt:
        console.print("Ended by Ctrl-C.")
        good = False
    console.print(f"Input, state, output and logs are in {folder}.", soft_wrap=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
