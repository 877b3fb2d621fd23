"""The input, and what must come of it, worked out row by row in plain Python: it shares nothing with the engine."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any

from tests.faults.job import LATENESS_S, WINDOW_S, is_refused
from tests.services.postgres import Postgres

from fordstone.connectors import latest, rows

EVERY, FILTERED = 7, 3
"""Of `EVERY` consecutive ids, the pipeline's filter removes this one."""
CLOSING_S = 1000
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
Row = tuple[int, int, int, int]
"""id, key, second, n"""


@dataclass(kw_only=True)
class Feed:
    """Files of rows that may grow. Each file's rows move on in time, with some disorder, and a few come too late."""

    folder: Path
    seed: int
    files: int = 3
    keys: int = 5
    ahead_s: tuple[int, ...] = ()
    """Where the times of the first files begin; those of the others at 0."""
    written: dict[str, list[Row]] = field(default_factory=dict)
    """What stands in each file, in order."""

    def __post_init__(self) -> None:
        self._rng = Random(self.seed)
        self._seconds: dict[str, int] = {}
        self._next_id = 0
        (self.folder / "in").mkdir(parents=True, exist_ok=True)
        for number in range(self.files):
            self.join(f"part-{number}.jsonl", second=self.ahead_s[number] if number < len(self.ahead_s) else 0)

    def join(self, name: str, *, second: int) -> None:
        """Begin another file."""
        self._seconds[name] = second
        self.written[name] = []
        (self.folder / "in" / name).touch()

    def copy(self, to: Path) -> Feed:
        """The job's whole folder once more, to be spoilt; what is written there does not show here."""
        shutil.copytree(self.folder, to)
        copy = deepcopy(self)
        copy.folder = to
        return copy

    def write(self, count: int) -> None:
        """Append rows, shared between the files."""
        lines: dict[str, list[str]] = {name: [] for name in self.written}
        for _, name in zip(range(count), cycle(self.written), strict=False):
            row = self._row(name)
            self.written[name].append(row)
            lines[name].append(line_of(row))
        for name, texts in lines.items():
            with (self.folder / "in" / name).open("a") as file:
                file.writelines(texts)

    def close(self) -> None:
        """Let time go on in each file by a row that the filter takes away: what was written before is then due."""
        second = max(self._seconds.values()) + CLOSING_S
        for name, part in self.written.items():
            self._next_id += (FILTERED - self._next_id - 1) % EVERY + 1
            self._seconds[name] = second
            part.append((self._next_id, 0, second, 0))
            with (self.folder / "in" / name).open("a") as file:
                file.write(line_of(part[-1]))

    def _row(self, name: str) -> Row:
        rng = self._rng
        self._seconds[name] += rng.choice((0, 0, 1, 1, 2))
        back = rng.choice((0, 0, 0, 1, 3, LATENESS_S, LATENESS_S + 1, 25))
        self._next_id += 1
        return (self._next_id, rng.randrange(self.keys), self._seconds[name] - back, rng.randrange(100))


def line_of(row: Row) -> str:
    """A row as it stands in a file."""
    id_, k, second, n = row
    ts = (EPOCH + timedelta(seconds=second)).isoformat().replace("+00:00", "Z")
    return json.dumps({"id": id_, "k": k, "ts": ts, "n": n}) + "\n"


@dataclass(kw_only=True)
class Expected:
    """What must come out."""

    kept: Counter[Row] = field(default_factory=Counter)
    per_key: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    windows: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    late: Counter[Row] = field(default_factory=Counter)
    """Rows whose window is closed for them."""
    below: Counter[Row] = field(default_factory=Counter)
    """Rows below their watermark, which are late for steps that need order."""


def expect(written: Mapping[str, Sequence[Row]], *, window_s: int = WINDOW_S) -> Expected:
    """Go through the files row by row."""
    found = Expected()
    for part in written.values():
        newest: int | None = None
        for row in part:
            id_, k, second, n = row
            watermark = None if newest is None else newest - LATENESS_S
            newest = second if newest is None else max(newest, second)
            if id_ % EVERY == FILTERED:
                continue
            found.kept[row] += 1
            count, total, top = found.per_key.get(k, (0, 0, n))
            found.per_key[k] = (count + 1, total + id_, max(top, n))
            if watermark is not None and second < watermark:
                found.below[row] += 1
            window = (k, second // window_s * window_s)
            if watermark is not None and window[1] + window_s <= watermark:
                found.late[row] += 1
                continue
            count, total = found.windows.get(window, (0, 0))
            found.windows[window] = (count + 1, total + id_)
    return found


def all_out(folder: Path, written: Mapping[str, Sequence[Row]]) -> bool:
    """Whether every plain row has been released."""
    there = (folder / "out" / "kept" / "_stream.json").exists()
    return there and rows(folder / "out" / "kept").height >= expect(written).kept.total()


def judge(folder: Path, written: Mapping[str, Sequence[Row]], *, out: str | None = None) -> None:
    """Read what the sinks hold and compare: nothing lost, nothing doubled, nothing wrong. `out`: the URL of the sinks, if it is one."""
    wanted = expect(written)
    out = out or str(folder / "out")
    _same("plain rows", Counter(_rows(f"{out}/kept")), wanted.kept)
    _same("late rows", Counter(_rows(f"{out}/late")), wanted.late)
    windows = [((k, _second(start)), (n, total)) for k, start, _, n, total in rows(f"{out}/windows").iter_rows()]
    _same("windows, each once", Counter(windows), Counter(wanted.windows.items()))
    per_key = {k: (n, total, top) for k, n, total, top in latest(f"{out}/per_key").iter_rows()}
    _same("running aggregates", per_key, wanted.per_key)
    counts: dict[int, int] = {}
    for k, n in rows(f"{out}/per_key").select("k", "n").iter_rows():
        assert n > counts.get(k, 0), f"the running count of key {k} went from {counts[k]} to {n}"
        counts[k] = n


def judge_tables(server: Postgres, database: str, written: Mapping[str, Sequence[Row]]) -> None:
    """Compare the tables that `job.attach_tables` writes to."""
    wanted = expect(written)
    kept = server.rows("SELECT id, k, ts, n FROM kept", database)
    _same("rows of the table", Counter((id_, k, _second(ts), n) for id_, k, ts, n in kept), wanted.kept)
    per_key = {k: tuple(rest) for k, *rest in server.rows("SELECT k, n, total, top FROM per_key", database)}
    _same("running aggregates of the table", per_key, wanted.per_key)


def judge_refused(folder: Path, letters: Path, written: Mapping[str, Sequence[Row]]) -> None:
    """Compare the rows that functions raised for, and what the functions gave for the others. `letters` has a folder per step."""
    wanted = expect(written)
    passed = Counter({row: count for row, count in wanted.kept.items() if not is_refused(row[0])})
    _same("rows that a function passed", Counter(_rows(folder / "out" / "passed")), passed)
    failed: Counter[tuple[str, int, str, int]] = Counter()
    for name, part in written.items():
        position = 0
        for row in part:
            if row in wanted.kept and is_refused(row[0]):
                failed[name, position, f"ValueError: row {row[0]}", row[0]] += 1
            position += len(line_of(row))
    _same("dead letters", Counter(_letters(letters / "refuse")), failed)
    in_time = sorted((wanted.kept - wanted.below).elements(), key=lambda row: (row[2], row[0]))
    refused = {row[0] for row in in_time if is_refused(row[0])}
    of_keys = Counter({letter: count for letter, count in failed.items() if letter[-1] in refused})
    _same("dead letters of the keyed function", Counter(_letters(letters / "refuse_by_k")), of_keys)
    counts: Counter[int] = Counter()
    numbered: Counter[tuple[int, int, int]] = Counter()
    for number, k, _, _ in in_time:
        if not is_refused(number):
            counts[k] += 1
            numbered[k, number, counts[k]] += 1
    _same("rows that a keyed function numbered", Counter(rows(folder / "out" / "numbered").iter_rows()), numbered)


def _letters(directory: Path) -> Iterable[tuple[str, int, str, int]]:
    for one in rows(directory).iter_rows(named=True):
        yield Path(one["partition"]).name, one["position"], one["reason"], json.loads(one["text"])["id"]


def _rows(directory: str | Path) -> Iterable[Row]:
    for id_, k, ts, n in rows(directory).iter_rows():
        yield (id_, k, _second(ts), n)


def _second(time: datetime) -> int:
    return int((time - EPOCH).total_seconds())


def _same(what: str, got: Any, wanted: Any) -> None:
    if got == wanted:
        return
    lost = {key: value for key, value in wanted.items() if got.get(key) != value}
    more = {key: value for key, value in got.items() if wanted.get(key) != value}
    raise AssertionError(
        f"{what}: {len(lost)} lost or wrong, such as {_few(lost)}; {len(more)} too many, such as {_few(more)}"
    )


def _few(found: Mapping[Any, Any]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in list(found.items())[:3]) or "none"
