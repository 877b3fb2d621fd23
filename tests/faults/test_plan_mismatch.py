"""A checkpoint of another plan: the error says what fits and what would be dropped, and dropping it is allowed if asked for."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.faults.job import BOUNDED, LIVE, Job
from tests.faults.oracle import Feed, Row, all_out, expect, judge
from tests.faults.process import run_to_end, sealed, started

from fordstone.connectors import latest, rows

ROWS = 240


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Feed:
    """A pipeline that has worked on all its input and was stopped."""
    feed = Feed(folder=tmp_path_factory.mktemp("stopped"), seed=31)
    feed.write(ROWS)
    with started(feed.folder, Job(options=LIVE)) as process:
        process.until(lambda: all_out(feed.folder, feed.written), "all rows")
        assert process.stop().report["outcome"] == "stopped"
    return feed


@pytest.fixture
def feed(stopped: Feed, tmp_path: Path) -> Feed:
    return stopped.copy(tmp_path / "job")


def more(feed: Feed) -> dict[str, list[Row]]:
    """Let the input grow; gives what is new."""
    before = {name: len(part) for name, part in feed.written.items()}
    feed.write(ROWS)
    return {name: part[before[name] :] for name, part in feed.written.items()}


CHANGES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "another window": (
        {"window": "20s"},
        [
            "  matches: count_by_k, rows",
            "  changed: windows_by_k",
            "--allow-new-state would drop the state of: windows_by_k.",
            "--allow-new-state would begin with empty state: windows_by_k.",
        ],
    ),
    "a step less": (
        {"per_key": False},
        [
            "  matches: rows, windows_by_k",
            "  no longer in the plan: count_by_k",
            "--allow-new-state would drop the state of: count_by_k.",
        ],
    ),
    "a step more": (
        {"per_n": True},
        [
            "  matches: count_by_k, rows, windows_by_k",
            "  not in the checkpoint: count_by_n",
            "--allow-new-state would begin with empty state: count_by_n.",
        ],
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_plan_is_refused_unless_new_state_is_allowed(change: str, feed: Feed) -> None:
    changes, lines = CHANGES[change]
    other = msgspec.structs.replace(Job(options=BOUNDED), **changes)
    before = sealed(feed.folder)
    ended = run_to_end(feed.folder, other)
    assert ended.code == 1
    shown = ended.errors.splitlines()
    assert shown[0] == f"PlanMismatchError: checkpoint {before} of pipeline faults was made by another plan."
    assert shown[1:-1] == lines
    assert (
        shown[-1]
        == "Add --fresh to start from the beginning: it sets aside the state and the outputs. Or --allow-new-state."
    )
    assert sealed(feed.folder) == before

    new = more(feed)
    allowed = msgspec.structs.replace(other, options=BOUNDED | {"allow_new_state": True})
    ended = run_to_end(feed.folder, allowed)
    assert ended.report["outcome"] == "ended"
    assert ended.report["resumed_from"] == before
    out, wanted = feed.folder / "out", expect(feed.written)
    assert Counter(rows(out / "kept")["id"]) == Counter(row[0] for row in wanted.kept)
    if other.per_key:
        assert {k: (n, total, top) for k, n, total, top in latest(out / "per_key").iter_rows()} == wanted.per_key
    if other.per_n:
        fresh = Counter(n for part in new.values() for id_, _, _, n in part if id_ % 7 != 3)
        assert dict(latest(out / "per_n").iter_rows()) == fresh
    if other.window == "20s":
        widths = (rows(out / "windows")["window_end"] - rows(out / "windows")["window_start"]).dt.total_seconds()
        counts = dict(zip(widths, rows(out / "windows")["n"], strict=True))
        assert set(widths) == {10, 20}
        assert counts[20] > 0
    assert run_to_end(feed.folder, other).report["outcome"] == "already_ended"


def test_a_plan_that_changed_only_where_it_has_no_state_goes_on(feed: Feed) -> None:
    more(feed)
    ended = run_to_end(feed.folder, Job(options=BOUNDED, failing=1))
    assert ended.report["outcome"] == "ended"
    judge(feed.folder, feed.written)
