"""A node and a hub, for real: what is sealed reaches the hub once and in order, whatever comes between."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import polars as pl
import pytest
from tests.edge.crossing_runs import PIPELINE, epochs_at, ids_at, plan_over, rows, rows_at, run_plan, source_of
from tests.hub.running import running_hub, serving

from fordstone import Pipeline
from fordstone.connectors import files, memory
from fordstone.connectors import rows as rows_in
from fordstone.connectors.base import ConnectorSpec
from fordstone.connectors.memory import MemorySink, MemorySource
from fordstone.epochs.store import CheckpointStore
from fordstone.errors import CheckpointError, ConfigError, HubError, HubRefusedError, PipelineError, StorageError
from fordstone.hub.client.address import HubAddress
from fordstone.hub.client.client import HubClient
from fordstone.hub.messages import ENDED_US, Commit, EpochEntry, Generation, LeaseRequest, Refusal
from fordstone.operators.base import ROW_WATERMARK
from fordstone.plan import plan as p
from fordstone.plan.plan import ToCenter
from fordstone.protocol.progress import Progress
from fordstone.storage.disk import OsDisk
from fordstone.storage.failpoint import OUTBOX_FAILPOINTS

TICKS_MAX = 2000


def stop_when(done: Callable[[Progress], bool]) -> Callable[[Progress], None]:
    """Tells the run to stop, once, when it has come far enough."""
    ticks, stopped = 0, False

    def look(progress: Progress) -> None:
        nonlocal ticks, stopped
        ticks += 1
        if not stopped and (done(progress) or ticks > TICKS_MAX):
            stopped = True
            signal.raise_signal(signal.SIGTERM)

    return look


def read(count: int) -> Callable[[Progress], None]:
    return stop_when(lambda progress: progress.rows_out >= count)


def sent(count: int) -> Callable[[Progress], None]:
    return stop_when(lambda progress: progress.rows_out >= count and not progress.outbox_epochs)


def nobody() -> HubAddress:
    """An address at which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return HubAddress(url=f"http://127.0.0.1:{taken.getsockname()[1]}")


def generation_at(hub: HubAddress) -> Generation | None:
    with contextlib.closing(HubClient(hub)) as client:
        return client.head(PIPELINE, "node").generation


def port_of(hub: HubAddress) -> int:
    return int(hub.url.rpartition(":")[2])


def test_every_row_of_a_bounded_run_is_at_the_hub_once_and_in_order(tmp_path: Path):
    with running_hub(tmp_path / "hub") as hub:
        report = run_plan(plan_over(memory(source_of(100))), hub, tmp_path / "state")
        epochs = epochs_at(hub)
        assert ids_at(hub) == list(range(100))
        assert [epoch.epoch for epoch in epochs] == list(range(1, len(epochs) + 1))
        assert epochs[-1].ended
        assert epochs[-1].watermark_us == ENDED_US
        with contextlib.closing(HubClient(hub)) as client:
            checkpoint = client.checkpoint(PIPELINE, "node")
        assert checkpoint is not None
        assert checkpoint.epoch == len(epochs)
        assert report.progress.outbox_epochs == 0
        assert report.progress.sent_epoch == len(epochs)
        assert report.progress.rows_out == 100
        assert rows_at(hub).get_column(ROW_WATERMARK).null_count() == 100


def test_rows_below_their_watermark_cross_with_it(tmp_path: Path):
    source = MemorySource([[(1, "2026-01-01T00:00:10Z"), (2, "2026-01-01T00:00:05Z"), (3, "2026-01-01T00:00:11Z")]])
    with running_hub(tmp_path / "hub") as hub:
        run_plan(plan_over(memory(source)), hub, tmp_path / "state")
        found = dict(rows_at(hub).select("id", pl.col(ROW_WATERMARK).cast(pl.Datetime("us", "UTC"))).iter_rows())
        assert found == {1: None, 2: datetime(2026, 1, 1, 0, 0, 10, tzinfo=UTC), 3: None}


def test_watermarks_at_the_hub_never_go_back_and_stand_after_their_rows(tmp_path: Path):
    source = source_of(60)
    with running_hub(tmp_path / "hub") as hub:
        run_plan(plan_over(memory(source)), hub, tmp_path / "a", bounded=False, on_progress=sent(60))
        marks = [epoch.watermark_us for epoch in epochs_at(hub)]
        assert marks == sorted(marks)
        assert marks[-1] == 1_767_225_659_000_000
        assert not epochs_at(hub)[-1].ended


def test_tasks_without_a_partition_hold_nobodys_time_back_at_the_hub(tmp_path: Path):
    with running_hub(tmp_path / "hub") as hub:
        run_plan(
            plan_over(memory(source_of(60))), hub, tmp_path / "a", bounded=False, parallelism=3, on_progress=sent(60)
        )
        assert epochs_at(hub)[-1].watermark_us == 1_767_225_659_000_000


def test_without_the_hub_a_node_runs_at_once_and_sends_everything_when_it_is_back(tmp_path: Path):
    source = source_of(100)
    plan, away = plan_over(memory(source)), nobody()
    report = run_plan(plan, away, tmp_path / "state", bounded=False, on_progress=read(100))
    assert report.outcome == "stopped"
    assert report.progress.outbox_epochs == report.progress.epoch > 0
    assert report.progress.hub_problem is not None
    with running_hub(tmp_path / "hub", port=port_of(away)) as hub:
        run_plan(plan, hub, tmp_path / "state")
        assert ids_at(hub) == list(range(100))
        # Folded: what waited came in one commit.
        assert len({epoch.seq for epoch in epochs_at(hub)}) < len(epochs_at(hub))


def test_a_hub_that_comes_up_while_the_node_runs_gets_what_was_sealed_before(tmp_path: Path):
    away = nobody()
    with contextlib.ExitStack() as stack:

        def start_hub(progress: Progress) -> None:
            if progress.outbox_epochs and not (tmp_path / "hub").exists():
                stack.enter_context(running_hub(tmp_path / "hub", port=port_of(away)))

        run_plan(plan_over(memory(source_of(100))), away, tmp_path / "state", on_progress=start_hub)
        assert ids_at(away) == list(range(100))


def test_a_run_that_had_ended_sends_what_it_had_left(tmp_path: Path):
    plan, away = plan_over(memory(source_of(30))), nobody()
    # Bounded, it would wait for the hub; the first signal ends that.
    stopped = run_plan(
        plan, away, tmp_path / "state", on_progress=stop_when(lambda now: now.rows_out == 30 and now.epoch > 0)
    )
    assert stopped.progress.outbox_epochs > 0
    with running_hub(tmp_path / "hub", port=port_of(away)) as hub:
        for _ in range(2):
            run_plan(plan, hub, tmp_path / "state")
        again = run_plan(plan, hub, tmp_path / "state")
        assert again.outcome == "already_ended"
        assert again.progress.outbox_epochs == 0
        assert ids_at(hub) == list(range(30))


def test_what_the_hub_has_is_removed_here(tmp_path: Path):
    source = source_of(50)
    plan = plan_over(memory(source), time=None)
    with running_hub(tmp_path / "hub") as hub:
        run_plan(plan, hub, tmp_path / "state", keep=1)
        first = {run.digest for epoch in epochs_at(hub) for run in epoch.runs}
        for part in (1, 2):
            source.append(0, rows(50, 50 * part))
            run_plan(plan, hub, tmp_path / "state", keep=1)
        assert ids_at(hub) == list(range(150))
    assert first
    assert not first & {run.name for run in (tmp_path / "state" / PIPELINE / "node" / "runs").iterdir()}


def test_what_waits_for_the_hub_is_kept_however_many_checkpoints_are_removed(tmp_path: Path):
    away, source = nobody(), source_of(100)
    plan = plan_over(memory(source))
    for first in (100, 200, 300):
        report = run_plan(plan, away, tmp_path / "state", keep=1, bounded=False, on_progress=read(100))
        source.append(0, rows(100, first))
    assert report.progress.epoch >= 3
    store = CheckpointStore(OsDisk(tmp_path / "state"), pipeline=PIPELINE, node="node", read_only=True)
    assert len(store.epochs()) == 1
    with running_hub(tmp_path / "hub", port=port_of(away)) as hub:
        run_plan(plan, hub, tmp_path / "state", keep=1)
        assert ids_at(hub) == list(range(400))


def test_another_machine_takes_over_exactly_where_the_hub_is_and_the_first_is_shut_out(tmp_path: Path):
    source = source_of(50)
    plan = plan_over(memory(source))
    with running_hub(tmp_path / "hub") as hub:
        run_plan(
            plan,
            hub,
            tmp_path / "a",
            bounded=False,
            on_progress=stop_when(lambda now: now.rows_out == 50 and not now.outbox_epochs),
        )
        head = len(epochs_at(hub))
        source.append(0, rows(50, 50))
        second = run_plan(plan, hub, tmp_path / "b", take_over=True)
        assert second.resumed_from == head
        assert ids_at(hub) == list(range(100))
        with pytest.raises(HubRefusedError, match="--take-over") as refused:
            run_plan(plan, hub, tmp_path / "a")
        assert refused.value.code == "held"
        # What the first had not sent is still there, and the hub has nothing of it.
        assert ids_at(hub) == list(range(100))


def test_an_empty_state_directory_does_not_take_over_unasked(tmp_path: Path):
    plan = plan_over(memory(source_of(10)))
    with running_hub(tmp_path / "hub") as hub:
        run_plan(plan, hub, tmp_path / "a")
        with pytest.raises(HubRefusedError, match="--take-over"):
            run_plan(plan, hub, tmp_path / "b")
        assert ids_at(hub) == list(range(10))


def test_a_second_machine_of_the_same_name_is_stopped_before_it_claims_the_sinks_of_the_first(tmp_path: Path):
    """In the first start of the first machine, which has released nothing yet."""
    source, state = source_of(0), ["a"]
    pipeline = Pipeline(PIPELINE)
    stream = pipeline.source("numbers", memory(source), schema={"n": "bigint"})
    stream.sink("out", files(str(tmp_path / "out"), format="jsonl"))
    plan = pipeline.plan()
    stop = stop_when(lambda now: now.rows_out == 10)

    def look(now: Progress) -> None:
        if state == ["a"]:
            state.append("b")
            with pytest.raises(HubRefusedError, match="--take-over"):
                run_plan(plan, hub, tmp_path / "b")
            source.append(0, [(n,) for n in range(10)])
        stop(now)

    with running_hub(tmp_path / "hub") as hub:
        run_plan(plan, hub, tmp_path / "a", bounded=False, on_progress=look)
    assert rows_in(tmp_path / "out")["n"].to_list() == list(range(10))


def test_taking_over_without_the_hub_does_not_start_over(tmp_path: Path):
    with pytest.raises(StorageError, match="taken over"):
        run_plan(plan_over(memory(source_of(10))), nobody(), tmp_path / "a", take_over=True)


def test_taking_over_where_the_hub_has_nothing_begins_at_the_beginning(tmp_path: Path):
    with running_hub(tmp_path / "hub") as hub:
        run_plan(plan_over(memory(source_of(10))), hub, tmp_path / "a", take_over=True)
        assert ids_at(hub) == list(range(10))


def test_a_node_without_checkpoints_at_the_hub_cannot_be_taken_over(tmp_path: Path):
    plan = plan_over(memory(source_of(10)))
    with running_hub(tmp_path / "hub") as hub:
        run_plan(plan, hub, tmp_path / "a", hub_state=False)
        assert ids_at(hub) == list(range(10))
        with pytest.raises(CheckpointError, match="--no-hub-state"):
            run_plan(plan, hub, tmp_path / "b", take_over=True)


@pytest.mark.parametrize("take_over", [False, True])
def test_a_state_directory_older_than_the_hub_stops_and_says_how_to_go_on(tmp_path: Path, take_over: bool):
    source = source_of(20)
    plan = plan_over(memory(source))
    with running_hub(tmp_path / "hub") as hub:
        run_plan(
            plan,
            hub,
            tmp_path / "a",
            bounded=False,
            on_progress=stop_when(lambda now: now.rows_out == 20 and not now.outbox_epochs),
        )
        shutil.copytree(tmp_path / "a", tmp_path / "backup")
        source.append(0, rows(200, 20))
        run_plan(
            plan,
            hub,
            tmp_path / "a",
            bounded=False,
            on_progress=stop_when(lambda now: now.rows_out == 200 and not now.outbox_epochs),
        )
        before, generation = ids_at(hub), generation_at(hub)
        words = r"(disagree|old copy)(.|\n)*empty state directory and --take-over"
        for _ in range(5):
            with pytest.raises(HubError, match=words):
                run_plan(plan, hub, tmp_path / "backup", bounded=False, interval="1m", take_over=take_over)
        assert ids_at(hub) == before
        assert generation_at(hub) == generation, "however often it was started, it has fenced nobody"
        # The living one goes on.
        source.append(0, rows(5, 220))
        run_plan(plan, hub, tmp_path / "a")
        assert ids_at(hub) == list(range(225))


def test_of_two_clones_only_one_commits(tmp_path: Path):
    """They have the same epochs, so either may go on: the one that commits first."""
    source = source_of(20)
    plan = plan_over(memory(source))
    stop = {"bounded": False, "on_progress": stop_when(lambda now: now.rows_out == 20 and not now.outbox_epochs)}
    with running_hub(tmp_path / "hub") as hub:
        run_plan(plan, hub, tmp_path / "a", **stop)
        shutil.copytree(tmp_path / "a", tmp_path / "clone")
        source.append(0, rows(5, 20))
        run_plan(plan, hub, tmp_path / "clone")
        for _ in range(3):
            with pytest.raises(HubError, match="copy"):
                run_plan(plan, hub, tmp_path / "a", bounded=False, interval="1m")
        assert ids_at(hub) == list(range(25))


def test_a_hub_that_lost_its_data_is_not_sent_the_rest(tmp_path: Path):
    source = source_of(20)
    plan = plan_over(memory(source))
    stop = {"bounded": False, "on_progress": stop_when(lambda now: now.rows_out == 20 and not now.outbox_epochs)}
    with running_hub(tmp_path / "hub") as hub:
        run_plan(plan, hub, tmp_path / "a", **stop)
    source.append(0, rows(5, 20))
    with running_hub(tmp_path / "other") as hub, pytest.raises(HubError, match="acknowledged"):
        run_plan(plan, hub, tmp_path / "a")


def test_a_damaged_checkpoint_is_fetched_from_the_hub(tmp_path: Path):
    source = source_of(30)
    plan = plan_over(memory(source))
    with running_hub(tmp_path / "hub") as hub:
        first = run_plan(
            plan,
            hub,
            tmp_path / "a",
            bounded=False,
            on_progress=stop_when(lambda now: now.rows_out == 30 and not now.outbox_epochs),
        )
        for manifest in (tmp_path / "a" / PIPELINE / "node" / "manifests").iterdir():
            manifest.write_bytes(b"{}")
        source.append(0, rows(10, 30))
        second = run_plan(plan, hub, tmp_path / "a")
        assert second.resumed_from == first.progress.sent_epoch
        assert ids_at(hub) == list(range(40))


def test_a_successors_checkpoint_is_not_taken_for_a_damaged_one_of_ours(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    source = source_of(30)
    plan = plan_over(memory(source))
    all_sent = {"bounded": False, "on_progress": stop_when(lambda now: now.rows_out == 30 and not now.outbox_epochs)}
    with running_hub(tmp_path / "hub") as hub:
        first = run_plan(plan, hub, tmp_path / "a", **all_sent)
        source.append(0, rows(10, 30))
        run_plan(plan, hub, tmp_path / "b", take_over=True)
        manifests = tmp_path / "a" / PIPELINE / "node" / "manifests"
        newest = max(manifests.iterdir())
        newest.write_bytes(b"{}")
        with pytest.raises(HubRefusedError, match="belongs to another state directory"):
            run_plan(plan, hub, tmp_path / "a")
        sealed = [int(manifest.stem) for manifest in manifests.iterdir()]
        assert first.progress.epoch in sealed, "it was replayed from what is here"
        assert "checkpoint at the hub is not of this directory" in caplog.text
        assert ids_at(hub) == list(range(40))
        # It has gone on from its own epoch, and not from the successor's.
        with contextlib.closing(OsDisk(tmp_path / "a")) as disk:
            store = CheckpointStore(disk, pipeline=PIPELINE, node="node", read_only=True)
            log = store.log.read()
        assert log.delivery is not None
        assert log.delivery.acknowledged == first.progress.sent_epoch


def test_damaged_rows_of_the_newest_epoch_that_wait_for_the_hub_are_computed_again(tmp_path: Path):
    source, away = source_of(30), nobody()
    plan = plan_over(memory(source))
    all_read = stop_when(lambda now: now.rows_in == 30)
    run_plan(plan, away, tmp_path / "a", bounded=False, interval="10s", on_progress=all_read)
    store = CheckpointStore(OsDisk(tmp_path / "a"), pipeline=PIPELINE, node="node")
    runs = [run for segment in store.manifest(store.epochs()[-1]).segments for run in segment.runs]
    assert runs
    path = tmp_path / "a" / PIPELINE / "node" / "runs" / runs[0].digest
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    with running_hub(tmp_path / "hub", port=port_of(away)) as hub:
        run_plan(plan, hub, tmp_path / "a")
        assert ids_at(hub) == list(range(30))


async def says_no(scope: Any, receive: Any, send: Any) -> None:
    """A hub that knows nobody, as when a token was revoked."""
    if scope["type"] == "lifespan":
        for word in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{word}.complete"})
        return
    body = msgspec.json.encode(Refusal(error="unauthorised", message="the token has been revoked."))
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 401, "headers": head})
    await send({"type": "http.response.body", "body": body})


def test_with_a_damaged_checkpoint_a_hub_that_says_no_is_no_worse_than_one_that_is_away(tmp_path: Path):
    source = source_of(30)
    plan = plan_over(memory(source))
    with running_hub(tmp_path / "hub") as hub:
        run_plan(plan, hub, tmp_path / "a", bounded=False, on_progress=read(30))
    newest = max((tmp_path / "a" / PIPELINE / "node" / "manifests").iterdir())
    newest.write_bytes(b"{}")
    source.append(0, rows(10, 30))
    with serving(says_no) as url:
        run_plan(plan, HubAddress(url=url), tmp_path / "a", bounded=False, on_progress=read(10))
    with running_hub(tmp_path / "hub") as hub:
        run_plan(plan, hub, tmp_path / "a")
        assert ids_at(hub) == list(range(40))


def test_a_state_directory_that_never_had_to_do_with_a_hub_joins_with_empty_epochs(tmp_path: Path):
    source, pipeline = source_of(20), Pipeline(PIPELINE)
    pipeline.source("source", memory(source), schema={"id": "bigint", "ts": "timestamp"}, time="ts").filter(
        "id >= 0"
    ).sink("s", memory(MemorySink()))
    pipeline.run(state=tmp_path / "a", interval="5ms", on_progress=read(20))
    source.append(0, rows(10, 20))
    with running_hub(tmp_path / "hub") as hub:
        run_plan(plan_over(memory(source)), hub, tmp_path / "a")
        assert ids_at(hub)[-10:] == list(range(20, 30))
        with contextlib.closing(HubClient(hub)) as client:
            numbers = sorted(epoch.epoch for epoch in client.epochs(pipeline=PIPELINE, node="node", limit=1000).epochs)
        assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.slow
def test_a_full_outbox_holds_the_pipeline_up_and_says_so_until_the_hub_is_back(tmp_path: Path):
    away = nobody()
    stalls: set[str] = set()
    with contextlib.ExitStack() as stack:

        def start_hub(progress: Progress) -> None:
            if progress.stalled is not None and not stalls:
                assert progress.waits_for == "hub"
                stalls.add(progress.stalled)
                stack.enter_context(running_hub(tmp_path / "hub", port=port_of(away)))

        source = source_of(5000)
        run_plan(
            plan_over(memory(source)),
            away,
            tmp_path / "state",
            outbox_bytes_max=2_000,
            on_progress=start_hub,
            batch_rows=100,
        )
        assert "outbox is full" in stalls.pop()
        assert ids_at(away) == list(range(5000))


def test_a_node_with_a_full_outbox_can_be_stopped(tmp_path: Path):
    plan = plan_over(memory(source_of(5000)))
    look = stop_when(lambda progress: progress.stalled is not None)
    report = run_plan(
        plan, nobody(), tmp_path / "a", outbox_bytes_max=2_000, on_progress=look, batch_rows=100, bounded=False
    )
    assert report.outcome == "stopped"


def test_at_most_once_may_drop_the_oldest_rows_and_goes_on(tmp_path: Path):
    away, source = nobody(), source_of(1000)
    plan = plan_over(memory(source), guarantee="at_most_once")
    options = {"outbox_bytes_max": 4_000, "outbox_full": "drop_oldest", "batch_rows": 50}
    run_plan(plan, away, tmp_path / "a", bounded=False, on_progress=read(1000), **options)
    # Rows that come later are in other epochs than those before, however slow the machine is.
    source.append(0, rows(1000, 1000))
    run_plan(plan, away, tmp_path / "a", bounded=False, on_progress=read(1000), **options)
    with running_hub(tmp_path / "hub", port=port_of(away)) as hub:
        run_plan(plan, hub, tmp_path / "a", **options)
        found = ids_at(hub)
        epochs = [epoch.epoch for epoch in epochs_at(hub)]
    assert 0 < len(found) <= 1000
    assert found == list(range(2000 - len(found), 2000))
    assert epochs == list(range(1, len(epochs) + 1))


def test_dropping_needs_a_pipeline_that_promises_no_more(tmp_path: Path):
    with pytest.raises(ConfigError, match="at_most_once"):
        run_plan(plan_over(memory(source_of(1))), nobody(), tmp_path / "a", outbox_full="drop_oldest")


@pytest.mark.parametrize("guarantee", ["at_least_once", "at_most_once"])
def test_rows_for_the_center_wait_for_the_seal_whatever_the_guarantee(tmp_path: Path, guarantee: str):
    with running_hub(tmp_path / "hub") as hub:
        run_plan(plan_over(memory(source_of(50)), guarantee=guarantee), hub, tmp_path / "a")
        assert ids_at(hub) == list(range(50))


def test_rows_for_the_center_need_a_hub(tmp_path: Path):
    with pytest.raises(ConfigError, match="--hub"):
        run_plan(plan_over(memory(source_of(1))), None, tmp_path / "a")


def test_a_plan_of_two_tiers_is_not_for_one_engine(tmp_path: Path):
    plan = plan_over(memory(source_of(1)))
    steps = (*plan.steps, ToCenter(name="up", input=p.Input("source")))
    with pytest.raises(PipelineError, match="fordstone edge FILE"):
        run_plan(msgspec.structs.replace(plan, steps=steps), None, tmp_path / "a")


def test_a_newer_generation_ends_the_run_without_restarts(tmp_path: Path):
    source = source_of(20)
    plan = plan_over(memory(source))
    with running_hub(tmp_path / "hub") as hub, contextlib.closing(HubClient(hub)) as client:
        taken: list[int] = []

        def take_over(progress: Progress) -> None:
            if not taken and progress.rows_out >= 20 and not progress.outbox_epochs:
                lease = client.lease(PIPELINE, "node", LeaseRequest(holder="other", local=1, start="s", take_over=True))
                entry = EpochEntry(epoch=lease.head + 1, streams={}, created_us=0)
                client.commit(PIPELINE, "node", Commit(generation=lease.generation, epochs=(entry,)))
                taken.append(lease.head)
                source.append(0, rows(20, 20))

        with pytest.raises(HubError, match="taken over"):
            run_plan(plan, hub, tmp_path / "a", bounded=False, on_progress=take_over)
        assert ids_at(hub) == list(range(20))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cut.synced", "manifest.renamed", *OUTBOX_FAILPOINTS])
def test_killed_at_any_place_on_the_way_nothing_is_lost_and_nothing_doubled(tmp_path: Path, name: str):
    folder = tmp_path / "in"
    folder.mkdir()
    lines = [f'{{"id": {number}, "ts": "{time}"}}\n' for number, time in rows(300)]
    for part in range(6):
        (folder / f"{part}.jsonl").write_text("".join(lines[part * 50 : part * 50 + 50]))
    child = Path(__file__).with_name("crossing_runs.py")
    with running_hub(tmp_path / "hub") as hub:
        command = [sys.executable, str(child), hub.url, str(folder), str(tmp_path / "state")]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        hits = tmp_path / "hits"
        killed = subprocess.run(
            command,
            env=environment | {"FORDSTONE_FAILPOINT": f"{name}:1@{hits}"},
            timeout=120,
            check=False,
            capture_output=True,
        )
        assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
        subprocess.run(command, env=environment, timeout=120, check=True)
        assert sorted(ids_at(hub)) == list(range(300))
        epochs = [epoch.epoch for epoch in epochs_at(hub)]
        assert epochs == list(range(1, len(epochs) + 1))


def test_a_sink_of_kind_center_names_its_stream(tmp_path: Path):
    plan = plan_over(memory(source_of(5)))
    steps = tuple(
        msgspec.structs.replace(step, connector=ConnectorSpec("center", {"stream": "other"}))
        if isinstance(step, p.Sink)
        else step
        for step in plan.steps
    )
    with running_hub(tmp_path / "hub") as hub:
        run_plan(msgspec.structs.replace(plan, steps=steps), hub, tmp_path / "a")
        assert rows_at(hub, "other").height == 5
