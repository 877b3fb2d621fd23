"""Small files below a checkpoint location: whole or not there, whatever happens while they are written.

The cuts of a query: there or missed, whole or reported, and not kept for ever.

What a checkpoint location belongs to: the same query goes on, another is refused with what differs and what to do.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import polars as pl
import pytest
from tests.spark.micro import MicroSpark

from fordstone import Pipeline, tumbling
from fordstone.connectors import files, rows
from fordstone.connectors.base import SinkStream
from fordstone.connectors.files.settings import dead_letter_files
from fordstone.connectors.registry import open_sink
from fordstone.epochs.manifest import Cut, PartitionCut, SourceCut
from fordstone.errors import (
    CheckpointError,
    ConfigError,
    DamagedError,
    PipelineError,
    PlanMismatchError,
    StorageError,
    StoreLockedError,
)
from fordstone.lang.duration import TIME_MAX_US, TIME_MIN_US
from fordstone.operators.dead_letter import LETTER_SCHEMA
from fordstone.spark.config import SparkConfig
from fordstone.spark.hosted.checkpoint import (
    CUTS_KEPT,
    DriverMark,
    EpochRecord,
    QueryFiles,
    QueryIdentity,
    SealedEpoch,
    mismatch,
)
from fordstone.spark.hosted.plan_batches import Work
from fordstone.spark.hosted.query import dead_letters_of
from fordstone.spark.run import _locked

pytestmark = pytest.mark.usefixtures("quick_disk")


def identity(**changed: Any) -> QueryIdentity:
    known: dict[str, Any] = {
        "pipeline": "p",
        "plan": msgspec.Raw(b"{}"),
        "step_digests": {"s": "1", "windows": "2", "totals": "3"},
        "stages": (("windows", "totals"),),
        "shards": 2,
        "first_epoch": 1,
    }
    return QueryIdentity(**known | changed)


@pytest.mark.parametrize(
    "changed", [{}, {"shards": 5}, {"plan": msgspec.Raw(b'{"sinks": 2}')}, {"first_epoch": 9}, {"seed": "edge"}]
)
def test_what_state_does_not_depend_on_may_change(changed: dict[str, Any]) -> None:
    assert mismatch(identity(), identity(**changed)) is None


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"pipeline": "q"}, "it is that of pipeline p, this is q."),
        ({"stages": (("windows",), ("totals",))}, "the steps are the same, but stand at other depths now"),
        ({"bounded": True}, "its input was unbounded."),
    ],
)
def test_another_query_is_refused_with_what_differs(changed: dict[str, Any], text: str) -> None:
    assert text in (mismatch(identity(), identity(**changed)) or "")


def test_a_changed_plan_is_refused_with_the_steps_that_match() -> None:
    changed = identity(step_digests={"s": "1", "windows": "other", "more": "4"})
    assert mismatch(identity(), changed) == (
        "  matches: s\n  changed: windows\n  no longer in the plan: totals\n  not in the checkpoint: more"
    )


def test_the_first_query_writes_and_the_next_one_finds(tmp_path: Path) -> None:
    file = QueryFiles(str(tmp_path / "query"))
    assert file.identity() is None
    assert file.claim(identity(shards=5)) == identity(shards=5)
    # A first try that came to nothing binds nobody.
    assert file.claim(identity(shards=3)) == identity(shards=3)
    (tmp_path / "query" / "offsets").mkdir()
    (tmp_path / "query" / "offsets" / "0").write_text("{}")
    # The shards are those that the state was made with.
    assert file.claim(identity(shards=7)).shards == 3
    with pytest.raises(PlanMismatchError, match=r"belongs to another query(?s:.)*import-spark"):
        file.claim(identity(pipeline="q"))


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"pipeline": "p"}', b'{"pipeline": "\xee"}'])
def test_a_file_that_cannot_be_read_says_so(data: bytes, tmp_path: Path) -> None:
    file = QueryFiles(str(tmp_path))
    file.write_identity(identity())
    (tmp_path / "fordstone" / "query.json").write_bytes(data)
    with pytest.raises(CheckpointError, match="is damaged"):
        file.identity()


def test_a_file_of_a_later_version_is_not_guessed_at(tmp_path: Path) -> None:
    file = QueryFiles(str(tmp_path))
    file.write_identity(identity(version=3))
    with pytest.raises(CheckpointError, match="has version 3; this fordstone reads version 2"):
        file.identity()


# Through a query.


def pipeline(root: Path, *, window: str = "10s", name: str = "p", more: bool = False) -> Pipeline:
    found = Pipeline(name)
    rows = found.source(
        "s", files(str(root / "in" / "*.jsonl")), schema={"k": "string", "ts": "timestamp", "n": "bigint"}, time="ts"
    )
    windows = rows.group_by("k").window(tumbling(window)).agg(name="windows", n="count(*)")
    windows.sink("out", files(str(root / "out"), format="jsonl"))
    if more:
        rows.group_by("k").agg(name="totals", n="count(*)").sink("totals_out", files(str(root / "t"), format="jsonl"))
    return found


@pytest.fixture
def input_file(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    file = tmp_path / "in" / "a.jsonl"
    file.write_text(json.dumps({"k": "a", "ts": "2026-01-01T00:00:00Z", "n": 1}) + "\n")
    return file


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"window": "20s"}, r"matches: s\n  changed: windows"),
        ({"more": True}, r"matches: s, windows\n  not in the checkpoint: totals"),
    ],
)
def test_a_changed_plan_on_an_old_checkpoint_is_refused(
    changed: dict[str, Any], text: str, tmp_path: Path, input_file: Path
) -> None:
    spark = MicroSpark()
    spark.start(pipeline(tmp_path).plan(), state=tmp_path / "state").run()
    with pytest.raises(PlanMismatchError, match=text):
        spark.start(pipeline(tmp_path, **changed).plan(), state=tmp_path / "state")


def test_the_shards_of_a_query_stay_whatever_it_runs_on_next(tmp_path: Path, input_file: Path) -> None:
    spark = MicroSpark(cores=3)
    spark.start(pipeline(tmp_path).plan(), state=tmp_path / "state").run()
    spark.cores = 5
    again = spark.query(pipeline(tmp_path).plan(), state=tmp_path / "state")
    assert again.setting.shards == 3
    assert again.tasks == 5
    with pytest.raises(ConfigError, match="divided into 3, for its whole life"):
        spark.query(pipeline(tmp_path).plan(), state=tmp_path / "state", shards=7)


def test_an_offset_log_of_another_query_is_found_out(tmp_path: Path, input_file: Path) -> None:
    """The location was put together from two: batch 1 of one, cuts of another."""
    spark = MicroSpark()
    query = spark.start(pipeline(tmp_path).plan(), state=tmp_path / "state")
    query.run()
    logged = json.loads(query.location.offset(0))
    query.location.write("offsets", 1, json.dumps(logged))
    with pytest.raises(
        CheckpointError,
        match="batch for epoch 2 contains the plan of another epoch \\(1\\): the checkpoint location is mixed",
    ):
        spark.start(pipeline(tmp_path).plan(), state=tmp_path / "state").step()


def test_a_cut_that_is_gone_stops_the_query_and_says_what_to_do(tmp_path: Path, input_file: Path) -> None:
    spark = MicroSpark()
    query = spark.start(pipeline(tmp_path).plan(), state=tmp_path / "state")
    query.run()
    for file in (query.location.path / "fordstone" / "cuts").iterdir():
        file.unlink()
    with pytest.raises(CheckpointError, match="the cut of epoch 1 is missing"):
        spark.start(pipeline(tmp_path).plan(), state=tmp_path / "state").step()


def test_a_loop_is_refused_with_a_way_out(tmp_path: Path) -> None:
    found = Pipeline("p")
    rows = found.source("s", files(str(tmp_path / "*.jsonl")), schema={"n": "bigint"})
    looped = rows.iterate(lambda s: (s.filter("n > 0").with_columns("n - 1 AS n"), s.filter("n = 0")))
    looped.sink("out", files(str(tmp_path / "out"), format="jsonl"))
    with pytest.raises(PipelineError, match="Run this pipeline on the edge engine"):
        MicroSpark().query(found.plan(), state=tmp_path / "state")


def test_a_source_in_this_processs_memory_is_refused(tmp_path: Path) -> None:
    from fordstone.connectors import memory

    found = Pipeline("p")
    found.source("s", memory([[]]), schema={"n": "bigint"}).sink("out", files(str(tmp_path / "o"), format="jsonl"))
    with pytest.raises(ConfigError, match="lives in this process's memory"):
        MicroSpark().query(found.plan(), state=tmp_path / "state")


def record(epoch: int) -> EpochRecord:
    return EpochRecord(work=Work(epoch=epoch), cut=cut(epoch))


def cut(epoch: int) -> Cut:
    partitions = {"β.jsonl": PartitionCut(position=2**62, max_time_us=TIME_MIN_US, floor_us=TIME_MAX_US, idle=True)}
    return Cut(epoch=epoch, sources={"s": SourceCut(partitions=partitions, watermark_us=TIME_MAX_US)}, bounded=True)


@pytest.fixture(params=["path", "url"])
def cuts(request: pytest.FixtureRequest, tmp_path: Path) -> QueryFiles:
    return QueryFiles(str(tmp_path / "query")) if request.param == "path" else QueryFiles(f"memory://{uuid4()}/query/")


def test_a_cut_is_read_as_it_was_written(cuts: QueryFiles) -> None:
    assert cuts.cut_epochs() == ()
    for epoch in (1, 2, 10):
        cuts.write_released(record(epoch))
    assert cuts.cut(2) == cut(2)
    assert cuts.cut_epochs() == (1, 2, 10)


def test_a_cut_that_is_written_again_stays(cuts: QueryFiles) -> None:
    cuts.write_released(record(1))
    cuts.write_released(record(1))
    assert cuts.cut(1) == cut(1)
    assert cuts.cut_epochs() == (1,)


def test_a_missing_cut_says_what_to_do(cuts: QueryFiles) -> None:
    cuts.write_released(record(1))
    with pytest.raises(CheckpointError, match=r"epoch 2 is missing(?s:.)*Restore the checkpoint location"):
        cuts.cut(2)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"epoch": 1}', b'{"epoch": "x", "sources": {}}', b'{"\xee": 1}'])
def test_a_damaged_cut_is_reported(data: bytes, tmp_path: Path) -> None:
    cuts = QueryFiles(str(tmp_path))
    cuts.write_released(record(1))
    (file,) = (tmp_path / "fordstone" / "cuts").iterdir()
    file.write_bytes(data)
    with pytest.raises(DamagedError, match="is damaged"):
        cuts.cut(1)


def test_old_cuts_go(cuts: QueryFiles) -> None:
    for epoch in range(1, CUTS_KEPT + 4):
        cuts.write_released(record(epoch))
    assert cuts.cut_epochs() == tuple(range(4, CUTS_KEPT + 4))


def test_what_a_crash_left_half_written_is_no_cut(tmp_path: Path) -> None:
    cuts = QueryFiles(str(tmp_path))
    cuts.write_released(record(1))
    (tmp_path / "fordstone" / "cuts" / ".tmp-000000000002.json").write_bytes(b"{")
    assert cuts.cut_epochs() == (1,)
    cuts.write_released(record(2))
    assert cuts.cut(2) == cut(2)


def test_a_query_that_died_while_it_wrote_its_identity_can_be_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = QueryIdentity(pipeline="p", plan=msgspec.Raw(b"{}"), step_digests={}, stages=(), shards=1, first_epoch=1)

    def die(self: Path, target: Path) -> None:
        raise OSError(errno.EIO, "no power")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", die)
        with pytest.raises(StorageError, match="no power"):
            QueryFiles(str(tmp_path)).claim(identity)
    assert QueryFiles(str(tmp_path)).identity() is None
    assert QueryFiles(str(tmp_path)).claim(identity) == identity


@pytest.fixture(params=["disk", "url"])
def mark(request: pytest.FixtureRequest, tmp_path: Path) -> QueryFiles:
    return QueryFiles(str(tmp_path / "_spark") if request.param == "disk" else f"memory://{uuid4().hex}/_spark")


def test_a_mark_stands_from_when_it_is_put_until_it_is_taken_away(mark: QueryFiles):
    other = QueryFiles(mark.root)
    assert not other.stop_requested()
    mark.request_stop()
    mark.request_stop()
    assert other.stop_requested()
    mark.clear_stop()
    mark.clear_stop()
    assert not other.stop_requested()


# Where nothing can be locked.


def test_the_driver_that_was_started_last_runs_the_query_and_the_other_one_stops(
    tmp_path: Path, input_file: Path
) -> None:
    spark, first, second = MicroSpark(), DriverMark.of_this_process(), DriverMark.of_this_process()
    stored = QueryFiles(str(tmp_path / "state" / "p" / "_spark"))
    stored.take_over(first)
    older = spark.start(pipeline(tmp_path).plan(), state=tmp_path / "state", driver=first)
    assert older.step()
    with input_file.open("a") as file:
        file.write(json.dumps({"k": "a", "ts": "2026-01-01T00:01:00Z", "n": 1}) + "\n")
    stored.take_over(second)
    with pytest.raises(StoreLockedError, match=rf"taken over by another driver \(process {os.getpid()} on .*\)"):
        older.step()
    assert stored.newest_record() == 1, "it has sealed nothing"
    assert spark.start(pipeline(tmp_path).plan(), state=tmp_path / "state", driver=second).run() == 1
    assert rows(tmp_path / "out").height == 1


def test_a_driver_marks_a_location_that_it_cannot_lock() -> None:
    location = f"memory://{uuid4()}/p/_spark"
    with _locked(location) as first:
        assert first is not None
        QueryFiles(location).check_driver(first)
        with _locked(location) as second:
            assert second is not None
            QueryFiles(location).check_driver(second)
            with pytest.raises(StoreLockedError):
                QueryFiles(location).check_driver(first)


def test_a_location_on_this_machine_is_locked_however_it_is_written(tmp_path: Path) -> None:
    for state in (str(tmp_path), f"file://{tmp_path}"):
        location = SparkConfig(state=state).checkpoint_of("p")
        assert location == f"{tmp_path}/p/_spark"
        with _locked(location) as mark, pytest.raises(StoreLockedError), _locked(location):
            pass
        assert mark is None


@pytest.mark.parametrize("store", ["disk", "memory"])
def test_of_two_drivers_that_seal_an_epoch_at_the_same_time_one_does(store: str, tmp_path: Path) -> None:
    """Both have found that none has, and the mark of neither has been replaced yet."""
    location = QueryFiles(str(tmp_path) if store == "disk" else f"memory://{uuid4()}")
    one, other = (
        SealedEpoch(epoch=1, attempt=attempt, parts={}, rows={}, record=record(1)) for attempt in ("one", "other")
    )
    location.seal(one, {})
    with pytest.raises(StoreLockedError, match="another driver, which runs the same query"):
        location.seal(other, {})
    assert location.sealed(1) == one
    location.seal(one, {})  # as after an answer that was lost


def test_dead_letters_are_where_the_checkpoint_is() -> None:
    state = f"memory://{uuid4()}/state/"
    place = dead_letters_of(SparkConfig(state=state), "p")
    assert place == f"{state}p/_spark/fordstone/dead-letters"
    letter = pl.DataFrame([("a.jsonl", 7, "s", "no JSON", "{")], schema=LETTER_SCHEMA.polars, orient="row")
    for _ in range(2):
        open_sink(dead_letter_files(f"{place}/s"), SinkStream(step="s", schema=LETTER_SCHEMA)).release(1, letter)
    assert rows(f"{place}/s").equals(letter)
