"""Whatever is sent to a hub, it answers in its own words, never fails, and keeps nothing of what it refused."""

from __future__ import annotations

import hashlib
import http.client
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from tests.examples import examples
from tests.hub.started import SECONDS_MAX, started

from fordstone.hub.messages import Refusal
from fordstone.hub.server.auth import TokenFile

BLOB = b"a run"
DIGEST = hashlib.sha256(BLOB).hexdigest()
QUICK = examples(150, HealthCheck.function_scoped_fixture)
TOLERATED = {503, 507}


@dataclass
class Target:
    host: str
    port: int
    data: Path
    token: str

    def send(self, method: str, path: str, headers: dict[str, str], body: bytes | None) -> tuple[int, bytes]:
        """One request on a connection of its own; (0, b"") if the hub closed it without a word."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=SECONDS_MAX)
        try:
            connection.putrequest(method, "/", skip_host=True, skip_accept_encoding=True)
            # The client would refuse odd paths and headers; the hub must.
            connection._buffer[0] = f"{method} ".encode() + path.encode("utf-8", "surrogatepass") + b" HTTP/1.1"  # type: ignore[attr-defined]
            for name, value in {"host": "x", "connection": "close", **headers}.items():
                connection._buffer.append(f"{name}: {value}".encode("utf-8", "surrogatepass"))  # type: ignore[attr-defined]
            if body is not None:
                connection._buffer.append(b"content-length: %d" % len(body))  # type: ignore[attr-defined]
            connection.endheaders(body)
            response = connection.getresponse()
            return response.status, response.read()
        except (http.client.HTTPException, ConnectionError):
            return 0, b""
        finally:
            connection.close()

    def content(self) -> list[tuple[object, ...]]:
        """Everything that the log has, but for when somebody was last seen."""
        with closing(sqlite3.connect(f"file:{self.data / 'log.sqlite'}?mode=ro", uri=True)) as db:
            tables = [
                name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
            ]
            return [(name, *row) for name in tables for row in db.execute(f"SELECT * FROM {name}")]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    data = tmp_path_factory.mktemp("fuzz") / "data"
    token = TokenFile(data).add("ops", role="admin", now_us=1)
    with started(data, "--rate", "100000") as hub:
        place = urlsplit(hub.url)
        one = Target(place.hostname or "", place.port or 0, data, token)
        auth = {"authorization": f"Bearer {token}"}
        assert one.send("PUT", f"/v1/blobs/{DIGEST}", auth, BLOB)[0] < 300
        base = "/v1/pipelines/p/nodes/n"
        lease = b'{"holder":"' + b"h" * 32 + b'","local":1,"start":"s"}'
        assert one.send("POST", f"{base}/lease", auth, lease)[0] == 200
        assert one.send("POST", f"{base}/epochs/1-1", auth, commit(1, DIGEST))[0] == 201
        yield one
        assert one.send("GET", "/healthz", {}, None)[0] == 200
        code, _, err = hub.stop()
        assert (code, "Traceback" in err) == (0, False), err


def commit(epoch: int, digest: str) -> bytes:
    run = {"digest": digest, "size_bytes": len(BLOB), "rows": 1}
    entry = {"epoch": epoch, "streams": {"s": {"runs": [run]}}, "created_us": 1}
    return msgspec.json.encode({"generation": {"hub": 1, "local": 1}, "epochs": [entry]})


METHODS = st.sampled_from(["GET", "HEAD", "PUT", "POST", "DELETE", "OPTIONS", "PATCH", "TRACE"])
ODD_PART = st.one_of(
    st.sampled_from(
        ["..", ".", "%2e%2e", "%00", "%2F", "p%0d%0aX:y", "", "~", "ä", "1-1", "2-1", "0-0", "1-99999999999999999999"]
    ),
    st.text(
        st.characters(blacklist_characters=" \r\n?#\0", blacklist_categories=["Cs", "Zs", "Zl", "Zp", "Cc"]),
        max_size=120,
    ),
)
PART = st.one_of(
    st.sampled_from(
        ["v1", "pipelines", "nodes", "streams", "epochs", "blobs", "missing", "control", "consumers", "health"]
    ),
    st.sampled_from(["p", "n", "s", "c", "head", "lease", "checkpoint", "1-1", "2-2", "1-3", DIGEST, "f" * 64]),
    ODD_PART,
)
NAME = st.one_of(st.sampled_from(["p", "n", "s", "other"]), ODD_PART)
TEMPLATES = [
    "/v1/blobs/missing", "/v1/blobs/{}", "/v1/pipelines/{}/nodes/{}/epochs/{}", "/v1/pipelines/{}/nodes/{}/lease",
    "/v1/pipelines/{}/nodes/{}/head", "/v1/pipelines/{}/nodes/{}/checkpoint", "/v1/pipelines/{}/streams/{}/epochs",
    "/v1/pipelines/{}/streams/{}/nodes",
    "/v1/pipelines/{}/consumers/{}", "/v1/pipelines/{}/control/{}", "/v1/nodes/{}/health/{}", "/v1/nodes", "/v1/streams",
    "/v1/epochs", "/healthz", "/metrics",
]  # fmt: skip
PATHS = st.one_of(
    st.lists(PART, max_size=8).map(lambda parts: "/" + "/".join(parts)),
    st.tuples(st.sampled_from(TEMPLATES), NAME, NAME, NAME).map(lambda one: one[0].format(*one[1:])),
)
QUERIES = st.one_of(
    st.just(""),
    st.sampled_from(
        ["?after=-1", "?after=x", "?after=0&wait=-1", "?after=0&wait=nan", "?after=0&wait=1e400", "?limit=0"]
    ),
    st.sampled_from(
        ["?limit=99999999999999999999", "?after=99999999999999999999", "?after=0&after=1", "?%ff=%00", "?wait=0.01"]
    ),
    st.from_regex(r"\?[a-z=&0-9%.]{0,40}", fullmatch=True),
)
NUMBERS = st.one_of(st.integers(), st.sampled_from([0, 1, 2, -1, 2**63, 2**64, 10**30]))
JSON = st.recursive(
    st.one_of(
        st.none(), st.booleans(), NUMBERS, st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=20)
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=10), inner, max_size=4)),
    max_leaves=10,
)
GENERATION = st.fixed_dictionaries({"hub": NUMBERS, "local": NUMBERS})
RUN = st.fixed_dictionaries(
    {"digest": st.sampled_from([DIGEST, "f" * 64, "x"]), "size_bytes": NUMBERS, "rows": NUMBERS}
)
SEGMENT = st.fixed_dictionaries({"runs": st.lists(RUN, max_size=2)}, optional={"watermark_us": NUMBERS})
ENTRY = st.fixed_dictionaries(
    {"epoch": NUMBERS, "streams": st.dictionaries(NAME, SEGMENT, max_size=2), "created_us": NUMBERS},
    optional={"ended": st.booleans(), "controls": st.dictionaries(NAME, NUMBERS, max_size=2)},
)
POSITION = st.one_of(NUMBERS, st.tuples(NUMBERS, st.sampled_from(["", DIGEST, "x"])))
RANGE = st.fixed_dictionaries(
    {}, optional={"after": NUMBERS, "until": NUMBERS, "seen": POSITION, "earliest": st.booleans()}
)
CHECKPOINT = st.fixed_dictionaries({"epoch": NUMBERS, "manifest": RUN, "state": st.lists(RUN, max_size=2)})
BODIES = st.one_of(
    st.none(),
    st.binary(max_size=200),
    st.fixed_dictionaries(
        {"generation": GENERATION, "epochs": st.lists(ENTRY, max_size=3)}, optional={"checkpoint": CHECKPOINT}
    ),
    st.fixed_dictionaries({"holder": st.text(max_size=300), "local": NUMBERS}, optional={"take_over": st.booleans()}),
    st.fixed_dictionaries({"streams": st.dictionaries(NAME, st.dictionaries(NAME, POSITION, max_size=2), max_size=2)}),
    st.fixed_dictionaries(
        {"nodes": st.dictionaries(NAME, RANGE, max_size=2)},
        optional={"rows_max": NUMBERS, "epochs_max": NUMBERS, "listed": st.booleans()},
    ),
    st.fixed_dictionaries(
        {"owner": st.text(max_size=300), "batch": NUMBERS, "blob": RUN}, optional={"snapshot": st.booleans()}
    ),
    st.fixed_dictionaries(
        {"state": st.sampled_from(["running", "x"]), "sent_us": NUMBERS}, optional={"epoch": NUMBERS}
    ),
    st.fixed_dictionaries({"digests": st.lists(st.one_of(st.just(DIGEST), st.text(max_size=70)), max_size=3)}),
    JSON,
)
HEADERS = st.dictionaries(
    st.sampled_from(
        [
            "accept",
            "content-type",
            "content-encoding",
            "range",
            "if-match",
            "x-forwarded-for",
            "expect",
            "upgrade",
            "te",
        ]
    ),
    st.one_of(
        st.sampled_from(
            ["gzip", "identity", "bytes=0-1", "bytes=9-", "100-continue", "websocket", "application/json", "*"]
        ),
        st.text(st.characters(min_codepoint=33, max_codepoint=255, blacklist_characters="\x7f"), max_size=30),
    ),
    max_size=3,
)
TOKENS = st.sampled_from(["right", "right", "right", "wrong", "none"])


@QUICK
@given(method=METHODS, path=PATHS, query=QUERIES, headers=HEADERS, body=BODIES, token=TOKENS)
def test_every_answer_is_in_the_hubs_own_words_and_refusals_change_nothing(
    target: Target, method, path, query, headers, body, token
):
    if token != "none":
        text = target.token if token == "right" else "fst_" + "A" * 43
        headers = {**headers, "authorization": f"Bearer {text}"}
    data = body if body is None or isinstance(body, bytes) else encoded(body)
    before = target.content()
    status, answer = target.send(method, path + query, headers, data)
    assert status != 0, "the hub closed the connection without a word"
    assert status < 500 or status in TOLERATED, answer
    assert target.token.encode() not in answer
    if status >= 300:
        if method != "HEAD":
            assert msgspec.json.decode(answer, type=Refusal).message
        assert target.content() == before
    if token != "right":
        assert status in {400, 401} or path == "/healthz", (status, answer)
    assert (target.data / "blobs").is_dir()


@QUICK
@given(data=st.binary(max_size=400), claimed=st.one_of(st.just(DIGEST), st.just("f" * 64), st.just(None)))
def test_a_blob_is_kept_only_under_its_own_digest(target: Target, data, claimed):
    true = hashlib.sha256(data).hexdigest()
    name = claimed or true
    auth = {"authorization": f"Bearer {target.token}"}
    status, answer = target.send("PUT", f"/v1/blobs/{name}", auth, data)
    if name != true:
        assert (status, msgspec.json.decode(answer, type=Refusal).error) == (400, "wrong_digest")
    else:
        assert status < 300
        assert target.send("GET", f"/v1/blobs/{name}", auth, None) == (200, data)
    assert target.send("GET", f"/v1/blobs/{DIGEST}", auth, None) == (200, BLOB)
    assert target.send("GET", f"/v1/blobs/{'f' * 64}", auth, None)[0] == 404


def encoded(body: object) -> bytes:
    """As JSON; numbers of any size, which msgspec itself does not write."""
    return json.dumps(body).encode()
