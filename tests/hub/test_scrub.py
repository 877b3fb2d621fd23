"""Blobs that have rotted are found, count as missing, are never sent, and are repaired by an upload."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import urllib3
from click.testing import CliRunner
from tests.hub.running import running_hub
from tests.hub.sending import commit_of, digest_of, entry, select
from tests.waiting import until

from fordstone.cli.main import cli
from fordstone.epochs.run_file import SCRUB_PASS_US
from fordstone.errors import HubAwayError, HubRefusedError
from fordstone.hub.client.address import HubAddress
from fordstone.hub.client.client import HubClient
from fordstone.hub.messages import Checkpoint, Commit, EpochEntry, LeaseRequest, Rejection, StreamSegment
from fordstone.hub.server.serve import HubOptions, Scrubbing, _scrubbing
from fordstone.hub.store import commits, scrub
from fordstone.hub.store.blobs import CHUNK_BYTES, BlobLocks, DiskBlobs, FsspecBlobs, Stored, Upload, is_whole
from fordstone.hub.store.log import HubLog
from fordstone.hub.store.retention import Retention
from fordstone.hub.store.scrub import ReadPace, Scrub, ScrubStoppedError
from fordstone.hub.store.sqlite import SqliteStore
from fordstone.state.base import RunRef

SIZES = {"small": 5_000, "a file": 40_000, "a file of many pieces": 5 * CHUNK_BYTES // 2}


def content(size_bytes: int, seed: int = 1) -> bytes:
    return (seed.to_bytes(4, "big") * (size_bytes // 4 + 1))[:size_bytes]


def ref(data: bytes) -> RunRef:
    return RunRef(digest=digest_of(data), size_bytes=len(data), rows=1)


def rot(data_dir: Path, digest: str) -> None:
    """Flip a bit of a stored blob, on disk or in the log, as a medium does."""
    path = data_dir / "blobs" / digest[:2] / digest
    if path.exists():
        stored = bytearray(path.read_bytes())
        stored[len(stored) // 2] ^= 1
        path.write_bytes(stored)
        return
    with contextlib.closing(sqlite3.connect(data_dir / "log.sqlite")) as db, db:
        (found,) = db.execute("SELECT data FROM small_blobs WHERE digest = ?", (digest,)).fetchone()
        flipped = bytearray(found)
        flipped[len(flipped) // 2] ^= 1
        db.execute("UPDATE small_blobs SET data = ? WHERE digest = ?", (bytes(flipped), digest))


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubAddress]:
    with running_hub(tmp_path, direct=False) as address:
        yield address


@pytest.mark.parametrize("size_bytes", SIZES.values(), ids=SIZES.keys())
def test_an_upload_over_a_damaged_blob_repairs_it(hub: HubAddress, tmp_path: Path, size_bytes: int) -> None:
    data, client = content(size_bytes), HubClient(hub)
    digest = digest_of(data)
    client.put_blob(digest, data)
    rot(tmp_path, digest)
    url = f"{hub.url}/v1/blobs/{digest}"
    assert urllib3.request("PUT", url, body=data).status == 201, "it was replaced"
    assert client.get_blob(digest) == data
    assert urllib3.request("PUT", url, body=data).status == 200, "it is there"
    metrics = urllib3.request("GET", f"{hub.url}/metrics").data.decode()
    assert "\nfordstone_hub_repaired_blobs_total 1.0\n" in metrics


@pytest.mark.parametrize("size_bytes", SIZES.values(), ids=SIZES.keys())
def test_a_damaged_blob_is_never_sent_as_whole_and_counts_as_missing_from_then_on(
    hub: HubAddress, tmp_path: Path, size_bytes: int
) -> None:
    data, client = content(size_bytes), HubClient(hub)
    digest = digest_of(data)
    client.put_blob(digest, data)
    client.lease("p", "n", LeaseRequest(holder="h", local=1, start="s"))  # records what was stored
    rot(tmp_path, digest)
    url = f"{hub.url}/v1/blobs/{digest}"
    with contextlib.suppress(urllib3.exceptions.HTTPError):
        response = urllib3.request("GET", url, retries=False)
        assert response.status == 410, "the head was not sent before all was read"
    with pytest.raises(HubRefusedError, match="damaged at the hub") as raised:
        client.get_blob(digest)
    assert raised.value.code == "gone"
    assert client.missing([digest]) == {digest}
    assert urllib3.request("HEAD", url).status == 404
    client.put_blob(digest, data)
    assert client.missing([digest]) == set()
    assert client.get_blob(digest) == data


def test_a_long_blob_that_is_damaged_is_cut_off_before_its_end(hub: HubAddress, tmp_path: Path) -> None:
    data, client = content(SIZES["a file of many pieces"]), HubClient(hub)
    client.put_blob(digest_of(data), data)
    rot(tmp_path, digest_of(data))
    with pytest.raises(HubAwayError):
        client.get_blob(digest_of(data))


class Place:
    """A log and blobs without HTTP."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.path = path
        self.ran_us = 0
        self.log = HubLog(SqliteStore(path / "log.sqlite"), clock_us=lambda: self.ran_us)
        self.blobs = DiskBlobs(path / "blobs")
        self.locks = BlobLocks()
        self.read: list[int] = []
        self.scrub = Scrub(self.log, self.blobs, self.locks, on_read=self.read.append, **options)

    def put(self, data: bytes) -> str:
        digest = digest_of(data)
        if len(data) <= SIZES["small"]:
            self.log.write(lambda tx: tx.log.save_small_blob(digest, data, ran_us=tx.ran_us)).result(10)
            return digest
        with contextlib.closing(Upload(self.blobs.beside())) as upload, self.locks.arrival(digest):
            upload.write(data)
            upload.store(self.blobs, digest)
            self.log.record_blob(digest, len(data))
        self.log.write(lambda tx: None).result(10)
        return digest

    def damaged(self) -> list[str]:
        return [one.digest for one in self.log.read(lambda log: log.damaged_blobs())]

    def all_pieces(self) -> list[str]:
        found: list[str] = []
        after: str | None = ""
        while after is not None:
            piece = self.scrub.piece(after)
            found += piece.damaged
            after = piece.after
        return found


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.log.close()


def test_the_scrub_finds_damaged_and_lost_blobs_and_no_others(place: Place) -> None:
    digests = [place.put(content(size_bytes, seed)) for seed in range(1, 4) for size_bytes in (4_000, 40_000)]
    bad = [digests[0], digests[1], digests[5]]
    rot(place.path, bad[0])
    rot(place.path, bad[1])
    place.blobs.remove(bad[2])
    assert sorted(place.all_pieces()) == sorted(bad)
    assert place.damaged() == sorted(bad)
    assert len(place.read) == len(digests)


def test_a_blob_that_was_put_back_is_whole_again(place: Place) -> None:
    digest = place.put(content(40_000))
    path = place.blobs.root / digest[:2] / digest
    rot(place.path, digest)
    place.all_pieces()
    path.write_bytes(content(40_000))
    assert place.all_pieces() == []
    assert place.damaged() == []


def test_a_blob_that_was_stored_again_meanwhile_is_not_marked(place: Place) -> None:
    for data in (content(4_000), content(40_000)):
        digest = place.put(data)
        rot(place.path, digest)
        place.put(data)
        assert not place.scrub.confirm(digest)
        assert place.damaged() == []


def test_a_blob_that_is_being_uploaded_is_waited_for(place: Place) -> None:
    data = content(40_000)
    digest = place.put(data)
    rot(place.path, digest)
    outcome: list[bool] = []
    with place.locks.arrival(digest):
        thread = threading.Thread(target=lambda: outcome.append(place.scrub.confirm(digest)))
        thread.start()
        (place.blobs.root / digest[:2] / digest).write_bytes(data)
    thread.join(10)
    assert outcome == [False]


def test_a_blob_that_was_removed_meanwhile_is_not_marked(place: Place) -> None:
    assert not place.scrub.confirm(digest_of(b"unknown"))


def test_the_background_resumes_after_a_restart_and_begins_again_once_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrub, "PIECE_BLOBS", 2)
    place = Place(tmp_path)
    for seed in range(1, 6):
        place.put(content(4_000, seed))
    first = place.scrub.next_piece(lambda _: None)
    assert first is not None
    assert first.blobs == 2
    place.log.close()
    again = Place(tmp_path)
    rest = [again.scrub.next_piece(lambda _: None) for _ in range(2)]
    assert [one.blobs for one in rest if one is not None] == [2, 1]
    assert again.scrub.next_piece(lambda _: None) is None, "the next pass is not due"
    again.ran_us = SCRUB_PASS_US - 1
    assert again.scrub.next_piece(lambda _: None) is None
    again.ran_us = SCRUB_PASS_US
    assert again.scrub.next_piece(lambda _: None) is not None
    again.log.close()


@pytest.mark.parametrize(
    ("name", "value"), [("PIECE_BLOBS", 1), ("PIECE_BYTES", 4_000), ("PIECE_SECONDS", 0.0)], ids=str
)
def test_a_piece_is_bounded(place: Place, monkeypatch: pytest.MonkeyPatch, name: str, value: Any) -> None:
    for seed in range(1, 4):
        place.put(content(4_000, seed))
    monkeypatch.setattr(scrub, name, value)
    assert place.scrub.piece("").blobs == 1


def test_blobs_of_a_remote_store_can_be_left_out(place: Place) -> None:
    place.put(content(4_000))
    place.put(content(40_000))
    assert place.scrub.piece("", small_only=True).blobs == 1


class Waits(threading.Event):
    def __init__(self) -> None:
        super().__init__()
        self.waited_s = 0.0

    def wait(self, timeout: float | None = None) -> bool:
        self.waited_s += timeout or 0.0
        return self.is_set()


def test_the_bytes_per_second_are_bounded_and_a_stop_ends_it_at_once(place: Place) -> None:
    place.put(content(4_000))
    place.put(content(SIZES["a file of many pieces"]))
    stop = Waits()
    pace = ReadPace(1_000_000, stop)
    found = place.scrub.piece("", pace=pace.wait)
    assert stop.waited_s == pytest.approx(found.size_bytes / 1_000_000)
    stop.set()
    with pytest.raises(ScrubStoppedError):
        place.scrub.next_piece(pace.wait)


def test_a_medium_that_cannot_be_read_is_damage_and_a_store_that_is_away_is_not(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = place.put(content(40_000))
    for number, damaged in ((5, True), (13, False)):

        def fail(_: str, number: int = number) -> Any:
            raise Rejection("storage", "it cannot be read") from OSError(number, "no")

        with monkeypatch.context() as patched:
            patched.setattr(place.blobs, "open", fail)
            if damaged:
                assert not is_whole(place.blobs, digest)
            else:
                with pytest.raises(Rejection):
                    is_whole(place.blobs, digest)


def test_an_upload_to_a_remote_store_is_compared_with_what_is_there(tmp_path: Path) -> None:
    files = fsspec.filesystem("memory")
    blobs = FsspecBlobs(files, "/test-scrub", tmp_path / "incoming")
    data = content(3_000)
    digest = digest_of(data)

    def put() -> Stored:
        with contextlib.closing(Upload(blobs.beside())) as upload:
            upload.write(data)
            return upload.store(blobs, digest)

    assert [put(), put()] == [Stored.NEW, Stored.KNOWN]
    files.pipe_file(f"/test-scrub/{digest[:2]}/{digest}", b"x" * len(data))
    assert [put(), put()] == [Stored.REPAIRED, Stored.KNOWN]


def named(place: Place) -> dict[str, str]:
    """A segment, a state run and a manifest, with their digests."""
    datas = {name: content(4_000, seed) for seed, name in enumerate(("rows", "state", "manifest"), start=7)}
    digests = {name: place.put(data) for name, data in datas.items()}
    refs = {name: ref(data) for name, data in datas.items()}
    kept = Checkpoint(epoch=1, manifest=refs["manifest"], state=(refs["state"],))
    body = commit_of(
        EpochEntry(epoch=1, streams={"s": StreamSegment(runs=(refs["rows"],))}, created_us=0), checkpoint=kept
    )
    place.log.write(lambda tx: commits.lease(tx, "p", "n", LeaseRequest(holder="h", local=1, start="s"))).result(10)
    committed(place, body)
    return digests


def committed(place: Place, body: Commit) -> None:
    place.log.write(lambda tx: commits.commit(tx, "p", "n", body, [one.digest() for one in body.epochs])).result(10)


def test_a_node_is_asked_for_state_again_that_its_next_checkpoint_names(place: Place) -> None:
    digests = named(place)
    rot(place.path, digests["state"])
    place.all_pieces()
    state, manifest = ref(content(4_000, 8)), ref(content(4_000, 9))
    again = commit_of(entry(2), checkpoint=Checkpoint(epoch=2, manifest=manifest, state=(state,)))
    with pytest.raises(Rejection) as raised:
        committed(place, again)
    assert raised.value.refusal.missing == (digests["state"],)
    place.put(content(4_000, 8))
    committed(place, again)
    assert place.damaged() == []


def test_what_names_a_damaged_blob_is_listed(place: Place) -> None:
    digests = named(place)
    found = place.log.read(lambda log: log.blob_references(list(digests.values()), limit=5))
    assert found == {
        digests["rows"]: ["stream s of pipeline p, node n, epoch 1"],
        digests["state"]: ["checkpoint 1 of pipeline p, node n"],
        digests["manifest"]: ["checkpoint 1 of pipeline p, node n"],
    }


def test_the_sweep_leaves_damaged_blobs_marked(place: Place) -> None:
    digest = place.put(content(40_000))
    rot(place.path, digest)
    place.all_pieces()
    retention = Retention(place.log, place.blobs, place.locks)
    assert sum(retention.sweep() for _ in range(256)) == 0
    assert place.damaged() == [digest]


def test_a_small_upload_takes_the_place_of_a_file(place: Place) -> None:
    data = content(4_000)
    digest = digest_of(data)
    with contextlib.closing(Upload(place.blobs.beside())) as upload:
        upload.write(data)
        upload.store(place.blobs, digest)
    place.log.record_blob(digest, len(data))
    assert place.log.write(lambda tx: tx.log.save_small_blob(digest, data, ran_us=0)).result(10) is Stored.KNOWN
    assert place.log.read(lambda log: log.small_blob(digest)) == data


def invoke(hub: HubAddress, *options: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli, ["hub", "scrub", "--hub", hub.url, *options])
    return result.exit_code, result.stdout, result.stderr


def test_the_command_checks_all_and_lists_the_damaged_ones(
    hub: HubAddress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrub, "PIECE_BLOBS", 2)
    client = HubClient(hub)
    datas = [content(40_000, seed) for seed in range(1, 6)]
    for data in datas:
        client.put_blob(digest_of(data), data)
    client.lease("p", "n", LeaseRequest(holder="h", local=1, start="s"))
    segment = StreamSegment(runs=(ref(datas[0]),))
    client.commit("p", "n", commit_of(EpochEntry(epoch=1, streams={"s": segment}, created_us=0)))
    assert invoke(hub) == (0, "No blob is damaged.\n", "checked 5 blobs, 200 kB\n")
    rot(tmp_path, digest_of(datas[0]))
    rot(tmp_path, digest_of(datas[1]))
    assert invoke(hub, "--list")[:2] == (0, "No blob is damaged.\n"), "nobody has looked"
    code, shown, said = invoke(hub)
    assert code == 1
    assert said.endswith("checked 5 blobs, 200 kB\n")
    assert f"{digest_of(datas[0])[:12]}  40.0 kB  stream s of pipeline p, node n, epoch 1" in shown
    assert f"{digest_of(datas[1])[:12]}  40.0 kB  nothing: it will be removed" in shown
    code, printed, _ = invoke(hub, "--list", "--json")
    assert code == 1
    assert {one["digest"] for one in json.loads(printed)["damaged"]} == {digest_of(data) for data in datas[:2]}


def test_damage_is_found_in_the_background_logged_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = content(40_000)
    with running_hub(tmp_path) as hub:
        HubClient(hub).put_blob(digest_of(data), data)
        HubClient(hub).lease("p", "n", LeaseRequest(holder="h", local=1, start="s"))
    rot(tmp_path, digest_of(data))
    with running_hub(tmp_path, scrubbing=Scrubbing(bytes_per_s=1 << 30)) as hub:
        until(
            lambda: bool(select(tmp_path / "log.sqlite", "SELECT digest FROM blobs WHERE damaged")),
            "mark of a damaged blob",
            seconds_max=60,
        )
        metrics = urllib3.request("GET", f"{hub.url}/metrics").data.decode()
    assert "\nfordstone_hub_damaged_blobs 1.0\n" in metrics
    assert "\nfordstone_hub_scrubbed_bytes_total 40000.0\n" in metrics
    assert any(one.startswith("hub blob is damaged") for one in caplog.messages)


def test_a_hub_that_reads_slowly_stops_at_once(tmp_path: Path) -> None:
    data = content(40_000)
    with running_hub(tmp_path) as hub:
        HubClient(hub).put_blob(digest_of(data), data)
    with running_hub(tmp_path, scrubbing=Scrubbing(bytes_per_s=1)):
        pass


@pytest.mark.parametrize(
    ("rate", "remote", "scrubbing"),
    [
        (None, False, Scrubbing()),
        (None, True, Scrubbing(small_only=True)),
        (0, False, None),
        (7, True, Scrubbing(bytes_per_s=7)),
    ],
)
def test_the_rate_can_be_chosen_and_a_remote_store_is_read_only_if_asked_for(
    tmp_path: Path, rate: int | None, remote: bool, scrubbing: Scrubbing | None
) -> None:
    make: Callable[[], Any] = (
        (lambda: object()) if remote else lambda: DiskBlobs(tmp_path / "blobs")  # noqa: PLW0108
    )
    assert _scrubbing(HubOptions(scrub_bytes_per_s=rate), make()) == scrubbing
