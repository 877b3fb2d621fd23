"""The client against a server that answers what each test tells it to, well and badly."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest
import trustme

from fordstone.errors import ConfigError, DamagedError, HubAwayError, HubRefusedError, StorageError
from fordstone.hub.client.address import HubAddress
from fordstone.hub.client.client import HubClient
from fordstone.hub.client.direct import DirectBlobs
from fordstone.hub.messages import (
    Commit,
    Committed,
    Digests,
    EpochEntry,
    Generation,
    Head,
    Refusal,
    StreamNodes,
)
from fordstone.plan.plan import ConnectorSpec
from fordstone.state.base import RunRef

DATA = b"rows" * 1000
DIGEST = hashlib.sha256(DATA).hexdigest()
REF = RunRef(DIGEST, len(DATA), 1)


class Server:
    """Gives `answer` to every request, and notes the requests down."""

    def __init__(self) -> None:
        self.status = 200
        self.body = b"{}"
        self.headers: dict[str, str] = {}
        self.length: int | None = None
        self.seen: list[tuple[str, str, dict[str, str], bytes]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _any(self) -> None:
                size = int(self.headers.get("Content-Length", "0"))
                received = self.rfile.read(size)
                server.seen.append((self.command, self.path, dict(self.headers), received))
                self.send_response(server.status)
                for name, value in server.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(server.body) if server.length is None else server.length))
                self.end_headers()
                self.wfile.write(server.body)
                if server.length is not None:
                    self.close_connection = True

            do_GET = do_PUT = do_POST = _any  # noqa: N815 - the names that http.server looks for

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"

    def answer(self, body: object, *, status: int = 200, **headers: str) -> None:
        self.status = status
        self.body = body if isinstance(body, bytes) else msgspec.json.encode(body)
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = threading.Thread(target=made.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.http.shutdown()
    made.http.server_close()
    thread.join()


@pytest.fixture
def client(server: Server) -> Iterator[HubClient]:
    with contextlib.closing(HubClient(HubAddress(url=server.url, token="fst_secret"), timeout_s=5)) as made:
        yield made


def test_a_call_carries_the_token_and_its_answer_is_decoded(server: Server, client: HubClient) -> None:
    server.answer(Head(epoch=7, chain="d", log_id="log"))
    assert client.head("p", "n") == Head(epoch=7, chain="d", log_id="log")
    method, path, headers, _ = server.seen[0]
    assert (method, path, headers["Authorization"]) == ("GET", "/v1/pipelines/p/nodes/n/head", "Bearer fst_secret")


def test_a_commit_names_its_range_in_the_path_and_carries_every_epoch(server: Server, client: HubClient) -> None:
    server.answer(Committed(head=4, chain=""))
    epochs = tuple(EpochEntry(epoch=epoch, streams={}, created_us=1) for epoch in (3, 4))
    commit = Commit(generation=Generation(hub=1, local=2), epochs=epochs)
    assert client.commit("p", "n", commit).head == 4
    method, path, _, body = server.seen[0]
    assert (method, path) == ("POST", "/v1/pipelines/p/nodes/n/epochs/3-4")
    assert msgspec.json.decode(body, type=Commit) == commit


def test_names_never_leave_their_place_in_the_path(server: Server, client: HubClient) -> None:
    server.answer(Head(log_id="log"))
    client.head("../x", "a/b?c")
    assert server.seen[0][1] == "/v1/pipelines/..%2Fx/nodes/a%2Fb%3Fc/head"


@pytest.mark.parametrize("status", [500, 502, 503, 507, 429, 408])
def test_trouble_of_the_server_is_an_absence_even_when_it_says_why(
    server: Server, client: HubClient, status: int
) -> None:
    server.answer(Refusal(error="too_many_requests", message="slow down"), status=status, Retry_After="17")
    with pytest.raises(HubAwayError, match="slow down") as caught:
        client.head("p", "n")
    assert caught.value.retry_after_s == 17


@pytest.mark.parametrize("header", ["Wed, 21 Oct 2026 07:28:00 GMT", "-5", "1e9", ""])
def test_a_retry_after_that_is_no_number_of_seconds_is_ignored(server: Server, client: HubClient, header: str) -> None:
    server.answer(b"", status=503, Retry_After=header)
    with pytest.raises(HubAwayError) as caught:
        client.head("p", "n")
    assert caught.value.retry_after_s is None


def test_a_refusal_keeps_its_code_and_its_details(server: Server, client: HubClient) -> None:
    server.answer(Refusal(error="gap", message="send 5 next", next_epoch=5), status=409)
    with pytest.raises(HubRefusedError, match="send 5 next") as caught:
        client.head("p", "n")
    assert (caught.value.status, caught.value.code) == (409, "gap")
    assert isinstance(caught.value.refusal, Refusal)
    assert caught.value.refusal.next_epoch == 5


@pytest.mark.parametrize(
    ("status", "body"),
    [(200, b"<html>please log in"), (200, b'{"epoch":"x"}'), (200, b"[" * 100_000), (200, b'{"odd":1}'), (404, b"nothing here"),
     (302, b""), (403, b'{"error":"new_word","message":""}')],
)  # fmt: skip
def test_an_answer_that_makes_no_sense_is_an_absence(
    server: Server, client: HubClient, status: int, body: bytes
) -> None:
    server.answer(body, status=status, Location="http://127.0.0.1:1/")
    with pytest.raises(HubAwayError):
        client.head("p", "n")


def test_redirects_are_not_followed_so_the_token_goes_nowhere_else(server: Server, client: HubClient) -> None:
    server.answer(b"", status=307, Location=f"{server.url}/elsewhere")
    with pytest.raises(HubAwayError, match="307"):
        client.head("p", "n")
    assert len(server.seen) == 1


def test_an_answer_that_is_cut_short_is_an_absence(server: Server, client: HubClient) -> None:
    server.answer(DATA[:100])
    server.length = len(DATA)
    with pytest.raises(HubAwayError):
        client.get_blob(DIGEST)


def test_an_answer_beyond_its_bound_is_not_read_to_the_end(
    server: Server, client: HubClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fordstone.hub.client.client.BLOB_BYTES_MAX", 1000)
    server.answer(DATA)
    with pytest.raises(HubAwayError, match="more than 1000 bytes"):
        client.get_blob(DIGEST)


def test_nobody_listening_is_an_absence_that_names_the_address_and_not_the_token() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(HubAwayError, match=url) as caught:
            HubClient(HubAddress(url=url, token="fst_secret"), timeout_s=2).head("p", "n")
    assert "fst_secret" not in str(caught.value)


def test_a_server_that_never_answers_is_given_up() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        client = HubClient(HubAddress(url=f"http://127.0.0.1:{silent.getsockname()[1]}"), timeout_s=0.2)
        with pytest.raises(HubAwayError):
            client.head("p", "n")


def test_a_long_poll_asks_the_hub_to_wait(server: Server, client: HubClient) -> None:
    server.answer(StreamNodes(nodes=(), next=9, log_id="log"))
    assert client.stream_nodes("p", "s", after=9, log_id="log", wait_s=2.5, limit=10).next == 9
    assert server.seen[0][1] == "/v1/pipelines/p/streams/s/nodes?after=9&log=log&limit=10&wait=2.5"


def test_no_checkpoint_at_the_hub_is_none(server: Server, client: HubClient) -> None:
    server.answer(Refusal(error="not_found", message="none"), status=404)
    assert client.checkpoint("p", "n") is None


def test_missing_gives_only_what_was_asked_about(server: Server, client: HubClient) -> None:
    server.answer(Digests(digests=(DIGEST, "f" * 64)))
    assert client.missing([DIGEST]) == {DIGEST}
    server.seen.clear()
    assert client.missing([]) == set()
    assert not server.seen


@pytest.mark.parametrize("size", [10, 3 << 20])
def test_a_blob_is_sent_whole_whatever_its_size(server: Server, client: HubClient, size: int) -> None:
    data = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    client.put_blob(hashlib.sha256(data).hexdigest(), data)
    assert server.seen[0][3] == data
    assert server.seen[0][2]["Content-Length"] == str(size)


def test_a_blob_with_other_bytes_than_its_name_says_is_damaged(server: Server, client: HubClient) -> None:
    server.answer(DATA[::-1])
    with pytest.raises(DamagedError, match="other bytes"):
        client.read_blob(REF)


def test_a_blob_of_another_size_than_its_reference_is_damaged(server: Server, client: HubClient) -> None:
    server.answer(DATA)
    with pytest.raises(DamagedError, match="bytes"):
        client.read_blob(RunRef(DIGEST, len(DATA) - 1, 1))


def test_a_store_that_can_be_reached_is_read_without_the_hub(server: Server, client: HubClient, tmp_path: Path) -> None:
    place = tmp_path / DIGEST[:2] / DIGEST
    place.parent.mkdir()
    place.write_bytes(DATA)
    assert client.read_blob(REF, tmp_path.as_uri()) == DATA
    assert not server.seen


@pytest.mark.parametrize("stored", [DATA[::-1], DATA[:-1], DATA + b"x", None])
def test_a_blob_that_is_wrong_or_missing_in_the_store_comes_through_the_hub(
    server: Server, client: HubClient, tmp_path: Path, stored: bytes | None
) -> None:
    if stored is not None:
        place = tmp_path / DIGEST[:2] / DIGEST
        place.parent.mkdir()
        place.write_bytes(stored)
    server.answer(DATA)
    assert client.read_blob(REF, tmp_path.as_uri()) == DATA


@pytest.mark.parametrize("url", ["file:///nowhere/at/all", "nosuchprotocol://bucket/x", "relative/path"])
def test_blobs_of_a_store_out_of_reach_come_through_the_hub(server: Server, client: HubClient, url: str) -> None:
    server.answer(DATA)
    assert client.read_blob(REF, url) == DATA
    assert client.read_blob(REF, url) == DATA


def test_a_store_that_cannot_be_opened_is_asked_once(server: Server, client: HubClient) -> None:
    asked: list[str] = []

    def refuse(url: str, *, bytes_max: int) -> bytes:
        asked.append(url)
        raise StorageError("no")

    client._direct = DirectBlobs(read=refuse)
    server.answer(DATA)
    for _ in range(3):
        assert client.read_blob(REF, "s3://bucket/x") == DATA
    assert asked == [f"s3://bucket/x/{DIGEST[:2]}/{DIGEST}"]


def test_tls_is_checked_against_the_given_certificates(server: Server, tmp_path: Path) -> None:
    authority, other = trustme.CA(), trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    server.http.socket = context.wrap_socket(server.http.socket, server_side=True)
    server.answer(Head(epoch=3, log_id="log"))
    url = server.url.replace("http:", "https:")
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    other.cert_pem.write_to_path(str(tmp_path / "other.pem"))
    with contextlib.closing(HubClient(HubAddress(url=url, ca=str(tmp_path / "ca.pem")), timeout_s=5)) as trusting:
        assert trusting.head("p", "n").epoch == 3
    for ca in (str(tmp_path / "other.pem"), None):
        with pytest.raises(HubAwayError):
            HubClient(HubAddress(url=url, ca=ca), timeout_s=5).head("p", "n")


def test_a_file_without_certificates_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="PEM"):
        HubClient(HubAddress(url="https://h", ca=str(tmp_path / "none.pem")))


def test_a_body_that_waits_in_the_socket_for_a_slow_line_is_not_given_up() -> None:
    body, timeout_s = bytes(100_000), 0.1
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def slow() -> None:
            connection, _ = listener.accept()
            with connection:
                # As long as this the line holds what the client has sent already.
                threading.Event().wait(4 * timeout_s)
                got = b""
                while not got.endswith(body):
                    got += connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 201 Created\r\ncontent-length: 0\r\n\r\n")

        line = threading.Thread(target=slow)
        line.start()
        address = HubAddress(url=f"http://127.0.0.1:{listener.getsockname()[1]}")
        with contextlib.closing(HubClient(address, timeout_s=timeout_s)) as client:
            client.put_blob(hashlib.sha256(body).hexdigest(), body)
        line.join()


@pytest.mark.parametrize(
    "url", ["hub:7411", "ftp://hub", "http://", "http://u:p@hub", "http://hub?token=x", "http://hub:port", "//hub"]
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        HubAddress(url=url)


@pytest.mark.parametrize("token", ["", "a b", "a\nb", "ü"])
def test_a_token_that_would_break_the_header_is_refused(token: str) -> None:
    with pytest.raises(ConfigError, match="characters"):
        HubAddress(url="https://hub", token=token)


@pytest.mark.parametrize("host", ["hub.example:7411", "10.0.0.7", "[2001:db8::1]:7411", "127.0.0.1.evil.example"])
def test_a_token_never_leaves_this_machine_in_the_clear(host: str) -> None:
    with pytest.raises(ConfigError, match="in the clear"):
        HubAddress(url=f"http://{host}", token="fst_secret")
    assert HubAddress(url=f"http://{host}").token is None
    assert HubAddress(url=f"https://{host}", token="fst_secret").token == "fst_secret"


@pytest.mark.parametrize("host", ["127.0.0.1:7411", "localhost:7411", "LOCALHOST", "[::1]:7411", "127.9.9.9"])
def test_a_token_for_this_machine_needs_no_tls(host: str) -> None:
    assert HubAddress(url=f"http://{host}", token="fst_secret").token == "fst_secret"


def test_an_address_goes_through_a_placed_plan_whole_and_hides_its_token(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    trustme.CA().cert_pem.write_to_path(str(ca))
    address = HubAddress(url="https://hub:7411/", token="fst_secret", ca=str(ca))
    sent = address.at()
    ca.unlink()  # as on another machine, which does not have the file
    assert HubAddress.from_at(sent) == address
    HubClient(HubAddress.from_at(sent)).close()
    assert "fst_secret" not in repr(address)
    assert "fst_secret" not in repr([ConnectorSpec("hub", {}, at=address.at())])
    assert address.url == "https://hub:7411"
