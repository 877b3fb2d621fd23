"""The health of pipelines over HTTP: what is answered, and that slow or strange clients cannot stop it."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
import urllib3

from fordstone.errors import ConfigError
from fordstone.protocol.progress import Progress
from fordstone.runtime.health import HEAD_BYTES_MAX, HealthServer, PipelineWatch, healthz

S = 1_000_000
BASE = Progress(pipeline="p", elapsed_us=0, interval_us=S)


class World:
    """A pipeline whose clock the test turns."""

    def __init__(self) -> None:
        self.now_us = 10 * S
        self.watch = PipelineWatch("p", monotonic_us=lambda: self.now_us)

    def after(self, seconds: float, **changes: Any) -> None:
        self.now_us += int(seconds * S)
        self.watch.show(msgspec.structs.replace(BASE, **changes))

    def now(self) -> Any:
        return self.watch.health()


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def server(world: World) -> Iterator[HealthServer]:
    with HealthServer("0", [world.watch], request_seconds_max=5.0, connections_max=3) as found:
        yield found


def ask(server: HealthServer, path: str, method: str = "GET", **how: Any) -> Any:
    return urllib3.request(method, server.url + path, retries=False, timeout=10, **how)


def raw(server: HealthServer, data: bytes) -> bytes:
    parts = urlsplit(server.url)
    with socket.create_connection((str(parts.hostname), int(parts.port or 0)), timeout=10) as sock:
        sock.sendall(data)
        found = b""
        while more := sock.recv(4096):
            found += more
        return found


def test_a_pipeline_that_starts_is_healthy_and_not_ready(server: HealthServer) -> None:
    answered = ask(server, "/healthz")
    assert answered.status == 200
    assert json.loads(answered.data) == {
        "healthy": True,
        "ready": False,
        "pipelines": [
            {
                "pipeline": "p", "state": "starting", "healthy": True, "ready": False, "problem": None, "epoch": None,
                "since_seal_s": None, "waits_for": None, "waiting_for": [], "hub_away_s": None, "quarantined_nodes": 0,
                "outbox_epochs": 0, "restarts": 0, "damaged_runs": 0,
            }
        ],
    }  # fmt: skip
    assert ask(server, "/readyz").status == 503


def test_probes_follow_the_pipeline(world: World, server: HealthServer) -> None:
    world.after(1, epoch=3, rows_in=10)
    world.after(1, epoch=4, rows_in=20)
    world.now_us += 2 * S
    answered = ask(server, "/readyz")
    (one,) = json.loads(answered.data)["pipelines"]
    assert (answered.status, one["epoch"], one["since_seal_s"], one["state"]) == (200, 4, 2.0, "running")
    world.watch.give_up()
    answered = ask(server, "/healthz")
    assert answered.status == 503
    assert "not started again" in json.loads(answered.data)["pipelines"][0]["problem"]


def test_a_state_at_its_limit_is_shown_and_no_reason_to_restart(world: World, server: HealthServer) -> None:
    world.after(1, epoch=3, rows_in=10)
    world.after(1, epoch=4, rows_in=10, stalled="the state has 12 MiB", waits_for="state")
    answered = ask(server, "/healthz")
    (one,) = json.loads(answered.data)["pipelines"]
    found = (answered.status, one["state"], one["waits_for"])
    assert found == (200, "waiting", "state")
    world.after(1, epoch=5, rows_in=11)
    (one,) = json.loads(ask(server, "/healthz").data)["pipelines"]
    assert (one["state"], one["waits_for"]) == ("running", None)


def test_rows_that_are_not_sealed_are_found_and_idle_pipelines_are_healthy(world: World) -> None:
    world.after(1, epoch=1, rows_in=10)
    for _ in range(120):
        world.after(60, epoch=1, rows_in=10)
    assert world.now().healthy, "nothing came for two hours"
    world.after(60, epoch=1, rows_in=11)
    for _ in range(19):
        world.after(60, epoch=1, rows_in=11)
    assert world.now().healthy
    for _ in range(2):
        world.after(60, epoch=1, rows_in=11)
    assert "no epoch for 21m" in str(world.now().problem)
    world.after(1, epoch=2, rows_in=11)
    assert world.now().healthy


def test_a_batch_of_spark_that_never_ends_is_found(world: World) -> None:
    for _ in range(22):
        world.after(60, epoch=1, rows_in=10, busy=True)
    assert "no epoch for 21m" in str(world.now().problem)


def test_a_hub_that_is_away_for_days_is_healthy_and_shown(world: World) -> None:
    for _ in range(3 * 24 * 60):
        world.after(60, epoch=1, rows_in=11, hub_problem="no route", waits_for="hub", stalled="the outbox is full")
    found = world.now()
    assert (found.healthy, found.ready, found.waits_for) == (True, True, "hub")
    assert found.hub_away_s == pytest.approx(3 * 24 * 3600, abs=60)


def test_a_restart_is_not_judged_by_what_was_before_it(world: World) -> None:
    world.after(1, epoch=1, rows_in=10)
    world.watch.restarting()
    world.now_us += 3600 * S
    found = world.now()
    assert (found.state, found.healthy, found.ready, found.restarts) == ("restarting", True, False, 1)
    world.after(1, epoch=1, rows_in=0)
    assert world.now().ready


def test_one_bad_pipeline_makes_the_process_unhealthy() -> None:
    good, bad = World(), World()
    good.after(1, epoch=1)
    bad.watch.give_up()
    found = healthz([good.watch, bad.watch])
    assert not found.healthy
    assert [one.healthy for one in found.pipelines] == [True, False]


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n", 200),
        (b"GET /healthz?verbose=1 HTTP/1.0\r\n\r\n", 200),
        (b"HEAD /healthz HTTP/1.1\r\nhost: x\r\n\r\n", 200),
        (b"GET / HTTP/1.1\r\n\r\n", 404),
        (b"GET /../healthz HTTP/1.1\r\n\r\n", 404),
        (b"POST /healthz HTTP/1.1\r\ncontent-length: 0\r\n\r\n", 405),
        (b"GET /healthz HTTP/1.1\r\ncontent-length: 5\r\n\r\nhello", 413),
        (b"GET /healthz HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 413),
        (b"GET /healthz\r\n\r\n", 400),
        (b"\x16\x03\x01 \xff\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\nx: " + b"a" * HEAD_BYTES_MAX + b"\r\n\r\n", 431),
    ],
)
def test_only_get_and_head_without_a_body_are_answered(server: HealthServer, request_bytes: bytes, status: int) -> None:
    answered = raw(server, request_bytes)
    assert answered.startswith(b"HTTP/1.1 %d " % status)
    if request_bytes.startswith(b"HEAD"):
        assert answered.endswith(b"\r\n\r\n")


def test_clients_that_send_nothing_do_not_keep_others_out(world: World) -> None:
    # Only to make room is one of them closed.
    with HealthServer("127.0.0.1:0", [world.watch], request_seconds_max=1_000, connections_max=8) as server:
        parts = urlsplit(server.url)
        where = (str(parts.hostname), int(parts.port or 0))
        with contextlib.ExitStack() as stack:
            idle = [stack.enter_context(socket.create_connection(where, timeout=10)) for _ in range(10)]
            assert ask(server, "/healthz").status == 200
            with contextlib.suppress(ConnectionResetError):
                assert idle[0].recv(1) == b"", "the oldest was closed"


def test_a_request_that_trickles_is_cut_off(world: World) -> None:
    with HealthServer("127.0.0.1:0", [world.watch], request_seconds_max=0.05) as server:
        parts = urlsplit(server.url)
        with socket.create_connection((str(parts.hostname), int(parts.port or 0)), timeout=10) as sock:
            sock.sendall(b"GET /hea")
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b""


def test_an_address_that_is_taken_or_none_is_an_error_that_names_the_option(server: HealthServer) -> None:
    with pytest.raises(ConfigError, match="--health"):
        HealthServer(server.url.removeprefix("http://"), [])
    with pytest.raises(ConfigError, match="--health 'here:there'"):
        HealthServer("here:there", [])
