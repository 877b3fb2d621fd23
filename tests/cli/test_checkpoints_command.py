from __future__ import annotations

import json
from pathlib import Path

import msgspec
import polars as pl
import pytest
from polars.testing import assert_frame_equal
from tests.cli.place import Invoke

from fordstone.cli.checkpoints import PARTITIONS_SHOWN, listing, listing_table, manifest_text
from fordstone.epochs.manifest import Cut, Manifest, PartitionCut, SourceCut, StateRuns
from fordstone.epochs.store import CheckpointStore
from fordstone.state.base import RunRef
from fordstone.storage.disk import OsDisk

RUN_OLD = RunRef("a" * 64, 1_000, 10)
RUN_NEW = RunRef("b" * 64, 250, 2)
PIPELINE_OF_KEYS = """
from fordstone import Pipeline
from fordstone.connectors import files

p = Pipeline("cold-chain")
readings = p.source("readings", files("in/*.jsonl"), schema={"device": "string", "temp": "double"})
readings.group_by("device").agg(n="count(*)").sink("counts", files("out/counts", format="jsonl"))
"""


def manifest(epoch: int, *runs: RunRef, partitions: int = 1) -> Manifest:
    parts = {f"f{number}.jsonl": PartitionCut(position=100 * epoch, max_time_us=0) for number in range(partitions)}
    return Manifest(
        pipeline="cold-chain",
        node="node",
        epoch=epoch,
        attempt=epoch,
        mode="aligned",
        parallelism=1,
        plan_digest="c" * 64,
        step_digests={},
        created_us=epoch * 1_000_000,
        cut=Cut(epoch=epoch, sources={"readings": SourceCut(parts, 0)}),
        states=(StateRuns("agg", "windows", 0, runs),),
    )


def snapshot(root: Path) -> dict[str, tuple[int, int]]:
    """Every file below, by size and time of change."""
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in root.rglob("*")}


@pytest.fixture
def ran(invoke: Invoke, place: Path) -> Path:
    """The state of `cold-chain` after a bounded run."""
    assert invoke("run", "flow.py", "--bounded").exit_code == 0
    return place / "state" / "cold-chain" / "node"


@pytest.fixture
def two_runs(invoke: Invoke, place: Path) -> Path:
    """A keyed state whose newest checkpoint consists of two runs."""
    (place / "flow.py").write_text(PIPELINE_OF_KEYS)
    assert invoke("run", "flow.py", "--bounded").exit_code == 0
    store = CheckpointStore(OsDisk(place / "state"), pipeline="cold-chain", node="node")
    old = store.manifest(1)
    (state,) = old.states
    frame = store.read_run(state.runs[0])
    halves = tuple(store.write_run(part) for part in (frame.head(1), frame.tail(-1)))
    store.replace(msgspec.structs.replace(old, states=(msgspec.structs.replace(state, runs=halves),)))
    store.collect()
    return place / "state" / "cold-chain" / "node"


def test_the_list_tells_sizes_and_what_each_checkpoint_added():
    facts = listing(
        {4: manifest(4, RUN_OLD), 5: manifest(5, RUN_OLD, RUN_NEW), 6: "checkpoint 6 of pipeline x is damaged: y."}
    )
    assert listing_table(facts).splitlines() == [
        "epoch  time (UTC)              size  runs    new  positions",
        "    4  1970-01-01 00:00:04  1.00 kB     1         readings: f0.jsonl at 400",
        "    5  1970-01-01 00:00:05  1.25 kB     2  250 B  readings: f0.jsonl at 500",
        "    6  damaged                                    checkpoint 6 of pipeline x is damaged: y.",
    ]


def test_everything_in_the_first_checkpoint_is_new():
    assert listing({1: manifest(1, RUN_OLD, RUN_OLD)})[0]["new_bytes"] == 1_000


def test_a_manifest_with_many_partitions_shows_the_first_few_and_says_so():
    text = manifest_text(manifest(1, RUN_OLD, partitions=PARTITIONS_SHOWN + 5))
    assert f"f{PARTITIONS_SHOWN - 1}.jsonl" in text
    assert f"f{PARTITIONS_SHOWN}.jsonl" not in text
    assert "... and 5 more (--json shows all)" in text


def test_checkpoints_are_listed_shown_and_verified_without_a_touch(invoke: Invoke, ran: Path):
    before = snapshot(ran.parent.parent)
    for command in ("ls", "show", "verify"):
        for options in ([], ["--json"], ["--pipeline", "cold-chain", "--node", "node"]):
            result = invoke("checkpoints", command, *options)
            assert result.exit_code == 0, result.stderr
    assert snapshot(ran.parent.parent) == before


def test_the_list_as_json_has_positions(invoke: Invoke, ran: Path, place: Path):
    body = json.loads(invoke("checkpoints", "ls", "--json").stdout)
    newest = body["checkpoints"][-1]
    assert (body["pipeline"], body["node"], newest["ended"]) == ("cold-chain", "node", True)
    assert newest["positions"] == {"readings": {"a.jsonl": (place / "in" / "a.jsonl").stat().st_size}}


def test_a_checkpoint_is_shown_with_positions_state_and_output(invoke: Invoke, ran: Path):
    text = invoke("checkpoints", "show", "1").stdout
    assert text.startswith("checkpoint 1 of pipeline cold-chain on node node\n")
    for part in (
        "source readings, watermark at the end",
        "a.jsonl",
        "agg_device",
        "windows",
        "output of this epoch",
        "hot",
    ):
        assert part in text
    assert json.loads(invoke("checkpoints", "show", "--json").stdout)["cut"]["ended"] is True


def test_an_epoch_that_is_not_kept_is_a_misuse_that_lists_those_that_are(invoke: Invoke, ran: Path):
    for command in ("show", "verify"):
        result = invoke("checkpoints", command, "99")
        assert result.exit_code == 2
        assert "there is no checkpoint 99. There are: 1." in result.stderr


def test_a_flipped_byte_is_found_named_and_gives_exit_code_1(invoke: Invoke, ran: Path):
    run = next((ran / "runs").iterdir())
    data = bytearray(run.read_bytes())
    data[len(data) // 2] ^= 1
    run.write_bytes(data)
    result = invoke("checkpoints", "verify")
    assert result.exit_code == 1
    assert "checkpoint 1 of pipeline cold-chain is damaged" in result.stdout
    assert f"damaged: state/cold-chain/node/runs/{run.name}" in result.stdout
    facts = json.loads(invoke("checkpoints", "verify", "--json").stdout)
    assert (facts["whole"], [found["run"] for found in facts["damaged_runs"]]) == (False, [run.name])


def test_a_damaged_manifest_is_listed_as_such(invoke: Invoke, ran: Path):
    (file,) = (ran / "manifests").iterdir()
    file.write_bytes(file.read_bytes().replace(b'"mode":"aligned"', b'"mode":"alignex"'))
    result = invoke("checkpoints", "ls")
    assert result.exit_code == 0
    assert "1  damaged" in result.stdout
    result = invoke("checkpoints", "show")
    assert result.exit_code == 1
    assert "is damaged" in result.stderr


def test_a_checkpoint_that_retention_took_while_it_was_read_is_not_damage(
    invoke: Invoke, ran: Path, place: Path, monkeypatch: pytest.MonkeyPatch
):
    verify = CheckpointStore.verify
    taken: list[Path] = []

    def verify_late(store: CheckpointStore, epoch: int | None = None):
        if not taken:
            taken.extend((ran / "manifests").iterdir())
            for file in taken:
                file.rename(place / file.name)
        return verify(store, epoch)

    monkeypatch.setattr(CheckpointStore, "verify", verify_late)
    result = invoke("checkpoints", "verify")
    assert result.exit_code == 0, result.stdout
    assert taken


def test_a_state_directory_that_is_not_there_is_not_made(invoke: Invoke, place: Path):
    for command in (["ls"], ["show"], ["verify"], ["merge", "flow.py"]):
        result = invoke("checkpoints", *command, "--state", "nowhere")
        assert result.exit_code == 2
        assert "there is no state directory nowhere" in result.stderr
    assert not (place / "nowhere").exists()


def test_of_several_pipelines_one_must_be_named(invoke: Invoke, ran: Path, place: Path):
    (place / "flow.py").write_text(
        (place / "flow.py").read_text().replace("cold-chain", "other").replace("out/", "out2/")
    )
    assert invoke("run", "flow.py", "--bounded").exit_code == 0
    result = invoke("checkpoints", "ls")
    assert result.exit_code == 2
    assert "--pipeline cold-chain --node node" in result.stderr
    assert "--pipeline other --node node" in result.stderr
    assert invoke("checkpoints", "ls", "--pipeline", "other").exit_code == 0
    assert invoke("checkpoints", "ls", "--pipeline", "third").exit_code == 2


def test_merging_folds_runs_into_one_of_the_same_rows(invoke: Invoke, two_runs: Path, place: Path):
    before = state_rows(place)
    result = invoke("checkpoints", "merge", "flow.py")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("checkpoint 1: 2 runs of state merged into 1, ")
    assert_frame_equal(state_rows(place), before, check_row_order=False)
    assert invoke("checkpoints", "verify").exit_code == 0
    assert "nothing to merge" in invoke("checkpoints", "merge", "flow.py").stdout


def state_rows(place: Path) -> pl.DataFrame:
    store = CheckpointStore(OsDisk(place / "state"), pipeline="cold-chain", node="node", read_only=True)
    (state,) = store.manifest(1).states
    return pl.concat([store.read_run(run) for run in state.runs])


def test_merging_keeps_every_checkpoint_there_is(invoke: Invoke, two_runs: Path, place: Path):
    store = CheckpointStore(OsDisk(place / "state"), pipeline="cold-chain", node="node", keep=10)
    first = store.manifest(1)
    for epoch in range(2, 7):
        store.commit(msgspec.structs.replace(first, epoch=epoch, cut=msgspec.structs.replace(first.cut, epoch=epoch)))
    assert invoke("checkpoints", "merge", "flow.py").exit_code == 0
    facts = json.loads(invoke("checkpoints", "ls", "--json").stdout)["checkpoints"]
    assert [fact["epoch"] for fact in facts] == [1, 2, 3, 4, 5, 6]


def test_merging_with_the_file_of_another_pipeline_is_refused(invoke: Invoke, two_runs: Path, place: Path):
    (place / "flow.py").write_text(PIPELINE_OF_KEYS.replace("count(*)", "sum(temp)"))
    result = invoke("checkpoints", "merge", "flow.py")
    assert result.exit_code == 1
    assert "was written by another plan" in result.stderr
    assert "changed: agg_device" in result.stderr
    assert "--allow" not in result.stderr


def test_merging_beside_a_running_pipeline_is_refused(invoke: Invoke, two_runs: Path, place: Path):
    disk = OsDisk(place / "state")
    disk.lock()
    result = invoke("checkpoints", "merge", "flow.py")
    disk.close()
    assert result.exit_code == 1
    assert "which is still running" in result.stderr


def test_state_that_was_set_aside_is_looked_at_only_by_name(invoke: Invoke):
    invoke("run", "flow.py", "--bounded")
    assert invoke("run", "flow.py", "--bounded", "--fresh", "--yes").exit_code == 0
    assert invoke("checkpoints", "ls").exit_code == 0
    assert invoke("checkpoints", "ls", "--node", "node.old-1").exit_code == 0
