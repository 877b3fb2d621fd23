"""The hub as a process: where it listens, what it refuses to start with, how it stops, and what it does to odd connections."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest
import urllib3
from tests.hub.running import polls_waiting
from tests.hub.started import SECONDS_MAX, start, started
from tests.waiting import until

from fordstone.errors import ConfigError
from fordstone.hub.listen import bound, parse_listen
from fordstone.hub.messages import (
    Commit,
    Committed,
    ConsumerPosition,
    EpochEntry,
    EpochRange,
    EpochsRequest,
    Head,
    Lease,
    LeaseRequest,
    NodePosition,
    Refusal,
    StreamEpochs,
    StreamNodes,
    StreamSegment,
)  # fmt: skip
from fordstone.hub.server.auth import TokenFile
from fordstone.hub.server.serve import HubOptions, check_exposure, tls_context
from fordstone.state.base import RunRef

HTTP = urllib3.PoolManager(retries=False, timeout=SECONDS_MAX)


def ask(method: str, url: str, body: object = None, *, token: str | None = None) -> urllib3.BaseHTTPResponse:
    data = body if isinstance(body, bytes) else None if body is None else msgspec.json.encode(body)
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    return HTTP.request(method, url, body=data, headers=headers)


def commit_one(url: str, node: str = "n1", *, token: str | None = None) -> Committed:
    """One epoch with three rows, of which the hub sees only the bytes."""
    data = b"three rows"
    digest = hashlib.sha256(data).hexdigest()
    assert ask("PUT", f"{url}/v1/blobs/{digest}", data, token=token).status in {200, 201, 204}
    base = f"{url}/v1/pipelines/p/nodes/{node}"
    granted = ask("POST", f"{base}/lease", LeaseRequest(holder="h" * 32, local=1, start="s"), token=token)
    lease = msgspec.json.decode(granted.data, type=Lease)
    runs = (RunRef(digest=digest, size_bytes=len(data), rows=3),)
    entry = EpochEntry(epoch=1, streams={"s": StreamSegment(runs=runs)}, created_us=1)
    answered = ask("POST", f"{base}/epochs/1-1", Commit(generation=lease.generation, epochs=(entry,)), token=token)
    assert answered.status in {200, 201}, answered.data
    return msgspec.json.decode(answered.data, type=Committed)


def raw(url: str, data: bytes) -> bytes:
    """What the hub answers to these bytes, until it closes the connection."""
    place = urlsplit(url)
    with socket.create_connection((place.hostname or "", place.port or 0), timeout=SECONDS_MAX) as sock:
        sock.sendall(data)
        answer = b""
        while piece := sock.recv(65_536):
            answer += piece
    return answer


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory):
    with started(tmp_path_factory.mktemp("serve") / "data", "--body-max", "2000", "--blob-max", "100000") as hub:
        yield hub.url


@pytest.mark.parametrize(
    ("text", "found"),
    [("127.0.0.1:7411", ("127.0.0.1", 7411)), ("[::1]:0", ("::1", 0)), ("localhost:1", ("localhost", 1))],
)
def test_an_address_is_host_and_port(text, found):
    assert parse_listen(text) == found


@pytest.mark.parametrize(
    "text", ["", ":", "7411", ":7411", "::1:7411", "[::1]", "a:b", "a:-1", "a:99999", "[a]:1", "a:1\u0663"]
)
def test_what_is_no_address_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match="--listen"):
        parse_listen(text)


def test_nothing_listens_before_it_is_checked():
    with bound("127.0.0.1", 0) as sock, pytest.raises(ConnectionRefusedError):
        socket.create_connection(sock.getsockname(), timeout=SECONDS_MAX)


def test_a_taken_port_is_an_error_that_says_what_to_do():
    with bound("127.0.0.1", 0) as sock:
        sock.listen(1)
        with pytest.raises(ConfigError, match="port 0 takes a free one"):
            bound("127.0.0.1", sock.getsockname()[1])


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
@pytest.mark.parametrize(
    ("tls", "tokens", "missing"),
    [(False, 0, ["openssl req", "token add"]), (True, 0, ["token add"]), (False, 3, ["--tls-cert"]), (True, 1, None)],
)
def test_beyond_loopback_both_tls_and_a_token_are_needed(host, tls, tokens, missing):
    options = HubOptions(listen=f"[{host}]:0")
    with bound(host, 0) as sock:
        if missing is None:
            check_exposure(sock, tls=tls, tokens=tokens, options=options)
            return
        with pytest.raises(ConfigError) as raised:
            check_exposure(sock, tls=tls, tokens=tokens, options=options)
    for words in ("openssl req", "token add", "--tls-cert"):
        if words in missing:
            assert words in str(raised.value)
    assert ("There is no token" in str(raised.value)) == (tokens == 0)
    assert ("TLS is missing" in str(raised.value)) == (not tls)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_on_loopback_nothing_is_needed(host):
    with bound(host, 0) as sock:
        check_exposure(sock, tls=False, tokens=0, options=HubOptions())


def test_a_revoked_token_does_not_open_the_hub_to_others(tmp_path):
    file = TokenFile(tmp_path / "data")
    file.add("t", role="admin", now_us=1)
    file.revoke("t", now_us=2)
    process = start(tmp_path / "data", "--listen", "0.0.0.0:0")
    _, err = process.communicate(timeout=SECONDS_MAX)
    assert process.returncode == 2
    assert "There is no token" in err
    assert "Traceback" not in err


def test_a_certificate_without_its_key_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="both --tls-cert and --tls-key"):
        tls_context(tmp_path / "a", None)
    with pytest.raises(ConfigError, match="there is no file"):
        tls_context(tmp_path / "a", tmp_path / "b")


def test_it_says_where_it_listens_and_stops_cleanly_on_sigterm(tmp_path):
    with started(tmp_path / "data") as hub:
        assert hub.url.startswith("http://127.0.0.1:")
        code, out, err = hub.stop()
    assert (code, err) == (0, "")
    assert out == f"hub listens at {hub.url}, data in {tmp_path / 'data'}\n"
    assert not (tmp_path / "data.url").exists()


@pytest.mark.slow
def test_the_ready_file_of_a_killed_hub_is_gone_before_another_says_it_is_ready(tmp_path):
    ready = tmp_path / "data.url"
    with started(tmp_path / "data") as hub:
        hub.process.kill()
        hub.finish()
    assert ready.exists()
    stale = tmp_path / "stale.url"
    stale.write_text("http://127.0.0.1:1\n")
    process = start(tmp_path / "data", "--ready-file", str(stale), "--listen", "192.0.2.1:1")
    _, err = process.communicate(timeout=SECONDS_MAX)
    assert (process.returncode, "cannot listen" in err, stale.exists()) == (2, True, False)


def test_with_json_it_says_so_for_machines_and_logs_json_with_request_ids(tmp_path):
    with started(tmp_path / "data", "--json", "--log-level", "info") as hub:
        answered = ask("GET", f"{hub.url}/v1/nothing")
        hub.process.send_signal(signal.SIGINT)
        code, out, err = hub.finish()
    assert code == 0
    assert json.loads(out)["url"] == hub.url
    refused, *rest = [json.loads(line) for line in err.splitlines()]
    assert (refused["event"], refused["error"]) == ("request rejected", "not_found")
    assert refused["request"] == answered.headers["x-request-id"]
    assert [line["event"] for line in rest] == ["hub stopped"]


def test_the_ready_file_is_there_only_after_the_hub_has_said_where_it_listens(tmp_path):
    ready = tmp_path / "url"
    code = (
        "import sys; from pathlib import Path; from fordstone.hub.server.serve import HubOptions, serve\n"
        "data, ready = map(Path, sys.argv[1:])\n"
        "options = HubOptions(listen='127.0.0.1:0', data=data, ready_file=ready)\n"
        "serve(options, on_ready=lambda url: print(url, ready.exists(), flush=True))\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "data"), str(ready)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            until(ready.exists, "ready file", alive=lambda: process.poll() is None)
            url = ready.read_text().strip()
        finally:
            process.terminate()
            said, _ = process.communicate(timeout=SECONDS_MAX)
    assert said == f"{url} False\n"


def test_a_long_poll_is_answered_when_the_hub_stops(tmp_path):
    with started(tmp_path / "data") as hub:
        answers = []

        def poll() -> None:
            answers.append(ask("GET", f"{hub.url}/v1/pipelines/p/streams/s/nodes?after=0&wait=50").status)

        thread = threading.Thread(target=poll)
        thread.start()
        until(lambda: polls_waiting(hub.url) == 1, "poll that waits")
        assert hub.stop()[0] == 0
        thread.join(SECONDS_MAX)
    assert answers == [200], "a request that is cut off when the time for stopping is up has no answer"


@pytest.fixture
def wide_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def modes(data: Path) -> set[tuple[str, str]]:
    """The modes of a hub's directory and of all in it."""
    found = [data, *data.rglob("*")]
    return {("directory" if path.is_dir() else "file", oct(path.stat().st_mode & 0o777)) for path in found}


PRIVATE = {("directory", "0o700"), ("file", "0o600")}


@pytest.mark.usefixtures("wide_umask")
@pytest.mark.parametrize("elsewhere", [False, True])
def test_nobody_else_can_read_what_a_hub_keeps(tmp_path, elsewhere):
    data = tmp_path / "new" / "data"
    blobs = ("--blobs", str(tmp_path / "blobs")) if elsewhere else ()
    token = TokenFile(data).add("n1", role="node", node="n1", now_us=1)
    with started(data, *blobs) as hub:
        commit_one(hub.url, token=token)
        large = b"x" * 2_000_000
        assert ask("PUT", f"{hub.url}/v1/blobs/{hashlib.sha256(large).hexdigest()}", large, token=token).status == 201
        names = {path.name for path in data.iterdir()}
        assert {"log.sqlite", "log.sqlite-wal", "log.sqlite-shm", "tokens.json", "lock"} <= names
        assert modes(data) == PRIVATE
        if elsewhere:
            (tmp_path / "blobs" / "hub.id").unlink()  # it is no secret
            assert modes(tmp_path / "blobs") == PRIVATE
        assert hub.stop()[0] == 0
    assert modes(data) == PRIVATE


@pytest.mark.usefixtures("wide_umask")
def test_a_directory_that_others_could_read_is_tightened(tmp_path):
    data = tmp_path / "data"
    (data / "blobs").mkdir(parents=True)
    for path in (data, data / "blobs"):
        path.chmod(0o755)
    (data / "tokens-used.json").write_text("{}")
    with started(data):
        assert modes(data) == PRIVATE


@pytest.mark.slow
def test_another_hub_cannot_have_the_same_data(tmp_path):
    with started(tmp_path / "data") as hub:
        process = start(tmp_path / "data", "--ready-file", str(tmp_path / "other"))
        _, err = process.communicate(timeout=SECONDS_MAX)
        assert process.returncode == 1
        assert f"belongs to process {hub.process.pid}" in err
        assert "Traceback" not in err
        assert ask("GET", f"{hub.url}/healthz").status == 200


@pytest.mark.slow
def test_what_was_committed_is_there_after_a_kill(tmp_path):
    with started(tmp_path / "data") as hub:
        assert commit_one(hub.url).head == 1
        hub.process.kill()
        hub.finish()
    with started(tmp_path / "data") as hub:
        head = msgspec.json.decode(ask("GET", f"{hub.url}/v1/pipelines/p/nodes/n1/head").data, type=Head)
        assert head.epoch == 1
        assert commit_one(hub.url).already


@pytest.mark.slow
def test_a_token_made_while_the_hub_runs_closes_it_and_a_revoked_one_no_longer_opens(tmp_path):
    with started(tmp_path / "data") as hub:
        nodes = f"{hub.url}/v1/nodes"
        assert ask("GET", nodes).status == 200
        file = TokenFile(tmp_path / "data")
        text = file.add("t", role="admin", now_us=1)
        until(lambda: ask("GET", nodes).status == 401, "401 without a token")
        assert ask("GET", nodes, token=text).status == 200
        file.revoke("t", now_us=2)
        until(lambda: ask("GET", nodes, token=text).status == 401, "401 for a revoked token")
        assert hub.stop()[0] == 0
    assert set(file.used_us()) == {"t"}


def test_a_node_commits_with_its_token_and_reads_nothing_of_others(tmp_path):
    file = TokenFile(tmp_path / "data")
    node = file.add("n1", role="node", node="n1", pipelines=("p",), now_us=1)
    center = file.add("c", role="center", now_us=1)
    with started(tmp_path / "data") as hub:
        assert commit_one(hub.url, token=node).head == 1
        stream = f"{hub.url}/v1/pipelines/p/streams/s/nodes?after=0"
        assert ask("GET", stream, token=node).status == 403
        assert ask("POST", f"{hub.url}/v1/pipelines/p/nodes/n2/lease", b"{}", token=node).status == 403
        wanted = EpochsRequest(nodes={"n1": EpochRange()})
        epochs = f"{hub.url}/v1/pipelines/p/streams/s/epochs"
        assert ask("POST", epochs, wanted, token=node).status == 403
        page = msgspec.json.decode(ask("GET", stream, token=center).data, type=StreamNodes)
        assert [(one.node, one.epoch) for one in page.nodes] == [("n1", 1)]
        found = msgspec.json.decode(ask("POST", epochs, wanted, token=center).data, type=StreamEpochs)
        assert [one.epoch for one in found.nodes["n1"].epochs] == [1]
        metrics = ask("GET", f"{hub.url}/metrics", token=center).data.decode()
    assert "fordstone_hub_commits_total 1.0\n" in metrics
    assert "fordstone_hub_committed_rows_total 3.0\n" in metrics
    assert 'fordstone_hub_node_head_epoch{node="n1",pipeline="p"} 1.0\n' in metrics
    assert 'fordstone_hub_stream_rows{pipeline="p",stream="s"} 3.0\n' in metrics
    assert "fordstone_hub_blobs 1.0\n" in metrics


@pytest.mark.parametrize(("option", "direct"), [((), True), (("--no-direct-blobs",), False)])
def test_readers_learn_where_blobs_lie_unless_that_is_off(tmp_path, option, direct):
    with started(tmp_path / "data", *option) as hub:
        answered = ask("GET", f"{hub.url}/v1/pipelines/p/streams/s/nodes?after=0")
        blobs = msgspec.json.decode(answered.data, type=StreamNodes).blobs
    assert blobs == ((tmp_path / "data" / "blobs").as_uri() if direct else None)


def test_unread_epochs_are_kept_by_default_and_consumers_can_register(tmp_path):
    with started(tmp_path / "data") as hub:
        commit_one(hub.url)
        position = ConsumerPosition(streams={"s": {"n1": NodePosition()}})
        assert ask("PUT", f"{hub.url}/v1/pipelines/p/consumers/center", position).status < 300
        metrics = ask("GET", f"{hub.url}/metrics").data.decode()
    assert 'fordstone_hub_consumer_backlog_epochs{consumer="center",pipeline="p",stream="s"} 1.0\n' in metrics


def test_a_body_beyond_the_limit_is_refused_while_the_client_still_sends(url):
    answered = ask("POST", f"{url}/v1/blobs/missing", b"x" * 3_000_000)
    assert (answered.status, msgspec.json.decode(answered.data, type=Refusal).error) == (413, "too_large")


def test_a_chunked_body_beyond_the_limit_leaves_nothing_behind(url):
    digest = hashlib.sha256(b"x" * 200_000).hexdigest()
    answered = HTTP.request("PUT", f"{url}/v1/blobs/{digest}", body=iter([b"x" * 50_000] * 4), chunked=True)
    assert (answered.status, msgspec.json.decode(answered.data, type=Refusal).error) == (413, "too_large")
    assert ask("HEAD", f"{url}/v1/blobs/{digest}").status == 404


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /v1/nodes HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /v1/nodes HTTP/1.1\r\nhost: localhost\r\ncontent-length: -5\r\n\r\n",
        b"GET /v1/nodes HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n",
        b"POST /v1/blobs/missing HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n\r\n",
    ],
)
def test_what_is_not_http_is_refused_as_everything_is(url, data):
    head, _, body = raw(url, data).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400"), head
    assert msgspec.json.decode(body, type=Refusal).error in {"bad_request", "bad_name"}
    assert ask("GET", f"{url}/healthz").status == 200


def test_a_head_that_never_ends_is_refused(url):
    place = urlsplit(url)
    with socket.create_connection((place.hostname or "", place.port or 0), timeout=SECONDS_MAX) as sock:
        sock.sendall(b"GET /v1/nodes HTTP/1.1\r\nx: ")
        sent = 0
        answer = b""
        try:
            while sent < 64 << 20:
                sock.sendall(b"x" * 65_536)
                sent += 65_536
            answer = sock.recv(65_536)
        except OSError:
            pass
    assert sent < 64 << 20 or b" 400 " in answer
    assert ask("GET", f"{url}/healthz").status == 200


def test_an_expected_continue_is_answered_with_the_refusal_instead(url):
    head = (
        b"PUT /v1/blobs/"
        + b"a" * 64
        + b" HTTP/1.1\r\nhost: localhost\r\ncontent-length: 999999\r\nexpect: 100-continue\r\n\r\n"
    )
    answer = raw(url, head)
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"connection: close" in answer
