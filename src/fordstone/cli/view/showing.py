"""Choose how a run is shown, and show it from its beginning to its end; and print what machines read."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fordstone.cli.errors import Misuse
from fordstone.cli.view.view import JsonView, LineView, LogView, View
from fordstone.connectors.base import Capability
from fordstone.connectors.registry import capabilities

if TYPE_CHECKING:
    from fordstone.plan.plan import Plan
    from fordstone.runtime.progress import Report


def make_view(
    plan: Plan,
    *,
    bounded: bool,
    dead_letters: Path,
    as_json: bool,
    batch_job: bool = False,
    logged_every: str | None = None,
) -> View:
    """JSON lines if they were asked for, else a live line for a terminal and plain ones for anything else.

    `logged_every`: standard error is for log lines alone, and progress one of them so often.
    """
    if as_json:
        check_stdout(plan)
        return JsonView(monotonic_us=_monotonic_us)
    if logged_every is not None:
        from fordstone.lang.duration import positive_us

        return LogView(monotonic_us=_monotonic_us, every_us=positive_us(logged_every, what="--progress-every"))
    plain = LineView(
        bounded=bounded,
        dead_letters=dead_letters,
        monotonic_us=_monotonic_us,
        wall_us=_wall_us,
        batch_job=batch_job,
    )
    if not sys.stderr.isatty():
        return plain
    from fordstone.cli.view.live import LiveView

    return LiveView(plain)


def shown(view: View, work: Callable[[], Report]) -> None:
    """Do the work while the view shows it; then its report, or what it raised."""
    try:
        with view:
            report = work()
    except Exception as error:
        view.failed(error)
        raise
    view.report(report)


def print_json(body: object) -> None:
    """One line for machines, on standard output."""
    import msgspec

    click.echo(msgspec.json.encode(body).decode())


def check_stdout(plan: Plan) -> None:
    """With --json, standard output is for the machine that reads it."""
    from fordstone.connectors.base import live_of
    from fordstone.plan import plan as p

    printing = [
        step.name
        for step in plan.steps
        if isinstance(step, p.Sink)
        and Capability.PRINTS in capabilities(step.connector)
        and live_of(step.connector) is None
    ]
    if printing:
        raise Misuse(
            f"--json needs stdout for itself, and sink {', '.join(printing)} prints there. Let the sink write files, or leave --json out."
        )


def _monotonic_us() -> int:
    return time.monotonic_ns() // 1_000


def _wall_us() -> int:
    return time.time_ns() // 1_000
