"""User functions that raise: the error shows the row, the same failure is not tried six times, and rows can be set aside."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import polars as pl
import pytest

from fordstone import Context, KeyedFunction, Pipeline, Stream, ValueState
from fordstone.connectors import MemorySink, MemorySource, memory, rows
from fordstone.errors import FunctionError, PipelineError, SchemaError, TaskError
from fordstone.lang.schema import Schema
from fordstone.protocol.retry import RestartPolicy

SCHEMA = {"k": "string", "n": "bigint"}
QUICK = RestartPolicy(wait_first_us=1_000, wait_max_us=1_000)
GIVEN = [{"k": "a", "n": 1}, {"k": "b", "n": None}, {"k": "a", "n": 3}, {"k": "b", "n": 4}]


def source(given: list[dict[str, Any]] | None = None) -> Stream:
    return Pipeline("p").source("rows", memory([given or GIVEN]), schema=SCHEMA)


def run(stream: Stream, tmp_path: Path, **options: Any) -> tuple[Any, pl.DataFrame]:
    """The report, and what came out."""
    out = MemorySink()
    stream.sink("out", memory(out))
    return stream.pipeline.run(state=tmp_path, bounded=True, restart=QUICK, **options), out.rows()


def letters(tmp_path: Path, step: str) -> list[dict[str, Any]]:
    return rows(str(tmp_path / "p" / "node" / "dead-letters" / step)).to_dicts()


class Calls:
    """Counts how often a function is called for a row, and raises for some."""

    def __init__(self, *errors: Exception | None) -> None:
        self.errors = iter(errors)
        self.seen: list[int | None] = []

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        self.seen.append(row["n"])
        error = next(self.errors, None) if row["n"] is None else None
        if error is not None:
            raise error
        return {**row, "n": row["n"] or 0}


def test_the_error_shows_the_row_and_a_function_that_raises_the_same_twice_is_not_tried_again(tmp_path: Path):
    calls = Calls(*[ValueError("no number")] * 6)
    with pytest.raises(FunctionError) as caught:
        run(source().map(calls), tmp_path)
    text = str(caught.value)
    assert "raised ValueError: no number, twice for the same row:" in text
    assert '{"k": "b", "n": null}' in text
    assert "source rows, memory-000000, between positions 0 and 4" in text
    assert isinstance(caught.value.__cause__, ValueError)
    assert calls.seen == [1, None, None], "once more at once, and then never again"


def test_a_call_that_fails_once_is_made_again(tmp_path: Path):
    report, out = run(source().map(Calls(ValueError("busy"))), tmp_path)
    assert (report.progress.restarts, out["n"].to_list()) == (0, [1, 0, 3, 4])


def test_what_other_systems_raise_may_pass_so_the_pipeline_restarts(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    calls = Calls(*[ConnectionError("away")] * 3)
    with caplog.at_level(logging.WARNING):
        report, out = run(source().map(calls), tmp_path)
    assert (report.progress.restarts, out["n"].to_list()) == (3, [1, 0, 3, 4])
    failures = [one for one in caplog.records if one.message.startswith("pipeline failed")]
    assert len(failures) == 3
    assert not any(one.exc_info for one in failures), "no traceback for each restart"


def test_other_failures_are_tried_until_one_repeats(tmp_path: Path):
    calls = Calls(*[ValueError(str(number)) for number in range(4)], *[ValueError("same")] * 9)
    with pytest.raises(FunctionError, match="same"):
        run(source().map(calls), tmp_path)
    assert calls.seen.count(None) == 6


class Fails(KeyedFunction):
    """Raises for a row without a number."""

    calls = 0
    total = ValueState("bigint")

    def process(self, row: dict[str, Any], ctx: Context) -> Iterator[dict[str, Any]]:
        self.total.set(self.total.get(0) + 100)
        yield {"k": ctx.key, "n": self.total.get()}
        if row["n"] is None:
            type(self).calls += 1
            raise KeyError("n")


def test_a_keyed_function_that_fails_in_the_same_way_stops_at_the_second_time(tmp_path: Path):
    Fails.calls = 0
    with pytest.raises(
        TaskError, match=r"(?s)failed 2 times in a row.*process\(\) for key 'b', on row {'k': 'b', 'n': None}"
    ):
        run(source().group_by("k").process(Fails), tmp_path)
    assert Fails.calls == 2


def test_a_keyed_function_can_set_rows_aside_and_no_part_of_the_call_stays(tmp_path: Path):
    stream = source().group_by("k").process(Fails, on_error="dead_letter", name="totals")
    report, out = run(stream, tmp_path)
    assert sorted(out.iter_rows()) == [("a", 100), ("a", 200), ("b", 100)]
    assert report.progress.rows_failed == 1
    (letter,) = letters(tmp_path, "totals")
    assert letter == {
        "partition": "memory-000000",
        "position": 1,
        "step": "totals",
        "reason": "KeyError: 'n'",
        "text": '{"k": "b", "n": null}',
    }


class Raises(KeyedFunction):
    """Gives the rows on, and raises for one without a number."""

    def process(self, row: dict[str, Any], ctx: Context) -> dict[str, Any]:
        if row["n"] is None:
            raise KeyError("n")
        return row


def test_rows_that_wait_are_processed_after_on_error_was_changed(tmp_path: Path):
    given = MemorySource([[]])

    def next_run(on_error: Any, *numbers: int | None) -> list[int]:
        second = given.row_count()
        times = [datetime(2026, 1, 1, 0, 0, second + place, tzinfo=UTC) for place in range(len(numbers))]
        given.append(0, [{"n": n, "ts": time} for n, time in zip(numbers, times, strict=True)])
        timed = Pipeline("p").source("rows", memory(given), schema={"n": "bigint", "ts": "timestamp"}, time="ts")
        out = MemorySink()
        timed.group_by().process(Raises, on_error=on_error, name="raises").sink("out", memory(out))
        timed.pipeline.run(state=tmp_path, restart=QUICK, available_now=True)
        return out.rows().get_column("n").to_list()

    # The newest row waits, because one of the same time might follow.
    assert next_run("fail", 0, 1, 2) == [0, 1]
    assert next_run("dead_letter", None, 4, 5) == [2, 4]
    assert next_run("fail", 6, 7) == [5, 6]
    assert next_run("dead_letter", 8, None, 10) == [7, 8]
    assert [letter["position"] for letter in letters(tmp_path, "raises")] == [3, 9]


class Rings(KeyedFunction):
    """Raises when a timer fires."""

    fired = ValueState("bigint")

    def process(self, row: dict[str, Any], ctx: Context) -> None:
        ctx.set_timer("later", after="1s")

    def on_timer(self, timer: Any, ctx: Context) -> None:
        self.fired.set(1)
        raise ValueError(timer.name)


def test_a_timer_that_raises_is_set_aside(tmp_path: Path):
    at = datetime(2026, 1, 1, tzinfo=UTC)
    stream = Pipeline("p").source(
        "rows", memory([[{"k": "a", "ts": at}]]), schema={"k": "string", "ts": "timestamp"}, time="ts"
    )
    report, _ = run(stream.group_by("k").process(Rings, on_error="dead_letter", name="rings"), tmp_path)
    assert report.progress.rows_failed == 1
    (letter,) = letters(tmp_path, "rings")
    assert (letter["reason"], letter["text"]) == (
        "ValueError: later",
        '{"key": "a", "timer": "later", "time": "2026-01-01T00:00:01+00:00"}',
    )


def test_rows_that_fail_go_to_the_dead_letters_with_their_place_and_the_others_go_on(tmp_path: Path):
    calls = Calls(ValueError("a\nb"))
    report, out = run(source().filter("k <> 'x'").map(calls, on_error="dead_letter"), tmp_path)
    assert out["n"].to_list() == [1, 3, 4]
    assert (report.progress.rows_in, report.progress.rows_failed, report.progress.rows_rejected) == (4, 1, 0)
    assert calls.seen == [1, None, 3, 4]
    assert letters(tmp_path, "map") == [
        {
            "partition": "memory-000000",
            "position": 1,
            "step": "map",
            "reason": "ValueError: a b",
            "text": '{"k": "b", "n": null}',
        }
    ]


class Passes(KeyedFunction):
    def process(self, row: dict[str, Any], ctx: Context) -> dict[str, Any]:
        return row


FAR_US = 253_402_300_800_000_000
"""1 January 10000, as a wrong unit makes it."""
FAR_STEPS: dict[str, Callable[[Stream, Any], Stream]] = {
    "map": lambda stream, on_error: stream.map(dict, on_error=on_error, name="far"),
    "flat_map": lambda stream, on_error: stream.flat_map(lambda row: [row], on_error=on_error, name="far"),
    "map_batches": lambda stream, on_error: stream.map_batches(
        lambda frame: pl.DataFrame(frame.to_dicts(), schema=frame.schema), on_error=on_error, name="far"
    ),
    "process": lambda stream, on_error: stream.group_by("at").process(Passes, on_error=on_error, name="far"),
}


def far(kind: str, at_us: int) -> Stream:
    """Three rows; the second has a time that Python has not."""
    given = pl.DataFrame({"n": [1, 2, 3], "at": [0, at_us, None]})
    if kind == "array<timestamp>":
        given = given.with_columns(pl.concat_list("at"))
    frame = given.cast(Schema.of({"n": "bigint", "at": kind}).polars)
    return Pipeline("p").source("rows", memory([frame]), schema={"n": "bigint", "at": kind})


FAR_TIMES = [
    ("timestamp", FAR_US),
    ("timestamp", -FAR_US),
    ("timestamp", 2**63 - 1),  # at this one Polars panics, which is no Exception
    ("date", 2_932_897),
    ("array<timestamp>", FAR_US),
]


@pytest.mark.parametrize(
    ("step", "kind", "at_us"),
    [(step, *time) for step in FAR_STEPS for time in FAR_TIMES if (step, time[0]) != ("process", "array<timestamp>")],
)
def test_rows_that_a_python_function_cannot_be_given_can_be_set_aside(step: str, kind: str, at_us: int, tmp_path: Path):
    report, out = run(FAR_STEPS[step](far(kind, at_us), "dead_letter"), tmp_path)
    assert sorted(out["n"]) == [1, 3]
    assert report.progress.rows_failed == 1
    (letter,) = letters(tmp_path, "far")
    assert (letter["position"], letter["text"].startswith('{"n": 2, "at": ')) == (1, True)
    assert str(at_us) in letter["text"]


def test_a_panic_of_polars_in_a_function_stops_the_run_with_its_row(tmp_path: Path):
    with pytest.raises(
        FunctionError, match=r"step far: function <lambda> raised PanicException: .* twice for the same"
    ):
        run(FAR_STEPS["map_batches"](far("timestamp", 2**63 - 1), "fail"), tmp_path)


@pytest.mark.parametrize("step", ["map", "process"])
def test_a_row_that_a_python_function_cannot_be_given_stops_the_run_with_its_step(step: str, tmp_path: Path):
    with pytest.raises(FunctionError) as caught:
        run(FAR_STEPS[step](far("timestamp", FAR_US), "fail"), tmp_path)
    text = str(caught.value)
    assert "step far: function" in text
    assert "cannot be given a row: column at has a time outside the years 1 to 9999" in text
    assert f'{{"n": 2, "at": {FAR_US}}}' in text


@pytest.mark.parametrize("wrong", [{"k": 7, "n": 1}, {"other": 1}, "text", None])
def test_a_result_that_does_not_fit_fails_its_row_only(tmp_path: Path, wrong: Any):
    stream = source().map(lambda row: wrong if row["n"] is None else row, on_error="dead_letter")
    report, out = run(stream, tmp_path)
    assert (out["n"].to_list(), report.progress.rows_failed) == ([1, 3, 4], 1)


class Gives(KeyedFunction):
    """Gives the row on, and for one without a number what does not fit."""

    wrong: Any = None
    seen = ValueState("bigint")

    def process(self, row: dict[str, Any], ctx: Context) -> Any:
        self.seen.set(self.seen.get(0) + 1)
        return {**row, "n": self.seen.get()} if row["n"] is not None else [row, self.wrong]


@pytest.mark.parametrize(
    "wrong", [{"k": 7, "n": 1}, {"k": "b", "n": 2**63}, {"k": "b", "other": 1}, {"other": 1}, "text", None]
)
def test_a_result_of_a_keyed_function_that_does_not_fit_fails_its_row_only(tmp_path: Path, wrong: Any):
    Gives.wrong = wrong
    report, out = run(source().group_by("k").process(Gives, on_error="dead_letter", name="gives"), tmp_path)
    assert sorted(out.iter_rows()) == [("a", 1), ("a", 2), ("b", 1)], "no part of the call stays"
    assert report.progress.rows_failed == 1
    assert [letter["position"] for letter in letters(tmp_path, "gives")] == [1]


@pytest.mark.parametrize(
    "stream", [lambda: source().map(lambda row: {**row, "n": "x"}), lambda: source().group_by("k").process(Wrong)]
)
def test_a_result_that_does_not_fit_is_shown_with_its_column_and_type(tmp_path: Path, stream: Any):
    with pytest.raises(SchemaError) as caught:
        run(stream(), tmp_path)
    first, *others = str(caught.value).splitlines()
    assert first.endswith("the function gave n='x', which is not of the declared type bigint:")
    assert others == ['  {"k": "a", "n": "x"}', "Correct the function, or declare schema=."]


class Wrong(KeyedFunction):
    def process(self, row: dict[str, Any], ctx: Context) -> dict[str, Any]:
        return {**row, "n": "x"}


def test_an_async_function_of_rows_is_refused_when_it_is_given():
    async def later(row: dict[str, Any]) -> dict[str, Any]:
        return row

    with pytest.raises(PipelineError, match="step map: later is async, and map does not wait for it"):
        source().map(later)  # type: ignore[arg-type]

    async def several(row: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        yield row

    with pytest.raises(PipelineError, match=r"step flat_map: several is async"):
        source().flat_map(several)  # type: ignore[arg-type]

    class Later(KeyedFunction):
        async def process(self, row: dict[str, Any], ctx: Context) -> Any:  # type: ignore[override]
            return row

    with pytest.raises(PipelineError, match=r"Later\.process is async, and process does not wait for it"):
        source().group_by("k").process(Later)


def test_flat_map_counts_a_row_only_if_all_of_its_records_fit(tmp_path: Path):
    def twice(row: dict[str, Any]) -> list[dict[str, Any]]:
        return [{**row, "n": 0}, {**row, "n": "wrong" if row["n"] is None else 1}]

    report, out = run(source().flat_map(twice, on_error="dead_letter"), tmp_path)
    assert (out["n"].to_list(), report.progress.rows_failed) == ([0, 1] * 3, 1)


def checked(frame: pl.DataFrame) -> pl.DataFrame:
    if frame.get_column("n").null_count():
        raise ValueError("null")
    return frame


def test_of_a_batch_the_rows_that_fail_are_found(tmp_path: Path):
    given = [{"k": "a", "n": None if number % 7 == 3 else number} for number in range(100)]
    report, out = run(source(given).map_batches(checked, on_error="dead_letter"), tmp_path)
    assert out["n"].to_list() == [one["n"] for one in given if one["n"] is not None]
    assert report.progress.rows_failed == 14
    assert [one["position"] for one in letters(tmp_path, "map_batches")] == [n for n in range(100) if n % 7 == 3]


def test_of_a_batch_that_fails_the_error_shows_the_row(tmp_path: Path):
    with pytest.raises(FunctionError, match=r'(?s)ValueError: null, twice for the same row:\n  {"k": "b", "n": null}'):
        run(source().map_batches(checked), tmp_path)


def test_each_dead_letter_is_kept_once_across_runs_and_epochs(tmp_path: Path):
    from fordstone.connectors.memory import MemorySource

    given = MemorySource([[("a", None), ("a", 1)]])
    pipeline, out = Pipeline("p"), MemorySink()
    stream = pipeline.source("rows", memory(given), schema=SCHEMA)
    stream.map(lambda row: {**row, "n": row["n"] + 1}, on_error="dead_letter").sink("out", memory(out))
    for number in range(3):
        pipeline.run(state=tmp_path, available_now=True)
        given.append(0, [("b", None), ("b", number)])
    assert [one["position"] for one in letters(tmp_path, "map")] == [0, 2, 4]
    assert out.rows()["n"].to_list() == [2, 1, 2]


def test_a_row_without_a_time_is_counted_once(tmp_path: Path):
    stream = Pipeline("p").source(
        "rows",
        memory([[("a", None), ("b", "2026-01-01T00:00:00")]]),
        schema={"k": "string", "ts": "timestamp"},
        time="ts",
    )
    report, _ = run(stream, tmp_path)
    assert (report.progress.rows_in, report.progress.rows_rejected) == (1, 1)


def test_on_error_is_one_of_two_words():
    wrong = cast("Any", "dead_letters")
    with pytest.raises(
        PipelineError,
        match=r"step map: on_error='dead_letters' must be 'fail' or 'dead_letter'. Did you mean 'dead_letter'\?",
    ):
        source().map(lambda row: row, on_error=wrong)
    with pytest.raises(PipelineError, match="on_error='dead_letters'"):
        source().group_by("k").process(Fails, on_error=wrong)
    with pytest.raises(PipelineError, match="on_error= out"):
        source().flat_map("split(k, ',') AS k", on_error="dead_letter")


def test_only_one_traceback_of_the_function_is_shown(tmp_path: Path):
    with pytest.raises(FunctionError) as caught:
        run(source().map(Calls(*[ValueError("no number")] * 2)), tmp_path)
    assert caught.value.__cause__ is not None
    assert caught.value.__cause__.__context__ is None


TIMED = {"k": "string", "ts": "timestamp"}


def timed_source() -> Stream:
    rows = [{"k": k, "ts": f"2026-01-01T00:00:0{second}"} for second, k in enumerate("abc", start=5)]
    return Pipeline("p").source("rows", memory(rows), schema=TIMED, time="ts")


def back(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "ts": row["ts"] - timedelta(seconds=5 if row["k"] == "b" else 0)}


def batch_back(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.with_columns(pl.col("ts") - pl.duration(seconds=10))


def test_a_function_that_moves_event_time_back_is_an_error_and_not_late_in_some_batches(tmp_path: Path):
    says = r"step map: the function gave .*, whose ts is before .*, the time that it was given. Keep the event time"
    with pytest.raises(SchemaError, match=says):
        run(timed_source().map(back), tmp_path)
    with pytest.raises(SchemaError, match=r"step flat_map: .* whose ts is before"):
        run(timed_source().flat_map(lambda row: [row, back(row)], schema=TIMED), tmp_path / "flat")
    with pytest.raises(SchemaError, match=r"step map_batches: .* whose ts is before"):
        run(timed_source().map_batches(batch_back), tmp_path / "batches")


def test_a_row_that_a_function_moves_back_in_time_becomes_a_dead_letter(tmp_path: Path):
    report, found = run(timed_source().map(back, on_error="dead_letter"), tmp_path)
    assert (report.progress.rows_failed, found.get_column("k").to_list()) == (1, ["a", "c"])


def test_a_function_may_move_event_time_on(tmp_path: Path):
    later = timed_source().map(lambda row: {**row, "ts": row["ts"] + timedelta(hours=1)}, schema=TIMED)
    assert run(later, tmp_path)[1].height == 3
