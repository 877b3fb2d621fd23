"""`fordstone example`: the input of the examples and of the pages of documentation, written into a folder.

The same seed gives the same rows on every machine, because the pages show results of them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import count, islice
from pathlib import Path
from typing import Any, Final, Literal, TextIO

import click

from fordstone.cli.errors import UserError
from fordstone.cli.options import HelpCommand, HelpGroup

FILES: Final = ("a", "b")
BEGINNINGS: Final = ["b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z"]
ENDINGS: Final = ["a", "e", "i", "o", "u", "ai", "ei", "ou", "an", "en", "in", "on"]
VOCABULARY: Final = [first + last for first in BEGINNINGS for last in ENDINGS]
BOXES_PER_GATEWAY: Final = 4
LATE_SHARE: Final = 0.02
IMPLAUSIBLE_SHARE: Final = 0.005
READINGS_START: Final = datetime(2026, 1, 1, tzinfo=UTC)
BOXES_START: Final = datetime(2025, 1, 1, tzinfo=UTC)
OPENED_EVERY_SECONDS: Final = 17
"""Seconds between two openings of a box."""

Row = dict[str, Any]

_seed = click.option("--seed", default=1, help="The same seed gives the same rows.")


def _into(default: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """`--into`."""
    return click.option(
        "--into", type=click.Path(path_type=Path, file_okay=False), default=default, help="Folder of the files."
    )


@click.group(
    cls=HelpGroup,
    examples=[
        "fordstone example readings                    6,000 readings in two files",
        "fordstone example boxes --devices 20 --live   20 boxes that send in real time, until Ctrl-C",
    ],
)
def example() -> None:
    """Write input for a first pipeline: JSON lines, in a folder.

    The tutorial and the examples use these rows.
    """


@example.command(cls=HelpCommand, examples=["fordstone example words --rows 100000", "head -n 2 in/words/a.jsonl"])
@click.option("--rows", type=click.IntRange(min=len(FILES)), default=2000, help="Number of rows in total.")
@_seed
@_into("in/words")
def words(*, rows: int, seed: int, into: Path) -> None:
    """Lines of text: {"line": "ba to ba"}.

    Some words are much more frequent than others, and some lines are empty. There are two files.
    """
    _write_files(into, rows, [lines_of(seed + part) for part in range(len(FILES))])


@example.command(
    cls=HelpCommand,
    examples=[
        "fordstone example readings --rows 6000",
        "fordstone example readings --rows 2000 --seed 9 --after 150 --into in/more",
    ],
)
@click.option("--rows", type=click.IntRange(min=len(FILES)), default=6000, help="Number of rows in total.")
@_seed
@click.option("--after", type=click.IntRange(min=0), default=0, help="Begin this number of seconds later.")
@_into("in/readings")
def readings(*, rows: int, seed: int, after: int, into: Path) -> None:
    """Temperatures of boxes at two gateways, one file per gateway.

    The columns are device, seq, ts and temp, with 20 rows per second and gateway. Rows are up to 4 s out of order. A few are up to 40 s late, and a few are
    implausible.
    """
    _write_files(into, rows, [readings_of(seed, gateway, after) for gateway in range(len(FILES))])


@example.command(
    cls=HelpCommand,
    examples=[
        "fordstone example boxes --devices 20 --seconds 60              one minute, all at once",
        "fordstone example boxes --devices 20 --seconds 60 --after 60   the minute after it, in the same file",
        "fordstone example boxes --devices 20 --live                    in real time, until Ctrl-C",
    ],
)
@click.option("--devices", type=click.IntRange(min=1), default=20, help="Number of boxes.")
@click.option("--seconds", type=click.IntRange(min=1), default=60, help="Seconds of readings, if not live.")
@click.option("--after", type=click.IntRange(min=0), default=0, help="Begin this number of seconds later, and append.")
@click.option("--live", is_flag=True, help="Write in real time, with the current time, until Ctrl-C.")
@click.option("--prefix", default="box-", help="Beginning of the names of boxes and of the file.")
@_seed
@_into("in")
def boxes(*, devices: int, seconds: int, after: int, live: bool, prefix: str, seed: int, into: Path) -> None:
    """Temperatures of boxes, one reading per box and second.

    The columns are device, ts and temp. Rows are up to 2 s out of order. Every box is opened for a second every 17 s,
    and is 12 degrees warmer then.
    """
    if live:
        _write_live(into / f"{prefix}{datetime.now(UTC):%H%M%S}.jsonl", devices, seed, prefix)
        return
    file = into / f"{prefix}0.jsonl"
    with _opened(file, "a" if after else "w") as out:
        for second in range(after, after + seconds):
            rows = boxes_at(second, BOXES_START + timedelta(seconds=second), devices, seed, prefix)
            out.writelines(map(_line, rows))
    click.echo(f"wrote {devices * seconds:,} rows to {file}")


def lines_of(seed: int) -> Iterator[Row]:
    """Yield lines of words forever."""
    rng = random.Random(seed)  # noqa: S311 - the same rows for the same seed
    weights = [1 / rank for rank in range(1, len(VOCABULARY) + 1)]
    while True:
        yield {"line": " ".join(rng.choices(VOCABULARY, weights, k=rng.randrange(12)))}


def readings_of(seed: int, gateway: int, after: int) -> Iterator[Row]:
    """Yield readings of one gateway's boxes forever."""
    rng = random.Random(f"{seed}/{gateway}")  # noqa: S311 - the same rows for the same seed
    seq = 0
    while True:
        seq += 1
        box = gateway * BOXES_PER_GATEWAY + rng.randrange(BOXES_PER_GATEWAY)
        delay_s = 40 * rng.random() if rng.random() < LATE_SHARE else 4 * rng.random()
        at = READINGS_START + timedelta(seconds=after + seq * 0.05 - delay_s)
        temp = 999.0 if rng.random() < IMPLAUSIBLE_SHARE else round(rng.gauss(2.0 + box / 4, 2.5), 2)
        yield {"device": f"box-{box:02d}", "seq": seq, "ts": at.isoformat(), "temp": temp}


def boxes_at(second: int, at: datetime, devices: int, seed: int, prefix: str) -> Iterator[Row]:
    """Yield the readings of all boxes in one second."""
    rng = random.Random(f"{seed}/{second}")  # noqa: S311 - the same rows for the same seed
    for box in range(devices):
        opened = (second + 5 * box) % OPENED_EVERY_SECONDS == OPENED_EVERY_SECONDS - 1
        temp = rng.gauss(2.0 + box % 5, 0.5) + (12.0 if opened else 0.0)
        moment = at - timedelta(milliseconds=rng.randrange(2000))
        yield {"device": f"{prefix}{box:03d}", "ts": moment.isoformat(), "temp": round(temp, 2)}


def _write_files(into: Path, rows: int, parts: Iterable[Iterator[Row]]) -> None:
    for name, part in zip(FILES, parts, strict=True):
        file = into / f"{name}.jsonl"
        with _opened(file, "w") as out:
            out.writelines(map(_line, islice(part, rows // len(FILES))))
        click.echo(f"wrote {rows // len(FILES):,} rows to {file}")


def _write_live(file: Path, devices: int, seed: int, prefix: str) -> None:
    """Write one reading per box and second, until the process is asked to stop."""
    from fordstone.runtime.signals import Signals

    click.echo(f"writing {devices} rows per second to {file}, until Ctrl-C")
    with Signals() as stop, _opened(file, "w") as out:
        for second in count():
            out.writelines(map(_line, boxes_at(second, datetime.now(UTC), devices, seed, prefix)))
            out.flush()
            if stop.wait(1):
                return


@contextmanager
def _opened(file: Path, mode: Literal["a", "w"]) -> Iterator[TextIO]:
    """Open a file to write, with its folder; what the system refuses is an error of the user."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open(mode) as out:
            yield out
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}. Choose another folder with --into.") from error


def _line(row: Row) -> str:
    return json.dumps(row) + "\n"
