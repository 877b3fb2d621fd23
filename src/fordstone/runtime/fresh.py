"""Start over (`--fresh`): set aside the state and the outputs of a pipeline by renaming them. Nothing is ever deleted.

State is renamed first: a run that finds outputs without state is refused by the sinks, but state without its outputs would resume,
and the rows of old epochs would be gone. The caller holds the locks of the state.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from fordstone.connectors.base import Capability
from fordstone.connectors.registry import capabilities
from fordstone.errors import ConfigError
from fordstone.plan import plan as p
from fordstone.storage.disk import OsDisk

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAside:
    """Something that exists, and the name that it gets."""

    what: str
    path: Path
    to: Path


def to_set_aside(plan: p.Plan, states: Iterable[str | Path]) -> list[SetAside]:
    """What a fresh start of a plan renames: these directories of its state, and the outputs of its sinks. Only what exists.

    Raises:
        ConfigError: An output or the state is a URL, which cannot be renamed.
    """
    places = [("state", str(path)) for path in states]
    places += [
        (f"output of sink {step.name}", str(step.connector.options["path"]))
        for step in plan.steps
        if isinstance(step, p.Sink) and Capability.SET_ASIDE in capabilities(step.connector)
    ]
    for what, place in places:
        if "://" in place:
            raise ConfigError(
                f"fresh: the {what} is at {place}, which cannot be renamed from here. Move it away yourself, or choose another place for "
                "it, and leave --fresh out."
            )
    found = dict.fromkeys((what, Path(place).expanduser().absolute()) for what, place in places)
    return [SetAside(what=what, path=path, to=_free(path)) for what, path in found if path.exists()]


def set_aside(moves: Iterable[SetAside]) -> None:
    """Rename, durably, in this order. What has gone since is left out."""
    for move in moves:
        if not move.path.exists():
            continue  # it was inside of one that was renamed before
        with closing(OsDisk(move.path.parent)) as disk:
            disk.rename(move.path.name, move.to.name)
            disk.fsync_dir("")
        log.info("set aside", extra={"what": move.what, "path": str(move.path), "to": str(move.to)})


def was_set_aside(name: str) -> bool:
    """Whether a name is one that a fresh start gives."""
    return re.search(r"\.old-[0-9]+$", name) is not None


def _free(path: Path) -> Path:
    names = (path.with_name(f"{path.name}.old-{number}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())
