"""`python -m tests.simulation.cli`: run as many seeds of the simulation as wanted."""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from tests.simulation.fleet_tally import FleetTally
    from tests.simulation.simulator import Tally

os.environ.setdefault("POLARS_MAX_THREADS", "1")

BLOCK = 25


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--seeds", default=1000, show_default=True, help="How many seeds to run.")
@click.option("--first", default=0, show_default=True, help="The first seed.")
@click.option("--jobs", default=os.cpu_count() or 1, show_default=True, help="How many processes.")
@click.option("--stop-after", default=5, show_default=True, help="Stop when this number of seeds has failed.")
@click.option("--fleet", is_flag=True, help="Simulate fleets: nodes, a hub, a center and the network between them.")
@click.option("--large", is_flag=True, help="With --fleet: ten nodes with thousands of rows.")
@click.option(
    "--failing", is_flag=True, help="Simulate bounded runs whose tasks fail and whose attempts take too long."
)
def main(*, seeds: int, first: int, jobs: int, stop_after: int, fleet: bool, large: bool, failing: bool) -> None:
    """Simulate the whole engine under seeds: random graphs, rows, interleavings and crashes.

    A failure prints its seed; `python -m tests.simulation.cli --seeds 1 --first SEED` shows it again (with --fleet and --large, if it was one of these). Exit code
    1 if any failed.

    Example: python -m tests.simulation.cli --seeds 10000

    Example: python -m tests.simulation.cli --fleet --seeds 2000

    Example: python -m tests.simulation.cli --fleet --large --seeds 20
    """
    from tests.simulation.fleet_tally import FleetTally
    from tests.simulation.simulator import Tally

    if large and not fleet:
        raise click.UsageError("--large is for fleets: give --fleet as well.")
    block = 1 if large else BLOCK
    blocks = [range(start, min(start + block, first + seeds)) for start in range(first, first + seeds, block)]
    tally: Any = FleetTally() if fleet else Tally()
    failures, began, run = (
        0,
        time.monotonic(),
        (run_large_fleets if large else run_fleets if fleet else run_failing if failing else run_block),
    )
    with ProcessPoolExecutor(jobs) as pool, click.progressbar(length=seeds, label="seeds", file=sys.stderr) as bar:
        for future in as_completed([pool.submit(run, block) for block in blocks]):
            done, problems = future.result()
            tally.add(done)
            failures += len(problems)
            for problem in problems:
                click.echo(f"\n{problem}")
            bar.update(block)
            if failures >= stop_after:
                pool.shutdown(cancel_futures=True)
                break
    click.echo(f"{tally}, {failures} failed, {time.monotonic() - began:.0f} s")
    sys.exit(1 if failures else 0)


def run_failing(seeds: range) -> tuple[Tally, list[str]]:
    """Simulate bounded runs whose tasks fail; as `run_block`."""
    return run_block(seeds, failing=True)


def run_block(seeds: range, *, failing: bool = False) -> tuple[Tally, list[str]]:
    """Simulate some seeds; gives what was tried and the failures as text."""
    from tests.simulation.rows import SimulationError
    from tests.simulation.scenario import Scenario
    from tests.simulation.simulator import Tally, simulate

    tally, problems = Tally(), []
    for seed in seeds:
        try:
            tally.add(simulate(Scenario.failing(seed) if failing else Scenario.of(seed)))
        except SimulationError as error:
            problems.append(str(error))
        except Exception:  # noqa: BLE001 - shown to the person who asked
            problems.append(f"seed {seed}: {traceback.format_exc()}")
    return tally, problems


def run_large_fleets(seeds: range) -> tuple[FleetTally, list[str]]:
    """Simulate large fleets; as `run_block`."""
    return run_fleets(seeds, large=True)


def run_fleets(seeds: range, *, large: bool = False) -> tuple[FleetTally, list[str]]:
    """Simulate the fleets of some seeds; as `run_block`."""
    from tests.simulation.fleet import simulate_fleet
    from tests.simulation.fleet_scenario import FleetScenario
    from tests.simulation.fleet_tally import FleetTally
    from tests.simulation.rows import SimulationError

    # A hub that is crashed on purpose logs it as the failure that it would be.
    logging.disable(logging.CRITICAL)
    tally, problems = FleetTally(), []
    for seed in seeds:
        try:
            tally.add(simulate_fleet(FleetScenario.large(seed) if large else FleetScenario.of(seed)))
        except SimulationError as error:
            problems.append(str(error))
        except Exception:  # noqa: BLE001 - shown to the person who asked
            problems.append(f"fleet seed {seed}: {traceback.format_exc()}")
    return tally, problems


if __name__ == "__main__":
    main()
