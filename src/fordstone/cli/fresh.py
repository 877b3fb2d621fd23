"""`--fresh`: show what would be set aside, ask, and say where it was put. The engines do the renaming (`runtime.fresh`)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fordstone.cli.errors import UsageError, UserError
from fordstone.cli.logs import is_json

if TYPE_CHECKING:
    from fordstone.plan.plan import Plan
    from fordstone.runtime.fresh import SetAside


def confirm_fresh(plan: Plan, states: Sequence[str | Path], *, yes: bool) -> list[SetAside]:
    """What a fresh start renames, after the user has agreed to it. `yes`: they have already."""
    from fordstone.runtime.fresh import to_set_aside

    moves = to_set_aside(plan, states)
    if not moves or yes:
        _show(moves, "sets aside")
        return moves
    if not sys.stdin.isatty():
        raise UsageError("--fresh asks before it renames anything, and there is no terminal to ask at. Add --yes.")
    _show(moves, "will set aside")
    if not click.confirm("Go on?", err=True):
        raise UserError("nothing was set aside, and nothing was run.")
    return moves


def check_yes(*, fresh: bool, yes: bool) -> None:
    """Reject --yes without the question that it answers."""
    if yes and not fresh:
        raise UsageError("--yes goes with --fresh.")


def set_tiers_aside(plan: Plan, states: Sequence[Path], locks: Sequence[Path], *, yes: bool) -> None:
    """Set aside the state and the outputs of a pipeline whose parts run as processes, none of which may be running."""
    from fordstone.runtime.fresh import set_aside
    from fordstone.storage.disk import OsDisk

    moves = confirm_fresh(plan, states, yes=yes)
    with ExitStack() as held:
        for place in locks:
            if place.is_dir():
                disk = held.enter_context(closing(OsDisk(place)))
                disk.lock()
        set_aside(moves)


def _show(moves: Sequence[SetAside], will: str) -> None:
    if is_json():
        return  # it is logged
    click.echo(f"--fresh {will}:" if moves else "--fresh: there is nothing to set aside.", err=True)
    for move in moves:
        click.echo(f"  {move.what}: {_near(move.path)} -> {_near(move.to)}", err=True)


def _near(path: Path) -> Path:
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
