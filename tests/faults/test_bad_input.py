"""Input that is not what it should be, end to end: counted and kept with its place, or a clear stop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.faults.job import BOUNDED, LIVE, Job
from tests.faults.oracle import Feed, all_out, judge
from tests.faults.process import Ended, released, run_to_end, sealed, started, store_of

from fordstone.connectors import rows

MALFORMED = [
    "not JSON at all",
    '{"id": 1, "k": 2, "ts": "2026-01-01T00:00:00Z", "n": ',
    '{"id": "one", "k": 2, "ts": "2026-01-01T00:00:00Z", "n": 3}',
    '{"id": 1, "k": 2, "ts": "yesterday", "n": 3}',
    "[1, 2, 3]",
    '{"id": 1, "k": 2, "ts": "2026-01-01T00:00:00Z", "n": 99999999999999999999}',
    "\ufeff\u0000 ünïcode \u2028 rubbish",
]
Letters = dict[tuple[str, int], str]


def spoil(feed: Feed, name: str, lines: list[str]) -> Letters:
    """Append lines that are no rows; gives where each begins, in bytes."""
    path = feed.folder / "in" / name
    found: Letters = {}
    with path.open("ab") as file:
        for line in lines:
            found[name, file.tell()] = line
            file.write(line.encode() + b"\n")
    return found


def dead_letters(folder: Path) -> list[tuple[str, int, str]]:
    found = rows(store_of(folder) / "dead-letters" / "rows")
    assert found["reason"].null_count() == 0
    return found.select("partition", "position", "text").rows()


@pytest.mark.parametrize("failpoint", ["manifest.renamed:2", "sink.released:8"])
def test_malformed_lines_are_kept_once_with_their_place_whatever_is_killed(
    failpoint: str, tmp_path: Path, faults: Callable[..., None]
) -> None:
    feed = Feed(folder=tmp_path, seed=61)
    spoilt: Letters = {}
    hits = tmp_path / "hits"
    with started(tmp_path, Job(options=LIVE), failpoint=f"{failpoint}@{hits}") as process:
        for line in MALFORMED:
            before = sealed(tmp_path)
            feed.write(9)
            spoilt |= spoil(feed, "part-1.jsonl", [line, line])
            process.until_dead_or(lambda before=before: sealed(tmp_path) > before, "another epoch")  # type: ignore[misc]
        assert process.ended().killed
        faults(kills=1)
    feed.write(9)
    spoilt |= spoil(feed, "part-2.jsonl", MALFORMED)
    ended = run_to_end(tmp_path, Job(options=BOUNDED))
    assert ended.report["outcome"] == "ended"
    assert ended.report["progress"]["rows_rejected"] > 0
    letters = dead_letters(tmp_path)
    assert sorted(letters) == sorted((*place, line) for place, line in spoilt.items())
    judge(tmp_path, feed.written)


def test_the_report_counts_what_was_rejected(tmp_path: Path) -> None:
    feed = Feed(folder=tmp_path, seed=62)
    feed.write(30)
    spoil(feed, "part-0.jsonl", MALFORMED)
    ended = run_to_end(tmp_path, Job(options=BOUNDED))
    assert ended.report["progress"]["rows_rejected"] == len(MALFORMED)
    assert ended.report["progress"]["rows_in"] == 30
    judge(tmp_path, feed.written)


def test_on_error_fail_stops_at_the_first_bad_line_and_names_its_place(tmp_path: Path) -> None:
    feed = Feed(folder=tmp_path, seed=63, files=1)
    with started(tmp_path, Job(on_error="fail", options=LIVE)) as process:
        feed.write(60)
        process.until(lambda: released(tmp_path) > 0, "output")
        (place,) = spoil(feed, "part-0.jsonl", [MALFORMED[2]])
        ended = process.ended()
    check_refused(ended, "SourceError", f"source rows: part-0.jsonl at position {place[1]} is not a row: ")
    assert MALFORMED[2] in ended.errors
    assert "Mend the input, or use on_error='keep' to set such rows aside." in ended.errors
    assert "Traceback" not in ended.errors
    # The line is mended in place, which changes no byte before it.
    path = tmp_path / "in" / "part-0.jsonl"
    path.write_bytes(path.read_bytes()[: place[1]])
    feed.write(30)
    assert run_to_end(tmp_path, Job(on_error="fail", options=BOUNDED)).report["outcome"] == "ended"
    judge(tmp_path, feed.written)


def check_refused(ended: Ended, kind: str, text: str) -> None:
    assert ended.code == 1
    assert f"{kind}: {text}" in ended.errors, ended.errors


def test_no_file_at_all_is_refused_when_input_is_bounded(tmp_path: Path) -> None:
    ended = run_to_end(tmp_path, Job(options=BOUNDED))
    check_refused(ended, "SourceError", "no file matches 'in/*.jsonl'")
    assert not (tmp_path / "out" / "kept").exists() or released(tmp_path) == 0


@pytest.mark.parametrize("how", ["gone", "shorter"])
def test_a_file_that_was_read_and_is_not_what_it_was_stops_the_pipeline(how: str, tmp_path: Path) -> None:
    feed = Feed(folder=tmp_path, seed=64)
    feed.write(90)
    with started(tmp_path, Job(options=LIVE)) as process:
        process.until(lambda: all_out(tmp_path, feed.written), "all rows")
        process.stop()
    path = tmp_path / "in" / "part-1.jsonl"
    whole, before = path.read_bytes(), released(tmp_path)
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(whole[: len(whole) // 3])
    ended = run_to_end(tmp_path, Job(options=BOUNDED))
    assert ended.code == 1
    assert ("GoneError: " if how == "gone" else "ReplacedError: ") in ended.errors
    assert "part-1.jsonl" in ended.errors
    assert released(tmp_path) == before
    path.write_bytes(whole)
    feed.write(30)
    assert run_to_end(tmp_path, Job(options=BOUNDED)).report["outcome"] == "ended"
    judge(tmp_path, feed.written)


def test_a_column_that_is_not_there_is_an_error_before_anything_runs(tmp_path: Path) -> None:
    Feed(folder=tmp_path, seed=65).write(10)
    ended = run_to_end(tmp_path, Job(column="idd", options=BOUNDED))
    check_refused(ended, "ExpressionError", "step filter: there is no column 'idd'. Did you mean 'id'?")
    assert ended.errors.splitlines()[-1].strip() == "^"
    assert not (tmp_path / "state").exists()


def test_lines_whose_columns_and_types_change_are_read_as_far_as_they_fit(tmp_path: Path) -> None:
    feed = Feed(folder=tmp_path, seed=66, files=1)
    feed.write(40)
    ts = '"2026-01-01T00:10:00Z"'
    fitting = {
        f'{{"new": [1, {{"a": 2}}], "id": 1001, "k": 1, "ts": {ts}, "n": 5}}': (1001, 1, 600, 5),
        f'{{"n": 6, "ts": {ts}, "k": 2, "id": 1002, "unit": "K"}}': (1002, 2, 600, 6),
    }
    others = [
        f'{{"id": 1009, "k": 1, "ts": {ts}, "n": "many"}}',
        f'{{"id": 1010, "k": 1, "ts": {ts}, "n": {{"value": 5}}}}',
        f'{{"id": 1011, "k": 1, "ts": {ts}, "n": 7.5}}',
    ]
    for line in (*fitting, *others):
        spoil(feed, "part-0.jsonl", [line])
    feed.written["part-0.jsonl"] += fitting.values()
    ended = run_to_end(tmp_path, Job(options=BOUNDED))
    assert ended.report["progress"]["rows_rejected"] == len(others)
    assert [text for *_, text in dead_letters(tmp_path)] == others
    judge(tmp_path, feed.written)


def test_rows_without_a_time_are_dead_letters_and_rows_without_other_columns_have_nulls(tmp_path: Path) -> None:
    feed = Feed(folder=tmp_path, seed=67, files=1)
    feed.write(40)
    spoil(feed, "part-0.jsonl", ['{"id": 1001, "k": 1, "n": 5}', '{"id": 1002, "ts": "2026-01-01T00:10:00Z"}'])
    ended = run_to_end(tmp_path, Job(options=BOUNDED))
    assert ended.report["progress"]["rows_rejected"] == 1
    ((partition, _, text),) = dead_letters(tmp_path)
    assert partition == "part-0.jsonl"
    assert '"id":1001' in text
    assert rows(tmp_path / "out" / "kept").filter(id=1002).row(0)[1:4:2] == (None, None)
