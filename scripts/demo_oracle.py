"""What the demo's results must be, worked out without any of Fordstone's code, and how far they are from it.

Input is taken as it was written, output as it lies in the files: JSON lines and Parquet, read here by plain means.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

LATENESS_US = 5_000_000
WINDOW_US = 10_000_000
ALARM_ABOVE = 8.0
PLAUSIBLE = pl.col("temp").is_between(-60, 80, closed="none")
TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One output compared with what it must be. `wrong` are results whose numbers differ."""

    output: str
    produced: int
    counted: int
    lost: int
    doubled: int
    wrong: int = 0
    again: int = 0
    """Rows that came again after a restart and were recognised by their id."""

    @property
    def good(self) -> bool:
        return self.lost == self.doubled == self.wrong == 0


def word_counts(rows: Iterable[dict[str, Any]]) -> Counter[str]:
    """How often each word was written."""
    return Counter(word for row in rows for word in row["line"].split(" ") if word)


def judge_words(rows: Iterable[dict[str, Any]], out: Path) -> list[Verdict]:
    """Compare the newest count of each word with a count of our own."""
    expected = word_counts(rows)
    found = Counter({row["word"]: row["n"] for row in json_rows(out / "counts", "epoch-*.jsonl")})
    return [_verdict("words counted", expected, found)]


def judge_readings(gateways: Iterable[list[dict[str, Any]]], out: Path) -> list[Verdict]:
    """Compare windows, late rows, alarms and totals with what Polars makes of the same rows."""
    plausible = pl.concat([_judged(rows) for rows in gateways]).filter(PLAUSIBLE)
    in_time, late = plausible.filter(~pl.col("is_late")), plausible.filter("is_late")
    return [
        _judge_windows(in_time, out / "per_device"),
        _judge_rows("late rows", late, json_rows(out / "late", "epoch-*.jsonl")),
        _judge_alarms(plausible.filter(pl.col("temp") > ALARM_ABOVE), out / "alarms"),
        _judge_totals(plausible, out / "totals"),
    ]


def json_rows(directory: Path, pattern: str) -> Iterator[dict[str, Any]]:
    """The rows of all files in the order of their names. A last line that a crash tore off is not a row."""
    for file in sorted(directory.glob(pattern)):
        for line in file.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):
                yield json.loads(line)


def _judged(rows: list[dict[str, Any]]) -> pl.DataFrame:
    """One gateway's rows. Late is what is older than the newest row before it by more than the lateness."""
    frame = pl.DataFrame(rows, schema={"device": pl.String, "seq": pl.Int64, "ts": pl.String, "temp": pl.Float64})
    frame = frame.with_columns(pl.col("ts").str.to_datetime(time_unit="us", time_zone="UTC").dt.epoch("us").alias("us"))
    newest_before = pl.col("us").cum_max().shift(1)
    return frame.with_columns((pl.col("us") < newest_before - LATENESS_US).fill_null(value=False).alias("is_late"))


def _judge_windows(in_time: pl.DataFrame, directory: Path) -> Verdict:
    files = sorted(directory.glob("epoch-*.parquet"))
    empty = pl.DataFrame(schema={"device": pl.String, "window_start": pl.Datetime("us", "UTC"), "n": pl.Int64})
    found = pl.concat([pl.read_parquet(file) for file in files]) if files else empty
    start = (pl.col("us") // WINDOW_US * WINDOW_US).alias("start")
    mean, low, top = (
        pl.col("temp").mean().alias("mean"),
        pl.col("temp").min().alias("low"),
        pl.col("temp").max().alias("top"),
    )
    expected = in_time.group_by("device", start).agg(pl.len().alias("n"), mean, low, top)
    windows = {row[:2]: row[2:] for row in expected.iter_rows()}
    counted: Counter[Hashable] = Counter()
    wrong = 0
    for row in found.with_columns(pl.col("window_start").dt.epoch("us").alias("start")).iter_rows(named=True):
        key = (row["device"], row["start"])
        counted[key] += row["n"]
        _, *values = windows.get(key, (0, None, None, None))
        wrong += not all(_near(row[name], value) for name, value in zip(("mean", "low", "top"), values, strict=True))
    return _verdict(
        "rows in windows", Counter({key: values[0] for key, values in windows.items()}), counted, wrong=wrong
    )


def _judge_rows(output: str, expected: pl.DataFrame, found: Iterable[dict[str, Any]], *, again: int = 0) -> Verdict:
    wanted: Counter[Hashable] = Counter(expected.select("device", "seq", "temp").iter_rows())
    got: Counter[Hashable] = Counter((row["device"], row["seq"], row["temp"]) for row in found)
    return _verdict(output, wanted, got, again=again)


def _judge_alarms(expected: pl.DataFrame, directory: Path) -> Verdict:
    """A receiver keeps the first alarm of each id."""
    sent = list(json_rows(directory, "rows-*.jsonl"))
    by_id = {row["__id"]: row for row in reversed(sent)}
    return _judge_rows("alarms at once", expected, by_id.values(), again=len(sent) - len(by_id))


def _judge_totals(plausible: pl.DataFrame, directory: Path) -> Verdict:
    latest = {row["device"]: row for row in json_rows(directory, "epoch-*.jsonl")}
    expected = {row[0]: row[1:] for row in plausible.group_by("device").agg(pl.len(), pl.col("temp").max()).iter_rows()}
    wrong = sum(not _near(latest[device]["top"], top) for device, (_, top) in expected.items() if device in latest)
    wanted: Counter[Hashable] = Counter({device: n for device, (n, _) in expected.items()})
    return _verdict(
        "running totals", wanted, Counter({device: row["n"] for device, row in latest.items()}), wrong=wrong
    )


def _verdict(output: str, wanted: Counter[Any], got: Counter[Any], *, wrong: int = 0, again: int = 0) -> Verdict:
    return Verdict(
        output=output,
        produced=wanted.total(),
        counted=got.total(),
        lost=(wanted - got).total(),
        doubled=(got - wanted).total(),
        wrong=wrong,
        again=again,
    )


def _near(found: float | None, expected: float | None) -> bool:
    return found is not None and expected is not None and abs(found - expected) <= TOLERANCE * max(1.0, abs(expected))
