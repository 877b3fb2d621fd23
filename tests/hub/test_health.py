"""What `/healthz` says: that the hub can take data, or why not."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import urllib3
from tests.hub.running import now_us, running_hub, serving
from tests.hub.sending import Node, entry

from fordstone.errors import HubAwayError
from fordstone.hub.client.address import HubAddress
from fordstone.hub.client.client import HubClient
from fordstone.hub.messages import Refusal
from fordstone.hub.server.auth import TokenFile, Tokens
from fordstone.hub.server.health import CHECK_EVERY_S, HubHealth
from fordstone.hub.server.limits import DISK_CHECK_INTERVAL_S, DiskQuota
from fordstone.hub.server.serve import HubApp
from fordstone.hub.store.blobs import open_blobs
from fordstone.hub.store.log import HubLog
from fordstone.hub.store.log_reader import LogReader
from fordstone.hub.store.log_schema import StoreFailedError
from fordstone.hub.store.log_writer import LogWriter
from fordstone.hub.store.sqlite import SqliteStore


class OddStore(SqliteStore):
    """Fails or hangs when a test says so."""

    writes = 0
    full = unreadable = False
    hangs: threading.Event | None = None

    @contextlib.contextmanager
    def transaction(self) -> Iterator[LogWriter]:
        self.writes += 1
        if self.hangs is not None:
            self.hangs.wait(60)
        if self.full:
            raise StoreFailedError("its disk is full, at /secret/place")
        with super().transaction() as log:
            yield log

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[LogReader]:
        if self.unreadable:
            raise OSError("no such sector")
        with super().snapshot() as log:
            yield log


@pytest.fixture
def store(tmp_path: Path) -> OddStore:
    return OddStore(tmp_path / "log.sqlite")


class Asking:
    """The health of a hub over a store, with a clock that only tests move."""

    def __init__(self, store: OddStore, **more: Any) -> None:
        self.now_s = 0.0
        self.log = HubLog(store, clock_us=lambda: 0)
        self.health = HubHealth(self.log, DiskQuota([]), clock_s=lambda: self.now_s, **more)

    async def reason(self) -> str | None:
        problem = await self.health.problem()
        self.now_s += CHECK_EVERY_S
        return None if problem is None else problem.reason


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("full", "its log cannot be read or written"), ("unreadable", "its log cannot be read or written"), (None, None)],
)
def test_a_log_that_fails_is_found_and_so_is_that_it_works_again(store, fault, reason):
    asking = Asking(store)

    async def go() -> None:
        assert await asking.reason() is None
        if fault is not None:
            setattr(store, fault, True)
        assert await asking.reason() == reason
        store.full = store.unreadable = False
        assert await asking.reason() is None

    asyncio.run(go())
    asking.log.close()


def test_a_log_that_hangs_is_found_and_gets_no_further_work(store):
    asking = Asking(store, seconds_max=0.01)

    async def go() -> None:
        store.hangs = threading.Event()
        for _ in range(3):
            assert await asking.reason() == "its log does not answer"
        assert store.writes == 1
        store.hangs.set()
        while await asking.reason() is not None:
            pass

    asyncio.run(go())
    asking.log.close()


def test_however_often_it_is_asked_the_log_is_written_every_few_seconds(store):
    asking = Asking(store)

    async def go() -> None:
        for _ in range(3):
            await asyncio.gather(*(asking.health.problem() for _ in range(50)))
        assert store.writes == 1
        asking.now_s += CHECK_EVERY_S
        await asking.health.problem()
        assert store.writes == 2

    asyncio.run(go())
    asking.log.close()


def test_a_request_does_not_wait_for_ever_for_a_log_that_hangs(tmp_path, store, monkeypatch):
    log = HubLog(store, clock_us=now_us)
    app = HubApp(log, open_blobs(tmp_path / "blobs", beside=tmp_path / "incoming"))
    with serving(app) as url, contextlib.closing(HubClient(HubAddress(url=url))) as client:
        node = Node(client)
        node.lease()
        store.hangs = threading.Event()
        with monkeypatch.context() as patched:
            patched.setattr("fordstone.hub.server.handlers.LOG_SECONDS_MAX", 0.05)
            with pytest.raises(HubAwayError, match="did not answer within") as away:
                node.put("a")
        assert away.value.retry_after_s == 10
        store.hangs.set()
        store.hangs = None
        node.put("a")
        assert node.commit(entry(1, "a")).head == 1
    log.close()


class _Disk:
    total = 1 << 40
    free = 1 << 39


def test_only_callers_with_a_token_get_details(tmp_path):
    text = TokenFile(tmp_path).add("t", role="node", node="n", now_us=1)
    tokens = Tokens(TokenFile(tmp_path), clock_s=time.monotonic, clock_us=now_us)
    disk, ticks = _Disk(), iter(range(10**9))
    quota = DiskQuota([tmp_path], usage=lambda _: disk, clock_s=lambda: next(ticks) * DISK_CHECK_INTERVAL_S)
    disk.free = 1
    with running_hub(tmp_path / "hub", quota=quota, tokens=tokens) as hub:

        def ask(method: str, token: str | None) -> tuple[int, str]:
            headers = {} if token is None else {"authorization": f"Bearer {token}"}
            answered = urllib3.request(method, f"{hub.url}/healthz", headers=headers, retries=False)
            return answered.status, msgspec.json.decode(answered.data, type=Refusal).message if answered.data else ""

        short = "the hub cannot take data: its disk is nearly full"
        assert ask("GET", None) == (503, f"{short}.")
        assert ask("GET", "fst_" + "A" * 43) == (503, f"{short}.")
        status, message = ask("GET", text)
        assert (status, message[: len(short)]) == (503, short)
        assert "Free space" in message
        assert ask("HEAD", None) == (503, "")


def test_a_hub_that_is_well_says_so(hub):
    answered = urllib3.request("GET", f"{hub.url}/healthz", retries=False)
    assert (answered.status, answered.json()) == (200, {"ok": True})
