"""The hub beyond this machine: TLS, who is trusted, and what is refused."""

from __future__ import annotations

import gc
import socket
import ssl
import struct
import subprocess
import threading
import weakref
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import trustme
import urllib3
from tests.hub.started import SECONDS_MAX, Started, start, started
from tests.waiting import until

from fordstone.errors import ConfigError, HubError
from fordstone.hub.client.address import HubAddress
from fordstone.hub.client.client import HubClient
from fordstone.hub.server.auth import TokenFile
from fordstone.hub.server.connection import Connection
from fordstone.hub.server.serve import HubOptions, serve, tls_context


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def pem(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Certificate, key, and the certificate of who signed it."""
    folder = tmp_path_factory.mktemp("pem")
    cert = authority.issue_cert("127.0.0.1", "localhost")
    cert.private_key_pem.write_to_path(folder / "hub.key")
    for blob in cert.cert_chain_pems:
        blob.write_to_path(folder / "hub.crt", append=True)
    authority.cert_pem.write_to_path(folder / "ca.crt")
    return folder / "hub.crt", folder / "hub.key", folder / "ca.crt"


@pytest.fixture(scope="module")
def token(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    data = tmp_path_factory.mktemp("tls") / "data"
    return data, TokenFile(data).add("ops", role="admin", now_us=1)


@pytest.fixture(scope="module")
def hub(pem: tuple[Path, Path, Path], token: tuple[Path, str]):
    """A hub that all machines could reach."""
    with started(token[0], "--listen", "0.0.0.0:0", "--tls-cert", str(pem[0]), "--tls-key", str(pem[1])) as one:
        port = urlsplit(one.url).port
        yield Started(one.process, f"https://127.0.0.1:{port}")


def test_beyond_this_machine_it_runs_with_tls_and_a_token(hub, pem, token):
    client = HubClient(HubAddress(url=hub.url, token=token[1], ca=str(pem[2])), timeout_s=SECONDS_MAX)
    assert client.nodes().nodes == ()
    with pytest.raises(HubError):
        HubClient(HubAddress(url=hub.url, ca=str(pem[2])), timeout_s=SECONDS_MAX).nodes()


def test_who_does_not_trust_the_authority_does_not_send_the_token(hub, token):
    with pytest.raises(HubError):
        HubClient(HubAddress(url=hub.url, token=token[1]), timeout_s=SECONDS_MAX).nodes()


def test_a_certificate_of_another_name_is_not_trusted(hub, pem):
    http = urllib3.PoolManager(ca_certs=str(pem[2]), retries=False, timeout=SECONDS_MAX, assert_hostname="elsewhere")
    with pytest.raises(urllib3.exceptions.SSLError):
        http.request("GET", f"{hub.url}/healthz")


def test_plain_http_gets_nothing(hub):
    place = urlsplit(hub.url)
    with socket.create_connection((place.hostname or "", place.port or 0), timeout=SECONDS_MAX) as sock:
        sock.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        try:
            answer = sock.recv(1000)
        except ConnectionResetError:
            answer = b""
    assert b"200" not in answer


@pytest.mark.parametrize(
    ("version", "works"),
    [(ssl.TLSVersion.TLSv1_2, True), (ssl.TLSVersion.TLSv1_3, True), (ssl.TLSVersion.TLSv1_1, False)],
)
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated")
def test_tls_before_1_2_is_refused(hub, pem, version, works):
    context = ssl.create_default_context(cafile=str(pem[2]))
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version = context.maximum_version = version
    place = urlsplit(hub.url)
    with socket.create_connection((place.hostname or "", place.port or 0), timeout=SECONDS_MAX) as sock:
        if works:
            with context.wrap_socket(sock, server_hostname="127.0.0.1") as wrapped:
                assert wrapped.version() == version.name.replace("_", ".")
        else:
            with pytest.raises((ssl.SSLError, ConnectionError)):
                context.wrap_socket(sock, server_hostname="127.0.0.1")


def test_the_context_takes_tls_1_2_and_later_only(pem):
    context = tls_context(pem[0], pem[1])
    assert context is not None
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), ["TLS is missing", "There is no token"]),
        (("tls",), ["There is no token"]),
        (("token",), ["TLS is missing"]),
    ],
)
def test_beyond_this_machine_it_does_not_start_without_both(tmp_path, pem, options, words):
    data = tmp_path / "data"
    if "token" in options:
        TokenFile(data).add("t", role="admin", now_us=1)
    given = ("--tls-cert", str(pem[0]), "--tls-key", str(pem[1])) if "tls" in options else ()
    process = start(data, "--listen", "0.0.0.0:0", *given)
    out, err = process.communicate(timeout=SECONDS_MAX)
    assert (process.returncode, out) == (2, "")
    for one in ("TLS is missing", "There is no token"):
        assert (one in err) == (one in words)
    assert "Traceback" not in err


def test_a_key_that_is_no_key_or_another_key_is_refused(tmp_path, pem, authority):
    (tmp_path / "junk").write_text("junk")
    with pytest.raises(ConfigError, match="PEM"):
        tls_context(pem[0], tmp_path / "junk")
    authority.issue_cert("127.0.0.1").private_key_pem.write_to_path(tmp_path / "other.key")
    with pytest.raises(ConfigError, match="are not a certificate and its key"):
        tls_context(pem[0], tmp_path / "other.key")


def test_a_key_with_a_password_is_refused_without_asking_for_it(tmp_path, pem):
    command = [
        "openssl",
        "pkey",
        "-in",
        str(pem[1]),
        "-aes256",
        "-passout",
        "pass:x",
        "-out",
        str(tmp_path / "locked.key"),
    ]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(ConfigError, match="locked with a password"):
        tls_context(pem[0], tmp_path / "locked.key")


def test_a_connection_that_is_gone_frees_the_memory_of_tls_at_once(pem, tmp_path, monkeypatch, caplog):
    """TLS takes 70 KiB for each. In a cycle of references, or held by a timer, that adds up until Python looks for cycles."""
    made = weakref.WeakSet[Connection]()
    begin = Connection.__init__

    def counted(self: Connection, *args, **options) -> None:
        begin(self, *args, **options)
        made.add(self)

    monkeypatch.setattr(Connection, "__init__", counted)
    urls: list[str] = []
    ended = threading.Event()
    options = HubOptions(listen="127.0.0.1:0", data=tmp_path / "hub", tls_cert=pem[0], tls_key=pem[1])
    hub = threading.Thread(
        target=serve, args=(options,), kwargs={"on_ready": urls.append, "stop_requested": ended.is_set}
    )
    hub.start()
    request = b"GET /v1/nodes HTTP/1.1\r\nhost: localhost\r\n\r\n"
    trust = ssl.create_default_context(cafile=str(pem[2]))
    gc.disable()
    try:
        until(lambda: bool(urls), "start of the hub", seconds_max=SECONDS_MAX)
        address = ("127.0.0.1", urlsplit(urls[0]).port)
        rejected = request.replace(b"/v1/nodes", b"/none")
        for sent, answered in (
            (request, True),
            (request, False),
            (rejected, True),
            (b"no request", True),
            (b"", False),
            (None, False),
        ):
            sock = socket.create_connection(address, timeout=SECONDS_MAX)
            # It breaks off, as the connection of a node whose network is cut does.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if sent is None:
                sock.sendall(request)  # without TLS
            else:
                sock = trust.wrap_socket(sock, server_hostname="localhost")
                sock.sendall(sent + b"\r\n\r\n" if sent == b"no request" else sent)
            if answered:
                assert sock.recv(4096)
            sock.close()
            until(lambda: not made, f"end of the connection after {sent!r}", seconds_max=5.0)
    finally:
        gc.enable()
        ended.set()
        hub.join(SECONDS_MAX)
    assert "failed" not in caplog.text
    assert "Exception" not in caplog.text
