"""`fordstone plan-interval`: how often to checkpoint, by the model of Young and Daly, beside what was measured."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

import click

from fordstone.cli import format as wording
from fordstone.cli.errors import Misuse
from fordstone.cli.help import TaughtCommand
from fordstone.cli.loading import load_pipeline
from fordstone.cli.logs import configure_logging
from fordstone.cli.memory import limit_polars
from fordstone.cli.stores import read_store
from fordstone.cli.view.showing import print_json
from fordstone.errors import ConfigError
from fordstone.lang.duration import UNIT_US, human_us, positive_us
from fordstone.protocol.interval import IntervalChoice, IntervalFacts, choose, overhead

if TYPE_CHECKING:
    from fordstone.cli.measurement import Measured

TABLE_US: Final = (
    100_000,
    500_000,
    1_000_000,
    5_000_000,
    30_000_000,
    60_000_000,
    300_000_000,
    1_800_000_000,
    3_600_000_000,
)
MEASURED_US: Final = (100_000, 250_000, 1_000_000)


@click.command(
    "plan-interval",
    cls=TaughtCommand,
    examples=[
        "fordstone plan-interval --state state --failure-every 7d",
        "fordstone plan-interval --measure cold_chain.py --recovery-goal 10s",
        "fordstone plan-interval --cost 20ms --failure-every 1d",
    ],
)
@click.option("--state", metavar="DIR", default=None, help="Measure the checkpoints in this state directory.")
@click.option("--pipeline", metavar="P", default=None, help="Which pipeline, if the directory holds several.")
@click.option("--node", metavar="N", default=None, help="Which node, if the directory holds several.")
@click.option(
    "--measure",
    metavar="FILE[:NAME]",
    default=None,
    help="Run this pipeline with and without checkpoints; its sinks are not written.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.5, 3600),
    default=5.0,
    show_default=True,
    help="For --measure: how long each of five runs lasts.",
)
@click.option("--parallelism", type=click.IntRange(1), default=1, show_default=True, help="For --measure.")
@click.option(
    "--cost", metavar="SPAN", default=None, help="What one checkpoint takes from the pipeline, if you know it."
)
@click.option("--restore", metavar="SPAN", default=None, help="How long loading a checkpoint takes, if you know it.")
@click.option(
    "--failure-every", metavar="SPAN", default="1d", show_default=True, help="The mean time between failures."
)
@click.option(
    "--recovery-goal", metavar="SPAN", default=None, help="In what time after a failure all should be as before."
)
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def plan_interval(*, as_json: bool, **given: Any) -> None:
    """Show how often to checkpoint, and what it costs.

    Checkpoints cost work; seldom ones cost more work done again after a failure. The model of Young and Daly finds the
    interval at which the two together are least, or the longest that meets a recovery goal. `run --interval auto` uses it.
    """
    configure_logging(0)
    measured = _measured(given)
    facts = IntervalFacts(
        cost_us=measured.cost_us,
        failure_every_us=_span(given, "failure_every") or 0,
        restore_us=measured.restore_us,
        recovery_goal_us=_span(given, "recovery_goal"),
    )
    choice = choose(facts)
    rows = _rows(facts, choice, measured)
    if as_json:
        print_json({"facts": dataclasses.asdict(facts), "choice": dataclasses.asdict(choice), "intervals": rows})
    else:
        click.echo(_text(facts, choice, measured, rows))


def _measured(given: dict[str, Any]) -> Measured:
    ways = [name for name in ("state", "measure", "cost") if given[name] is not None]
    if len(ways) != 1:
        raise Misuse(
            "say where the cost of a checkpoint comes from: --state DIR, --measure FILE or --cost SPAN, one of them."
        )
    limit_polars(given["parallelism"])
    from fordstone.cli.measurement import Measured, from_runs, from_store

    restore_us = _span(given, "restore")
    if (cost_us := _span(given, "cost")) is not None:
        found = Measured(cost_us=cost_us, restore_us=0.0, how=())
    elif given["state"] is not None:
        found = from_store(read_store(given["state"], given["pipeline"], given["node"]))
    else:
        pipeline = load_pipeline(given["measure"])
        found = from_runs(
            pipeline.plan(),
            pipeline.functions,
            MEASURED_US,
            seconds=given["seconds"],
            parallelism=given["parallelism"],
            tell=lambda text: click.echo(text, err=True),
        )
    return found if restore_us is None else dataclasses.replace(found, restore_us=restore_us)


def _span(given: dict[str, Any], name: str) -> int | None:
    if given[name] is None:
        return None
    try:
        return positive_us(given[name], what=f"--{name.replace('_', '-')}")
    except ConfigError as error:
        raise Misuse(str(error)) from error


def _rows(facts: IntervalFacts, choice: IntervalChoice, measured: Measured) -> list[dict[str, Any]]:
    intervals = {*TABLE_US, choice.interval_us, *measured.lost} | ({measured.now_us} if measured.now_us else set())
    return [
        {
            "interval_us": interval_us,
            "checkpoints": facts.cost_us / interval_us,
            "together": overhead(interval_us, facts),
            "recovery_us": facts.restore_us + interval_us / facts.replay_ratio,
            "measured": measured.lost.get(interval_us),
            "chosen": interval_us == choice.interval_us,
            "now": interval_us == measured.now_us,
        }
        for interval_us in sorted(intervals)
    ]


def _text(facts: IntervalFacts, choice: IntervalChoice, measured: Measured, rows: list[dict[str, Any]]) -> str:
    loading = f", loading one takes {wording.span(facts.restore_us)}" if facts.restore_us else ""
    lines = [
        f"A checkpoint costs {wording.span(facts.cost_us)}{loading}; something fails every {wording.span(facts.failure_every_us)}."
    ]
    lines += [f"  {text}" for text in measured.how]
    head = ["", "interval", "for checkpoints", "for failures", "together", "caught up within"]
    cells = []
    for row in rows:
        mark = "*" if row["chosen"] else "now" if row["now"] else ""
        parts = [row["checkpoints"], row["together"] - row["checkpoints"], row["together"]]
        cells.append(
            [
                mark,
                option(row["interval_us"]),
                *(wording.share(max(part, 0.0)) for part in parts),
                wording.span(row["recovery_us"]),
            ]
        )
        if measured.lost:
            cells[-1].append("" if row["measured"] is None else wording.share(row["measured"]))
    if measured.lost:
        head.append("measured")
    table = wording.table(head, cells, right=range(1, len(head)))
    chosen = f"* {option(choice.interval_us)}: {choice.because}. Use it with --interval {option(choice.interval_us)}, or let --interval auto follow the cost."
    return "\n".join([*lines, "", "Share of time lost, by the model:", "", table, "", chosen])


def option(interval_us: int) -> str:
    """An interval as `--interval` takes it, to three digits."""
    if interval_us >= UNIT_US["m"] and interval_us % UNIT_US["s"] == 0:
        return human_us(interval_us)
    unit = "s" if interval_us >= UNIT_US["s"] else "ms"
    return f"{interval_us / UNIT_US[unit]:.3g}{unit}"
