"""A query that begins from an edge checkpoint: which ones it takes, how it refuses others, and that nothing is left out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.spark.micro import MicroSpark
from tests.spark.micro_state import Died
from tests.spark.runs import EdgeSide

from fordstone import Pipeline, tumbling
from fordstone.connectors import MemorySink, files, memory
from fordstone.epochs.manifest import ChannelLog, LoggedItem, Manifest
from fordstone.epochs.store import CheckpointStore
from fordstone.errors import CheckpointError, PlanMismatchError
from fordstone.spark.hosted.operator_host import SeedPiece
from fordstone.spark.hosted.packing import What, decode
from fordstone.spark.hosted.stages import QuerySetting
from fordstone.spark.hosted.state_transfer import edge_seed, import_spark, step_times_us
from fordstone.storage.disk import OsDisk

pytestmark = pytest.mark.usefixtures("quick_disk")


class Place:
    """A directory with input, and a pipeline over it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.totals, self.windows = MemorySink(), MemorySink()
        (root / "in").mkdir()

    def write(self, *seconds: int, name: str = "a") -> None:
        with (self.root / "in" / f"{name}.jsonl").open("a") as file:
            for second in seconds:
                ts = f"2026-01-01T00:{second // 60:02d}:{second % 60:02d}Z"
                file.write(json.dumps({"k": f"k{second % 7}", "ts": ts, "n": second}) + "\n")

    def pipeline(self, *, window: str = "10s", time: str | None = "ts", totals: bool = True) -> Pipeline:
        found = Pipeline("p")
        rows = found.source(
            "s",
            files(str(self.root / "in" / "*.jsonl")),
            schema={"k": "string", "ts": "timestamp", "n": "bigint"},
            time=time,
        )
        if totals:
            rows.group_by("k").agg(name="totals", n="count(*)").sink("t", memory(self.totals))
        if time is not None:
            rows.group_by("k").window(tumbling(window)).agg(name="windows", n="count(*)").sink(
                "w", memory(self.windows)
            )
        return found

    def edge(self, *, bounded: bool = False, parallelism: int = 1, steps: int = 60, **options: Any) -> None:
        side = EdgeSide(self.pipeline(**options).plan(), {}, disk=OsDisk(self.root / "edge"))
        side.run(bounded=bounded, parallelism=parallelism, stop_after=None if bounded else steps)

    @property
    def edge_root(self) -> str:
        return str(self.root / "edge")

    def store(self) -> CheckpointStore:
        return CheckpointStore(OsDisk(self.edge_root), pipeline="p", node="node")

    def manifest(self) -> Manifest:
        return self.store().manifest(self.store().epochs()[-1])

    def counts(self) -> dict[str, int]:
        return {k: n for frame in self.totals.frames() for k, n in frame.select("k", "n").iter_rows()}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


# Which checkpoints are taken.


def test_without_a_checkpoint_it_says_what_to_look_at(place: Place) -> None:
    with pytest.raises(CheckpointError, match=r"has no checkpoint of pipeline p on node node(?s:.)*right directory"):
        edge_seed(place.pipeline().plan(), place.edge_root)


def test_a_checkpoint_of_another_node_is_not_taken(place: Place) -> None:
    place.write(1)
    place.edge()
    with pytest.raises(CheckpointError, match="on node other"):
        edge_seed(place.pipeline().plan(), place.edge_root, node="other")


def test_an_epoch_that_is_not_there_says_which_are(place: Place) -> None:
    place.write(1)
    place.edge()
    epochs = ", ".join(map(str, place.store().epochs()))
    with pytest.raises(CheckpointError, match=rf"no checkpoint 99(?s:.)*There are {epochs}\."):
        edge_seed(place.pipeline().plan(), place.edge_root, epoch=99)


def test_a_checkpoint_of_another_plan_is_taken_only_if_that_is_allowed(place: Place) -> None:
    place.write(1)
    place.edge()
    changed = place.pipeline(window="20s").plan()
    with pytest.raises(PlanMismatchError, match="changed: windows"):
        edge_seed(changed, place.edge_root)
    assert edge_seed(changed, place.edge_root, allow_new_state=True).steps == {"s", "totals"}


def test_a_bounded_run_with_event_time_that_has_ended_has_nothing_to_go_on_from(place: Place) -> None:
    place.write(1)
    place.edge(bounded=True)
    with pytest.raises(CheckpointError, match="pipeline p has ended"):
        edge_seed(place.pipeline().plan(), place.edge_root)


def test_rows_in_flight_have_no_place_on_spark(place: Place) -> None:
    place.write(1)
    place.edge()
    manifest, store = place.manifest(), place.store()
    (ref, *_) = [ref for runs in manifest.states for ref in runs.runs]
    logs = (ChannelLog("s/0-0-totals/0", (LoggedItem(kind="batch", run=ref),)),)
    store.commit(
        msgspec.structs.replace(
            manifest,
            epoch=manifest.epoch + 1,
            channels=logs,
            cut=msgspec.structs.replace(manifest.cut, epoch=manifest.epoch + 1),
        )
    )
    with pytest.raises(CheckpointError, match=r"holds rows in flight(?s:.)*SIGTERM"):
        edge_seed(place.pipeline().plan(), place.edge_root)


# What comes of it.


@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize("shards", [1, 3])
def test_every_run_is_brought_once_by_one_of_the_tasks(every: int, shards: int, place: Place) -> None:
    place.write(*range(40))
    place.edge(parallelism=3)
    plan = place.pipeline().plan()
    seed = edge_seed(plan, place.edge_root)
    setting = QuerySetting(plan_json=plan.to_json(), shards=shards)
    tasks = [list(seed.rows(setting, first, every)) for first in range(every)]
    assert {row.what for task in tasks for row in task} == {What.SEED}
    rows = sum(ref.rows for runs in seed.manifest.states for ref in runs.runs)
    found = [msgspec.msgpack.decode(row.data, type=SeedPiece) for task in tasks for row in task]
    assert sum(decode(one.rows).height for one in found if one.rows) == rows
    # How far time had come is sent to every shard of every step, whether it has rows or not.
    assert len([one for one in found if not one.rows]) == shards * 2
    assert {one.watermark_us for one in found} == {step_times_us(seed.manifest)[step] for step in ("totals", "windows")}


def test_a_query_goes_on_in_epochs_and_positions_where_the_edge_stood(place: Place) -> None:
    place.write(*range(40))
    place.edge(parallelism=2)
    epoch = place.manifest().epoch
    place.write(*range(40, 60))
    query = MicroSpark().start(place.pipeline().plan(), state=place.root / "state", from_checkpoint=place.edge_root)
    query.run()
    assert query.epoch == epoch + 1
    assert sum(place.counts().values()) == 60
    assert min(place.totals.released) <= epoch < max(place.totals.released)


def test_a_query_that_has_begun_needs_the_checkpoint_no_more(place: Place) -> None:
    place.write(*range(40))
    place.edge()
    place.write(*range(40, 50))
    spark = MicroSpark()
    options: dict[str, Any] = {"state": place.root / "state", "from_checkpoint": place.edge_root}
    spark.start(place.pipeline().plan(), **options).run()
    shutil.rmtree(place.edge_root)
    place.write(*range(50, 60))
    spark.start(place.pipeline().plan(), state=place.root / "state").run()
    assert sum(place.counts().values()) == 60


def test_the_command_that_began_a_query_goes_on_with_it_although_the_checkpoint_is_gone(place: Place) -> None:
    place.write(*range(40))
    place.edge()
    spark = MicroSpark()
    options: dict[str, Any] = {"state": place.root / "state", "from_checkpoint": place.edge_root}
    spark.start(place.pipeline().plan(), **options).run()
    shutil.rmtree(place.edge_root)
    place.write(*range(40, 50))
    spark.start(place.pipeline().plan(), **options).run()
    assert sum(place.counts().values()) == 50


def test_the_command_that_began_a_query_goes_on_with_it(place: Place) -> None:
    place.write(*range(40))
    place.edge()
    spark = MicroSpark()
    options: dict[str, Any] = {"state": place.root / "state", "from_checkpoint": place.edge_root}
    for last in (50, 60, 70):
        place.write(*range(last - 10, last))
        spark.start(place.pipeline().plan(), **options).run()
    assert sum(place.counts().values()) == 70


def test_of_many_runs_of_one_state_the_newest_counts(place: Place) -> None:
    """Totals of many keys, of which a few change from epoch to epoch: each run has the keys that changed."""
    place.write(*range(59))
    for _ in range(5):
        place.edge(steps=30)
        place.write(1, 2, 3)
    (totals,) = [runs for runs in place.manifest().states if runs.step == "totals"]
    assert len(totals.runs) > 1
    for seed in range(6):
        totals_out, place.totals = place.totals, MemorySink()
        MicroSpark(seed).start(
            place.pipeline().plan(), state=place.root / f"state{seed}", from_checkpoint=place.edge_root, shards=2
        ).run()
        assert place.counts() == {"k1": 9 + 5, "k2": 9 + 5, "k3": 8 + 5}
        place.totals = totals_out


def test_a_first_batch_that_is_run_again_brings_the_state_again(place: Place) -> None:
    """The cut was there, the commit was not: the batch was run again without the state that it had begun with."""
    place.write(*range(40))
    place.edge()
    place.write(*range(40, 50))
    spark = MicroSpark()
    options: dict[str, Any] = {"state": place.root / "state", "from_checkpoint": place.edge_root}
    query = spark.start(place.pipeline().plan(), **options)
    spark.fate.dies_before = "commit"
    with pytest.raises(Died):
        query.step()
    spark.start(place.pipeline().plan(), **options).run()
    place.write(*range(50, 60))
    spark.start(place.pipeline().plan(), **options).run()
    assert sum(place.counts().values()) == 60


def test_a_query_with_state_of_its_own_takes_no_other(place: Place) -> None:
    place.write(1)
    place.edge()
    spark = MicroSpark()
    spark.start(place.pipeline().plan(), state=place.root / "state").run()
    with pytest.raises(CheckpointError, match="has state of its own"):
        spark.start(place.pipeline().plan(), state=place.root / "state", from_checkpoint=place.edge_root)


def test_a_run_without_event_time_that_had_ended_goes_on_with_what_was_added(place: Place) -> None:
    """What had been read to its end was taken for ended by a bounded query, whatever was added to it."""
    place.write(*range(40))
    place.edge(bounded=True, time=None)
    place.write(*range(40, 60))
    spark = MicroSpark()
    spark.run_batch(place.pipeline(time=None).plan(), state=place.root / "state", from_checkpoint=place.edge_root)
    assert sum(place.counts().values()) == 60


def test_output_that_the_edge_had_sealed_and_not_released_is_released_by_the_query(place: Place) -> None:
    place.write(*range(40))
    place.edge(steps=4)
    sealed = place.manifest()
    for sink in (place.totals, place.windows):
        # As if the edge had died right after the seal.
        sink.released.pop(sealed.epoch, None)
    assert any(ref.rows for segment in sealed.segments for ref in segment.runs)
    MicroSpark().start(place.pipeline().plan(), state=place.root / "state", from_checkpoint=place.edge_root).run()
    for name, sink in (("t", place.totals), ("w", place.windows)):
        rows = sum(ref.rows for segment in sealed.segments for ref in segment.runs if segment.sink == name)
        assert sink.released[sealed.epoch].height == rows


# And back.


def exported(place: Place, spark: MicroSpark, *, state: str = "state") -> Any:
    checkpoint = str(place.root / state / "p" / "_spark")
    return import_spark(spark, checkpoint, place.edge_root)  # type: ignore[arg-type]  # as far as it is used


def test_what_is_imported_is_what_the_query_had(place: Place) -> None:
    place.write(*range(40))
    spark = MicroSpark()
    query = spark.start(place.pipeline().plan(), state=place.root / "state", shards=3, rows_max=10)
    query.run()
    imported = exported(place, spark)
    assert imported.epoch == query.epoch
    manifest = place.manifest()
    assert imported.rows == sum(ref.rows for runs in manifest.states for ref in runs.runs)
    assert manifest.cut == query.committer.files.cut(query.epoch)
    assert edge_seed(place.pipeline().plan(), place.edge_root).steps == {"s", "totals", "windows"}


def test_a_query_stopped_in_the_middle_of_a_batch_is_not_imported(place: Place) -> None:
    place.write(*range(40))
    spark = MicroSpark()
    query = spark.start(place.pipeline().plan(), state=place.root / "state", rows_max=10)
    assert query.step()
    spark.fate.dies_within(3)
    with pytest.raises(Died):
        query.step()
    with pytest.raises(CheckpointError, match=r"in the middle of batch 1(?s:.)*--available-now"):
        exported(place, spark)


def test_a_query_that_has_committed_nothing_is_not_imported(place: Place) -> None:
    spark = MicroSpark()
    spark.start(place.pipeline().plan(), state=place.root / "state")
    with pytest.raises(CheckpointError, match="has not committed a batch yet"):
        exported(place, spark)


def test_a_place_that_is_no_query_is_not_imported(place: Place) -> None:
    with pytest.raises(CheckpointError, match="is not the checkpoint location of a fordstone query"):
        exported(place, MicroSpark(), state="elsewhere")


def test_checkpoints_that_are_there_are_not_written_over(place: Place) -> None:
    place.write(*range(40))
    place.edge()
    spark = MicroSpark()
    spark.start(place.pipeline().plan(), state=place.root / "state").run()
    with pytest.raises(CheckpointError, match="has checkpoints of pipeline p on node node already"):
        exported(place, spark)
