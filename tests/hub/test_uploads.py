"""What nodes have uploaded: which blobs they may name and read, and how much of the disk they may take."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import urllib3
from tests.hub.running import now_us, running_hub
from tests.hub.sending import Node, blob, checkpoint, digest_of, entry, run, select

from fordstone.errors import HubAwayError, HubRefusedError
from fordstone.hub.client.address import HubAddress
from fordstone.hub.client.client import HubClient
from fordstone.hub.messages import ConsumerPosition, ControlPublish, Refusal, Rejection
from fordstone.hub.server import uploads as uploads_module
from fordstone.hub.server.auth import TokenFile, Tokens
from fordstone.hub.server.limits import DISK_CHECK_INTERVAL_S, RESERVED_BYTES_MAX, DiskQuota
from fordstone.hub.server.serve import BLOB_THREADS
from fordstone.hub.server.uploads import KEPT_S, READ_EVERY_S, NodeUploads
from fordstone.hub.store.log_reader import LogReader
from fordstone.hub.store.log_records import NodeBytes

GIB = 1 << 30
PATIENCE_S = 30.0


class Fleet:
    """A hub with tokens, and clients of it by the names of their tokens."""

    def __init__(self, data: Path, **options: Any) -> None:
        self.data, self.options = data, options
        self.file = TokenFile(data / "tokens")
        self.texts = {
            "a": self.file.add("a", role="node", node="a", now_us=1),
            "b": self.file.add("b", role="node", node="b", now_us=1),
            "b-of-p": self.file.add("b-of-p", role="node", node="b", pipelines=("p",), now_us=1),
            "center": self.file.add("center", role="center", now_us=1),
        }
        self.clients: dict[str, HubClient] = {}
        self.url = ""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        tokens = Tokens(self.file, clock_s=time.monotonic, clock_us=now_us)
        with running_hub(self.data / "hub", tokens=tokens, **self.options) as hub, contextlib.ExitStack() as stack:
            self.url = hub.url
            for name, text in self.texts.items():
                client = HubClient(HubAddress(url=hub.url, token=text))
                self.clients[name] = stack.enter_context(contextlib.closing(client))
            yield

    def node(self, name: str, pipeline: str = "p") -> Node:
        node = Node(self.clients[name], node=name, pipeline=pipeline)
        node.lease()
        return node

    def status(self, name: str, method: str, text: str) -> int:
        """What the hub answers to a request for the blob of a text."""
        headers = {"authorization": f"Bearer {self.texts[name]}"}
        body = blob(text) if method == "PUT" else None
        url = f"{self.url}/v1/blobs/{run(text).digest}"
        return urllib3.request(method, url, body=body, headers=headers, retries=False).status


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path)
    with fleet.running():
        yield fleet


def reads(fleet: Fleet, name: str, text: str) -> bool:
    found = fleet.status(name, "GET", text)
    assert fleet.status(name, "HEAD", text) == found
    assert found in {200, 404}
    return found == 200


def test_a_node_reads_neither_rows_nor_state_of_another(fleet):
    node = fleet.node("a")
    node.put("rows", "state", "manifest 1")
    node.commit(entry(1, "rows"), checkpoint=checkpoint(1, "state"))
    for text in ("rows", "state", "manifest 1"):
        assert not reads(fleet, "b", text)
        assert reads(fleet, "center", text)
    assert reads(fleet, "a", "state"), "its own state, to resume from"
    assert reads(fleet, "a", "manifest 1")


def test_a_node_does_not_learn_which_blobs_others_have(fleet):
    fleet.node("a").put("x")
    digest = run("x").digest
    assert fleet.clients["center"].missing([digest]) == set()
    assert fleet.clients["b"].missing([digest]) == {digest}
    assert fleet.status("b", "PUT", "x") == 201, "as if it were new"
    assert fleet.status("b", "PUT", "x") == 200, "now it is its own"
    assert fleet.clients["b"].missing([digest]) == set()
    assert reads(fleet, "b", "x")


@pytest.mark.parametrize(
    ("read", "ask"),
    [
        ("may_read_blob", lambda fleet: fleet.status("a", "GET", "x")),
        ("state_blobs", lambda fleet: fleet.clients["a"].missing([run("x").digest])),
        ("node_bytes", lambda fleet: fleet.status("a", "PUT", "x")),
    ],
)
def test_a_node_with_much_at_the_hub_keeps_no_other_waiting(fleet, monkeypatch, read, ask):
    fleet.node("b").put("y")
    began, end = threading.Semaphore(0), threading.Event()
    found = getattr(LogReader, read)

    def slow(log: LogReader, node: str, *args: Any) -> Any:
        if node == "a":
            began.release()
            assert end.wait(PATIENCE_S)
        return found(log, node, *args)

    monkeypatch.setattr(LogReader, read, slow)
    with ThreadPoolExecutor(BLOB_THREADS) as threads:
        waiting = [threads.submit(ask, fleet) for _ in range(BLOB_THREADS)]
        try:
            assert began.acquire(timeout=PATIENCE_S)
            assert fleet.clients["b"].head("p", "b").epoch == 0
            assert reads(fleet, "b", "y")
            assert not reads(fleet, "b", "x")
            assert not began.acquire(timeout=0), "one at a time"
            assert not any(one.done() for one in waiting)
        finally:
            end.set()
        for one in waiting:
            one.result(PATIENCE_S)


def test_a_commit_cannot_name_the_blob_of_another_node(fleet):
    fleet.node("a").put("secret")
    node = fleet.node("b")
    node.put("manifest 1")
    for named, state in ((entry(1, "secret"), None), (entry(1), checkpoint(1, "secret"))):
        with pytest.raises(HubRefusedError) as refused:
            node.commit(named, checkpoint=state)
        assert refused.value.code == "missing_blobs"
        assert cast("Refusal", refused.value.refusal).missing == (run("secret").digest,)
    assert not reads(fleet, "b", "secret")
    node.put("secret")
    assert node.commit(entry(1, "secret")).head == 1, "it has the bytes itself"


def test_state_that_stays_needs_no_second_upload(fleet):
    node = fleet.node("a")
    for epoch in (1, 2, 3, 4):
        node.put(f"rows {epoch}", f"manifest {epoch}", *(["state"] if epoch == 1 else []))
        node.commit(entry(epoch, f"rows {epoch}"), checkpoint=checkpoint(epoch, "state"))
    assert fleet.clients["a"].missing([run("state").digest, run("rows 4").digest]) == {run("rows 4").digest}


def test_a_node_reads_control_tables_of_its_pipelines_only(fleet):
    center = fleet.clients["center"]
    for pipeline in ("p", "q"):
        center.put_blob(run(pipeline).digest, blob(pipeline))
        center.publish(pipeline, "limits", ControlPublish(owner="o", batch=1, blob=run(pipeline)))
    assert [reads(fleet, "b-of-p", pipeline) for pipeline in ("p", "q")] == [True, False]
    assert [reads(fleet, "b", pipeline) for pipeline in ("p", "q")] == [True, True]


def test_a_token_for_one_pipeline_reads_no_state_of_another(fleet):
    node = fleet.node("b", pipeline="q")
    node.put("rows", "state", "manifest 1")
    node.commit(entry(1, "rows"), checkpoint=checkpoint(1, "state"))
    assert reads(fleet, "b", "state")
    assert not reads(fleet, "b-of-p", "state")
    assert fleet.clients["b-of-p"].missing([run("state").digest]) == {run("state").digest}


def test_after_a_restart_uploads_without_a_commit_are_sent_again(tmp_path):
    fleet = Fleet(tmp_path)
    with fleet.running():
        fleet.node("a").put("rows")
    with fleet.running():
        node = fleet.node("a")
        with pytest.raises(HubRefusedError) as refused:
            node.commit(entry(1, "rows"))
        assert cast("Refusal", refused.value.refusal).missing == (run("rows").digest,)
        node.put("rows")
        assert node.commit(entry(1, "rows")).head == 1


def test_a_hub_without_tokens_compares_nobody(hub):
    with contextlib.closing(HubClient(hub)) as client:
        client.put_blob(run("x").digest, blob("x"))
        node = Node(client)
        node.lease()
        assert node.commit(entry(1, "x")).head == 1
        assert client.get_blob(run("x").digest) == blob("x")


# Space on the disk.


@dataclass
class Disk:
    free: int
    total: int = 1_000 * GIB


class Share:
    """Uploads with a disk and a clock that only tests move."""

    def __init__(self, free: float, **more: Any) -> None:
        self.free, self.now_s = free, 0.0
        self.uploads = NodeUploads(free_bytes=lambda: self.free, clock_s=lambda: self.now_s, **more)
        self.stored: dict[str, int] = {}

    def put(self, node: str, number: int, size: int = 10) -> bool:
        """Upload a blob that is new; False if it is refused."""
        if self.uploads.is_unread(node, size):
            self.uploads.read(node, NodeBytes(blobs=self.stored.get(node, 0), log=0))
        try:
            with self.uploads.upload(node, size):
                self.uploads.add(node, f"{number:064x}", size, new=True)
        except Rejection:
            return False
        self.free -= size
        return True


def test_a_node_alone_takes_half_of_the_space_and_others_still_have_some():
    share = Share(1_000)
    taken = sum(share.put("greedy", number) for number in range(200))
    assert (taken, share.free) == (50, 500)
    assert sum(share.put("other", number) for number in range(1_000, 1_200)) == 25
    assert share.put("third", 2_000)


def test_what_the_log_has_of_a_node_counts_and_what_consumers_have_read_does_not():
    share = Share(100)
    share.stored["n"] = 95
    assert not share.put("n", 1)
    share.stored["n"] = 0
    assert not share.put("n", 1), "the log is not asked again at once"
    share.now_s += READ_EVERY_S
    assert share.put("n", 1)


def test_commits_move_what_was_uploaded_to_what_the_log_has():
    share = Share(1_000)
    for number in range(40):
        assert share.put("n", number)
    share.uploads.commit("n", [f"{number:064x}" for number in range(40)])
    assert not share.uploads.has("n", f"{7:064x}")
    assert [share.put("n", number) for number in range(40, 52)] == [True] * 10 + [False] * 2
    assert share.put("m", 99)


def test_uploads_that_no_commit_names_are_forgotten_after_a_while():
    share = Share(1_000)
    for number in range(50):
        assert share.put("n", number)
    assert not share.put("n", 50)
    share.now_s += KEPT_S
    assert not share.put("n", 50)
    assert share.uploads.has("n", f"{1:064x}")
    share.free += 500  # retention has removed them
    share.now_s += KEPT_S
    assert share.put("n", 50)
    assert not share.uploads.has("n", f"{1:064x}")


def test_an_upload_counts_while_it_comes():
    share = Share(100)
    share.uploads.read("n", NodeBytes(blobs=0, log=0))
    with share.uploads.upload("n", 60):
        assert not share.put("n", 1, size=60)
        assert share.put("m", 2, size=30)
    assert share.put("n", 1, size=60)


def test_the_number_of_uploads_without_a_commit_is_bounded_and_none_leaves_the_count_before_it_leaves_the_disk(
    monkeypatch,
):
    monkeypatch.setattr(uploads_module, "DIGESTS_MAX", 5)
    share = Share(1_000)
    assert share.put("n", 0, size=300)
    assert [share.put("n", number, size=1) for number in range(1, 8)] == [True] * 4 + [False] * 3
    assert not share.put("n", 9, size=350), "the large one still counts"
    assert share.put("m", 10, size=300)
    share.uploads.commit("n", [f"{number:064x}" for number in range(3)])
    assert [share.put("n", number, size=1) for number in range(11, 16)] == [True] * 3 + [False] * 2


def test_uploads_in_progress_count_to_those_without_a_commit(monkeypatch):
    monkeypatch.setattr(uploads_module, "DIGESTS_MAX", 2)
    share = Share(1_000)
    share.uploads.read("n", NodeBytes(blobs=0, log=0))
    with share.uploads.upload("n", 1), share.uploads.upload("n", 1):
        assert not share.put("n", 1)
    assert share.put("n", 1)


def test_what_commits_add_to_the_log_counts_also_if_blobs_are_elsewhere():
    for on_disk, taken in ((True, 90), (False, 50)):
        share = Share(100, blobs_on_disk=on_disk)
        share.uploads.read("n", NodeBytes(blobs=40, log=45))
        with share.uploads.coming("n", 5):
            share.uploads.commit("n", [], log_bytes=5)
        assert share.put("n", 1, size=1 if on_disk else 1_000)
        with pytest.raises(Rejection, match=f"node n has {taken + on_disk} bytes"), share.uploads.coming("n", 60):
            pass


def test_rows_of_the_log_count_as_long_as_they_are_there(tmp_path):
    disk, ticks = Disk(50 * GIB), iter(range(10**9))
    quota = DiskQuota([tmp_path], usage=lambda _: disk, clock_s=lambda: next(ticks) * DISK_CHECK_INTERVAL_S)
    fleet = Fleet(tmp_path, quota=quota, small_bytes_max=0)
    with fleet.running():
        node = fleet.node("a")
        node.put("1")
        runs = 2_000
        node.commit(entry(1, *["1"] * runs))
        (kept,) = select(tmp_path / "hub" / "log.sqlite", "SELECT sum(log_bytes) FROM stream_nodes")[0]
        assert kept > runs * 100
        disk.free = RESERVED_BYTES_MAX + kept + runs * 100
        with pytest.raises(HubAwayError, match="node a has"):
            node.commit(entry(2, *["1"] * runs))
        disk.free = 50 * GIB
        node.put("1")
        node.commit(entry(2, *["1"] * runs))
        assert select(tmp_path / "hub" / "log.sqlite", "SELECT sum(log_bytes) FROM stream_nodes") == [(2 * kept,)]


def test_the_disk_of_a_hub_is_shared_by_its_nodes(tmp_path):
    disk, ticks = Disk(50 * GIB), iter(range(10**9))
    quota = DiskQuota([tmp_path], usage=lambda _: disk, clock_s=lambda: next(ticks) * DISK_CHECK_INTERVAL_S)
    fleet = Fleet(tmp_path, quota=quota, small_bytes_max=0)
    with fleet.running():
        greedy = fleet.node("a")
        greedy.put("1")
        greedy.commit(entry(1, "1"))
        disk.free = RESERVED_BYTES_MAX + 2 * len(blob("1")) - 1
        with pytest.raises(HubAwayError, match=r"node a has \d{3} bytes at the hub") as away:
            greedy.put("2")
        assert "507" in str(away.value)
        fleet.node("b").put("2")
        fleet.clients["center"].put_blob(digest_of(b"large"), b"large")
        fleet.clients["center"].consumer("p", "c", ConsumerPosition(streams={}))
