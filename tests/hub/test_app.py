from __future__ import annotations

import contextlib
import gc
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
import urllib3
from tests.hub.reading import epochs_at
from tests.hub.running import polls_waiting, running_hub
from tests.hub.sending import Node, blob, checkpoint, commit_of, digest_of, entry, run
from tests.waiting import until

from fordstone.errors import HubRefusedError
from fordstone.hub.client.address import HubAddress
from fordstone.hub.client.client import HubClient
from fordstone.hub.client.reader import StreamReader
from fordstone.hub.messages import (
    BLOB_BYTES_MAX,
    BODY_BYTES_MAX,
    NAMES_MAX,
    POSITIONS_PER_REQUEST_MAX,
    ConsumerPosition,
    EpochEntry,
    EpochRange,
    EpochsRequest,
    Generation,
    Health,
    NodePosition,
    Refusal,
    StreamSegment,
)
from fordstone.hub.server.serve import READERS
from fordstone.hub.store import commits
from fordstone.lang.duration import TIME_MAX_US
from fordstone.protocol.progress import Counters

PATIENCE_S = 10.0
DIGEST = "0" * 64


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubAddress]:
    """For tests whose requests are all refused."""
    with running_hub(tmp_path_factory.mktemp("hub")) as address:
        Node(HubClient(address)).lease()
        yield address


def ask(hub: HubAddress, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """An answer with its body as JSON."""
    answer = urllib3.request(method, hub.url + path, body=body, headers=headers, retries=False, timeout=PATIENCE_S)
    return answer.status, json.loads(answer.data) if answer.data else None


def test_an_epoch_goes_the_whole_way_from_a_node_to_a_reader(node: Node) -> None:
    node.put("a", "manifest 1", "state")
    assert node.commit(entry(1, "a", watermark_us=77), checkpoint=checkpoint(1, "state")).head == 1
    (found,) = epochs_at(node.client)
    assert (found.node, found.epoch, found.runs, found.watermark_us) == ("n", 1, (run("a"),), 77)
    assert abs(found.received_us - time.time() * 1e6) < 60e6
    assert node.client.read_blob(found.runs[0], node.client.stream_nodes("p", "s").blobs) == blob("a")
    assert node.client.get_blob(found.runs[0].digest) == blob("a")
    assert node.client.checkpoint("p", "n") == checkpoint(1, "state")
    assert node.client.head("p", "n").epoch == 1


def test_a_node_is_listed_once_with_its_newest_epoch_and_again_when_it_has_committed(node: Node) -> None:
    others = [Node(node.client, name) for name in ("m", "o")]
    for other in others:
        other.lease()
    node.commit(entry(1), entry(2), entry(3))
    others[0].commit(entry(1))
    node.commit(entry(4, watermark_us=7))
    others[1].commit(entry(1, ended=True))
    first = node.client.stream_nodes("p", "s", limit=2)
    assert ([(one.node, one.epoch) for one in first.nodes], first.more) == ([("m", 1), ("n", 4)], True)
    assert first.nodes[1].chain == epochs_at(node.client)[-2].chain
    assert first.nodes[1].watermark_us == 7
    second = node.client.stream_nodes("p", "s", after=first.next, log_id=first.log_id, limit=2)
    assert ([(one.node, one.ended) for one in second.nodes], second.more) == ([("o", True)], False)
    last = node.client.stream_nodes("p", "s", after=second.next)
    assert (last.nodes, last.next, last.more) == ((), second.next, False)
    node.commit(entry(5))
    assert [(one.node, one.epoch) for one in node.client.stream_nodes("p", "s", after=last.next).nodes] == [("n", 5)]
    every = node.client.stream_nodes("p", "s", after=last.next, log_id="another log", wait_s=30)
    assert [one.node for one in every.nodes] == ["m", "o", "n"], (
        "a reader of another log reads from the beginning, and does not wait"
    )


def test_a_watermark_ahead_of_the_hubs_clock_is_kept_as_it_was_declared(node: Node) -> None:
    node.commit(entry(1, watermark_us=TIME_MAX_US, ended=True))
    (found,) = epochs_at(node.client)
    assert (found.watermark_us, found.ended) == (TIME_MAX_US, True)


def test_a_position_beyond_the_log_is_refused_because_the_hub_was_set_back(client: HubClient) -> None:
    with pytest.raises(HubRefusedError) as raised:
        client.stream_nodes("p", "s", after=7, wait_s=5)
    assert (raised.value.status, raised.value.code) == (410, "gone")
    assert "fordstone hub restore" in str(raised.value)


def test_a_waiting_reader_is_woken_by_a_commit_of_its_stream_alone(node: Node) -> None:
    pages: list[Any] = []
    reader = threading.Thread(target=lambda: pages.append(node.client.stream_nodes("p", "s", wait_s=30)))
    reader.start()
    node.commit(entry(1, stream="other"))
    reader.join(0.2)
    assert reader.is_alive()
    node.commit(entry(2))
    reader.join(PATIENCE_S)
    assert [found.epoch for found in pages[0].nodes] == [2]


def test_a_waiting_reader_gets_an_empty_page_when_its_time_is_over(client: HubClient) -> None:
    began = time.monotonic()
    assert client.stream_nodes("p", "s", wait_s=0.2).nodes == ()
    assert 0.2 <= time.monotonic() - began < PATIENCE_S


def test_long_polls_end_when_the_hub_stops(tmp_path: Path) -> None:
    outcome: list[Any] = []

    def poll(client: HubClient) -> None:
        outcome.append(client.control_page("p", "c", wait_s=60))

    with running_hub(tmp_path) as address:
        reader = threading.Thread(target=poll, args=(HubClient(address),))
        reader.start()
        until(lambda: polls_waiting(address.url) == 1, "poll that waits")
        began = time.monotonic()
    reader.join(PATIENCE_S)
    assert time.monotonic() - began < PATIENCE_S
    assert outcome[0].versions == ()


def test_a_reader_that_left_is_no_longer_waited_for(tmp_path: Path) -> None:
    with running_hub(tmp_path) as address, contextlib.closing(_connected(address)) as plain:
        plain.sendall(b"GET /v1/pipelines/p/streams/s/nodes?wait=60 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        until(lambda: polls_waiting(address.url) == 1, "request that waits")
        plain.close()
        until(lambda: polls_waiting(address.url) == 0, "end of the wait")


def test_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    with running_hub(tmp_path) as address:
        node = Node(HubClient(address))
        node.lease()
        node.put("a")
        node.commit(entry(1, "a"))
    with running_hub(tmp_path) as address:
        node = Node(HubClient(address))
        assert node.client.missing([run("a").digest]) == set()
        assert node.commit(entry(1, "a")).already
        assert node.commit(entry(2, "a")).head == 2
        assert [found.epoch for found in epochs_at(node.client)] == [1, 2]


def test_refusals_have_their_status_and_say_what_they_are_about(node: Node) -> None:
    node.put("a")
    node.commit(entry(1, "a"))
    node.lease("other", 1, take_over=True)
    cases = [
        (commit_of(entry(3), generation=node.generation), 409, "gap"),
        (commit_of(entry(1), generation=node.generation), 409, "other_content"),
        (commit_of(entry(2)), 412, "stale_generation"),
        (commit_of(entry(2, "b"), generation=node.generation), 424, "missing_blobs"),
        (commit_of(entry(2), generation=Generation(hub=9, local=9)), 404, "not_found"),
    ]
    for body, status, code in cases:
        with pytest.raises(HubRefusedError) as raised:
            node.client.commit("p", "n", body)
        assert (raised.value.status, raised.value.code) == (status, code)
    with pytest.raises(HubRefusedError) as raised:
        node.lease("third")
    assert (raised.value.status, raised.value.code) == (409, "held")


def entry_with(**changes: Any) -> EpochEntry:
    return msgspec.structs.replace(entry(1), **changes)


BIG = 2**63
BAD_COMMITS = {
    "not the epochs of the address": commit_of(entry(2)),
    "a hole": commit_of(entry(1), entry(3)),
    "none": commit_of(),
    "a checkpoint of another epoch": commit_of(entry(1), checkpoint=checkpoint(2)),
    "a stream that is a path": commit_of(entry(1, stream="../x")),
    "a stream with a line break": commit_of(entry(1, stream="s\n")),
    "a stream with two dots": commit_of(entry(1, stream="s..s")),
    "more streams than an epoch may have": commit_of(
        entry_with(streams={f"s{number}": StreamSegment(runs=()) for number in range(NAMES_MAX + 1)})
    ),
    "a control that is a path": commit_of(entry_with(controls={"/etc": 1})),
    "a version beyond the log": commit_of(entry_with(controls={"c": BIG})),
    "a time beyond the log": commit_of(entry_with(created_us=BIG)),
    "a watermark beyond the log": commit_of(entry(1, watermark_us=-BIG - 1)),
    "a generation beyond the log": commit_of(entry(1), generation=Generation(hub=BIG, local=0)),
    "a digest that is a path": commit_of(
        entry_with(streams={"s": StreamSegment(runs=(msgspec.structs.replace(run("a"), digest="../" + "0" * 61),))})
    ),
    "a negative size": commit_of(
        entry_with(streams={"s": StreamSegment(runs=(msgspec.structs.replace(run("a"), size_bytes=-1),))})
    ),
}


@pytest.mark.parametrize("body", BAD_COMMITS.values(), ids=BAD_COMMITS.keys())
def test_a_body_out_of_bounds_is_refused(shared: HubAddress, body: Any) -> None:
    status, refusal = ask(shared, "POST", "/v1/pipelines/p/nodes/n/epochs/1-1", msgspec.json.encode(body))
    assert status == 400
    assert msgspec.convert(refusal, Refusal).error in {"bad_request", "bad_name"}
    assert HubClient(shared).head("p", "n").epoch == 0


@pytest.mark.parametrize(
    ("method", "path", "status", "word"),
    [
        ("GET", "/v1/pipelines/..%2f..%2fetc/nodes/n/head", 400, "bad_name"),
        ("GET", "/v1/pipelines/%2e%2e/nodes/n/head", 400, "bad_name"),
        ("GET", "/v1/pipelines/p/nodes/%00/head", 400, "bad_name"),
        ("GET", "/v1/pipelines/p/nodes/n%C3%A4/head", 400, "bad_name"),
        ("GET", f"/v1/pipelines/p/nodes/{'n' * 101}/head", 400, "bad_name"),
        ("GET", "/v1/blobs/x", 400, "bad_name"),
        ("GET", f"/v1/blobs/{DIGEST}", 404, "not_found"),
        ("GET", f"/v1/blobs/{'A' * 64}", 400, "bad_name"),
        ("GET", "/v1/pipelines/p/nodes/n/checkpoint", 404, "not_found"),
        ("GET", "/v1/pipelines/p/consumers/c", 404, "not_found"),
        ("POST", "/v1/pipelines/p/nodes/n/epochs/2-1", 400, "bad_request"),
        ("POST", "/v1/pipelines/p/nodes/n/epochs/0-1", 400, "bad_request"),
        ("POST", "/v1/pipelines/p/nodes/n/epochs/1", 400, "bad_request"),
        ("POST", f"/v1/pipelines/p/nodes/n/epochs/1-{10**17}", 400, "bad_request"),
        ("GET", "/v1/pipelines/p/streams/s/nodes?after=-1", 400, "bad_request"),
        ("GET", f"/v1/pipelines/p/streams/s/nodes?after={10**19}", 400, "bad_request"),
        ("GET", "/v1/pipelines/p/streams/s/nodes?wait=nan", 400, "bad_request"),
        ("GET", "/v1/pipelines/p/streams/s/nodes?limit=99999999", 400, "bad_request"),
        ("GET", "/v1/epochs?pipeline=../x", 400, "bad_name"),
        ("GET", "/v1/nothing", 404, "not_found"),
        ("DELETE", "/v1/nodes", 405, "bad_request"),
    ],
)
def test_an_odd_question_gets_a_refusal(shared: HubAddress, method: str, path: str, status: int, word: str) -> None:
    body = msgspec.json.encode(commit_of(entry(1))) if method == "POST" else None
    answer = ask(shared, method, path, body)
    assert (answer[0], answer[1]["error"]) == (status, word)
    assert msgspec.convert(answer[1], Refusal).message


def test_a_body_that_is_no_json_or_has_unknown_fields_is_refused(shared: HubAddress) -> None:
    for body in (b"", b"{", b"[]", b'{"holder": "h", "local": 1, "extra": 2}', b"[" * 60_000, b"\xff\xfe"):
        status, refusal = ask(shared, "POST", "/v1/pipelines/p/nodes/n/lease", body)
        assert (status, refusal["error"]) == (400, "bad_request")


def test_blobs_are_stored_once_and_checked(hub: HubAddress, client: HubClient) -> None:
    data = blob("a")
    path = f"/v1/blobs/{digest_of(data)}"
    assert urllib3.request("HEAD", hub.url + path, retries=False).status == 404
    assert ask(hub, "PUT", path, data)[0] == 201
    assert ask(hub, "PUT", path, data)[0] == 200
    status, refusal = ask(hub, "PUT", path, b"other bytes")
    assert (status, refusal["error"]) == (400, "wrong_digest")
    head = urllib3.request("HEAD", hub.url + path, retries=False)
    assert (head.status, head.headers["content-length"], head.data) == (200, str(len(data)), b"")
    assert client.get_blob(digest_of(data)) == data
    assert client.missing([digest_of(data), DIGEST]) == {DIGEST}


@pytest.mark.parametrize("size_bytes", [0, 1, 16_384, 16_385, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 5_000_000])
def test_blobs_of_every_size_go_in_and_out_in_chunks_or_whole(hub: HubAddress, size_bytes: int) -> None:
    data = bytes(range(256)) * (size_bytes // 256) + b"x" * (size_bytes % 256)
    path = f"/v1/blobs/{digest_of(data)}"
    chunks = (data[start : start + 70_000] for start in range(0, len(data), 70_000))
    answer = urllib3.request("PUT", hub.url + path, body=chunks, retries=False, timeout=PATIENCE_S)
    assert answer.status == 201
    found = urllib3.request("GET", hub.url + path, retries=False, timeout=PATIENCE_S)
    assert (found.data == data, found.headers["content-length"]) == (True, str(size_bytes))


def _connected(hub: HubAddress) -> socket.socket:
    parts = urlsplit(hub.url)
    return socket.create_connection((parts.hostname, parts.port), timeout=PATIENCE_S)


@pytest.mark.parametrize("sent", [1_000, 3_000_000])
@pytest.mark.parametrize("chunked", [False, True])
def test_an_upload_that_breaks_off_leaves_nothing(tmp_path: Path, sent: int, chunked: bool) -> None:
    data = b"z" * 4_000_000
    with running_hub(tmp_path) as address:
        with contextlib.closing(_connected(address)) as plain:
            how = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(data)}"
            plain.sendall(f"PUT /v1/blobs/{digest_of(data)} HTTP/1.1\r\nHost: localhost\r\n{how}\r\n\r\n".encode())
            part = data[:sent]
            plain.sendall(b"%x\r\n%b\r\n" % (len(part), part) if chunked else part)
        until(lambda: not list((tmp_path / "blobs" / "incoming").iterdir()), "removal of the part that came")
        client = HubClient(address)
        assert client.missing([digest_of(data)]) == {digest_of(data)}
        client.put_blob(digest_of(data), data)
        assert client.get_blob(digest_of(data)) == data
    assert [path.name for path in (tmp_path / "blobs").glob("??/*")] == [digest_of(data)]
    assert list((tmp_path / "blobs" / "incoming").iterdir()) == []


def test_a_commit_that_breaks_off_changes_nothing(hub: HubAddress, node: Node) -> None:
    body = msgspec.json.encode(commit_of(entry(1)))
    with contextlib.closing(_connected(hub)) as plain:
        head = f"POST /v1/pipelines/p/nodes/n/epochs/1-1 HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        plain.sendall(head.encode() + body[:-5])
    assert node.client.head("p", "n").epoch == 0
    assert node.commit(entry(1)).head == 1


@pytest.mark.parametrize(
    ("method", "path", "size_bytes"),
    [
        ("PUT", f"/v1/blobs/{DIGEST}", BLOB_BYTES_MAX + 1),
        ("POST", "/v1/blobs/missing", BODY_BYTES_MAX + 1),
        ("POST", "/v1/pipelines/p/nodes/n/epochs/1-1", 10**30),
    ],
)
def test_a_body_that_says_it_is_too_large_is_refused_before_it_comes(
    shared: HubAddress, method: str, path: str, size_bytes: int
) -> None:
    parts = urlsplit(shared.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=PATIENCE_S)
    connection.putrequest(method, path)
    connection.putheader("Content-Length", str(size_bytes))
    connection.endheaders()
    answer = connection.getresponse()
    assert answer.status in {400, 413}
    if answer.status == 413:
        assert json.loads(answer.read())["error"] == "too_large"
    connection.close()


def test_a_chunked_body_is_bounded_while_it_comes(shared: HubAddress) -> None:
    chunk = b" " * (1 << 20)
    with contextlib.closing(_connected(shared)) as plain:
        plain.sendall(b"POST /v1/blobs/missing HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        with contextlib.suppress(OSError):
            for _ in range((BODY_BYTES_MAX >> 20) + 2):
                plain.sendall(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        assert b" 413 " in plain.recv(100)


@pytest.mark.parametrize("size_bytes", [100_000, 3_000_000], ids=["at its end", "while more of it comes"])
def test_a_full_disk_is_reported_and_the_upload_works_once_there_is_room(
    hub: HubAddress, client: HubClient, monkeypatch: pytest.MonkeyPatch, size_bytes: int
) -> None:
    import errno

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    data = b"a" * size_bytes
    path = f"/v1/blobs/{digest_of(data)}"
    with monkeypatch.context() as patch:
        patch.setattr("fordstone.storage.disk.os.write", full)
        status, refusal = ask(hub, "PUT", path, data)
    assert (status, refusal["error"]) == (507, "storage")
    assert client.missing([digest_of(data)]) == {digest_of(data)}
    assert ask(hub, "PUT", path, data)[0] == 201


def test_what_people_ask_for(node: Node) -> None:
    client = node.client
    node.put("a", "b")
    node.commit(entry(1, "a"), entry(2, "a", "b"))
    node.commit(entry(3, "b"))
    other = Node(client, "m")
    other.lease(local=4)
    other.commit(entry(1, watermark_us=-5))
    chains = {(one.node, one.epoch): one.chain for one in epochs_at(client)}
    passed = {"n": NodePosition(2, chains["n", 2]), "m": NodePosition(2, "0" * 64), "lost": NodePosition(1, "0" * 64)}
    refused = client.consumer("p", "spark", ConsumerPosition(streams={"s": passed})).refused["s"]
    assert refused.keys() == {"m", "lost"}
    assert "ends at epoch 1, but epoch 2 was read" in refused["m"]
    client.report_health(
        "n",
        "p",
        Health(state="running", sent_us=9, progress=Counters(epoch=3), problem="\x1b[2J\n\u202e" + "x" * 9_999),
    )
    with pytest.raises(HubRefusedError, match="no lease"):
        client.report_health("silent", "q", Health(state="failed", sent_us=9))
    Node(client, "silent", "q").lease()
    client.report_health("silent", "q", Health(state="failed", sent_us=9))
    (stream,) = client.streams().streams
    assert (stream.nodes, stream.epochs, stream.rows, stream.watermark_us) == (2, 4, 4, -5)
    assert stream.consumers == {"spark": 2}
    nodes = {(info.pipeline, info.node): info for info in client.nodes().nodes}
    assert nodes.keys() == {("p", "m"), ("p", "n"), ("q", "silent")}
    assert nodes["p", "m"].generation == Generation(hub=1, local=4)
    assert (nodes["q", "silent"].head, nodes["q", "silent"].committed_us) == (0, None)
    health = nodes["p", "n"].health
    assert health is not None
    assert (health.state, len(health.problem)) == ("running", 2_000)
    assert health.problem.startswith(" [2J  xxx"), "it would be a command to the terminal that shows it"
    found = client.epochs(pipeline="p", node="n", limit=2).epochs
    assert [(info.epoch, info.first, info.last, info.rows) for info in found] == [(3, 3, 3, 1), (2, 1, 2, 2)]
    assert [info.node for info in client.epochs().epochs] == ["m", "n", "n", "n"]


def test_many_nodes_commit_at_once_and_each_has_its_epochs_in_order(hub: HubAddress) -> None:
    def work(name: str) -> None:
        node = Node(HubClient(hub), name)
        node.lease()
        node.put(name)
        for epoch in range(1, 11):
            node.commit(entry(epoch, name))

    threads = [threading.Thread(target=work, args=(f"n{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    found: dict[str, list[int]] = {}
    for one in epochs_at(HubClient(hub)):
        found.setdefault(one.node, []).append(one.epoch)
    assert found == {f"n{number}": list(range(1, 11)) for number in range(8)}


def test_half_a_character_in_a_text_is_no_reason_to_fail(shared: HubAddress) -> None:
    body = b'{"state": "failed", "sent_us": 1, "problem": "\\ud800"}'
    status, refusal = ask(shared, "PUT", "/v1/nodes/n/health/p", body)
    assert (status, refusal["error"]) == (400, "bad_request")
    assert ask(shared, "GET", "/v1/nodes")[0] == 200


def test_a_hub_over_another_kind_of_store(tmp_path: Path) -> None:
    data = b"rows" * 500_000
    with running_hub(tmp_path, blobs=f"memory://{tmp_path.name}") as address:
        client = HubClient(address)
        client.put_blob(digest_of(data), data)
        assert client.get_blob(digest_of(data)) == data
        assert client.missing([digest_of(data)]) == set()
    assert not (tmp_path / "blobs").exists()


def test_a_node_does_not_wait_for_the_long_reads_of_a_center(
    hub: HubAddress, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, end = threading.Semaphore(0), threading.Event()
    found = commits.stream_epochs

    def slow(*args: Any) -> Any:
        began.release()
        assert end.wait(PATIENCE_S)
        return found(*args)

    monkeypatch.setattr(commits, "stream_epochs", slow)
    asked = EpochsRequest(nodes={"n": EpochRange()})
    with ThreadPoolExecutor(READERS) as threads:
        clients = [HubClient(hub) for _ in range(READERS)]
        waiting = [threads.submit(client.stream_epochs, "p", "s", asked) for client in clients]
        for _ in waiting:
            assert began.acquire(timeout=PATIENCE_S)
        assert node.client.head("p", "n").epoch == 0
        assert not any(one.done() for one in waiting)
        end.set()
        for one, client in zip(waiting, clients, strict=True):
            one.result(PATIENCE_S)
            client.close()


def test_more_positions_than_a_request_may_have_are_rejected_and_clients_send_several(client: HubClient) -> None:
    most = POSITIONS_PER_REQUEST_MAX
    at = {f"n{number}": NodePosition() for number in range(most)}
    with pytest.raises(HubRefusedError, match=f"at most {most} positions, this one {most + 1}"):
        client.consumer("p", "c", ConsumerPosition(streams={"s": at, "t": {"n": NodePosition()}}))
    beyond = {f"{name}-{'x' * 90}": NodePosition(1, "a" * 64) for name in (*at, "last")}
    assert StreamReader(client, "p", "s").acknowledge("c", beyond).keys() == beyond.keys()
    assert StreamReader(client, "p", "s").acknowledge("c", {}) == {}


def commit_json(*epochs: int, state: int = 0) -> dict[str, Any]:
    """A commit whose checkpoint names blobs that nobody has sent."""
    named = [{"digest": DIGEST, "size_bytes": 1, "rows": 0}] * (1 + state)
    return {
        "generation": {"hub": 1, "local": 1},
        "epochs": [{"epoch": epoch, "streams": {}, "created_us": 0} for epoch in epochs],
        "checkpoint": {"epoch": epochs[-1], "manifest": named[0], "state": named[1:]},
    }


@pytest.mark.parametrize(
    ("body", "where", "status"),
    [
        pytest.param(commit_json(1), "1-1", 424, id="by the log"),
        pytest.param(commit_json(9), "9-9", 409, id="before it is looked at"),
        pytest.param(commit_json(1), "1-2", 400, id="by its content"),
        pytest.param(commit_json(1, state=5_000), "1-2", 400, id="by its content on a thread"),
        pytest.param(commit_json(1) | {"after": 7}, "1-1", 400, id="as no commit"),
    ],
)
def test_a_rejected_commit_leaves_no_memory_until_garbage_is_collected(
    shared: HubAddress, body: Any, where: str, status: int
) -> None:
    def kept() -> list[object]:
        return [one for one in gc.get_objects() if isinstance(one, EpochEntry) and id(one) not in before]

    gc.collect()
    gc.disable()
    before = {id(one) for one in gc.get_objects() if isinstance(one, EpochEntry)}
    try:
        assert ask(shared, "POST", f"/v1/pipelines/p/nodes/n/epochs/{where}", json.dumps(body))[0] == status
        until(lambda: not kept(), "end of the request", seconds_max=PATIENCE_S)
    finally:
        gc.enable()
