"""A hub on an ephemeral port of this machine, in a thread of this process."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import urllib3
import uvicorn
from tests.waiting import until

from fordstone.hub.client.address import HubAddress
from fordstone.hub.server.serve import HubApp
from fordstone.hub.store.blobs import open_blobs
from fordstone.hub.store.log import HubLog
from fordstone.hub.store.sqlite import SqliteStore

START_SECONDS_MAX = 30.0


def now_us() -> int:
    return time.time_ns() // 1000


def polls_waiting(url: str) -> float:
    """The number of requests that wait at a hub for something new."""
    text = urllib3.request("GET", f"{url}/metrics").data.decode()
    return float(text.partition("\nfordstone_hub_polls_waiting ")[2].partition("\n")[0])


@contextlib.contextmanager
def running_hub(
    data: Path, *, blobs: str | None = None, direct: bool = True, clock_us: Any = now_us, port: int = 0, **options: Any
) -> Iterator[HubAddress]:
    """A hub over `data` that stops with the block; the same directory again is the same hub again (give its `port`, too)."""
    data.mkdir(parents=True, exist_ok=True)
    url = blobs or f"file://{data / 'blobs'}"
    log = HubLog(SqliteStore(data / "log.sqlite"), clock_us=clock_us, failpoints=options.get("failpoints"))
    try:
        store = open_blobs(url, beside=data / "incoming", failpoints=options.get("failpoints"))
        app = HubApp(log, store, direct_url=url if direct else None, **options)
        with serving(app, port=port) as base:
            yield HubAddress(url=base)
    finally:
        log.close()


@contextlib.contextmanager
def serving(app: Any, *, port: int = 0) -> Iterator[str]:
    """An app of ours on a port of this machine; gives its URL."""
    listener = socket.socket(proto=socket.IPPROTO_TCP)  # else asyncio does not send at once, and answers wait 40 ms
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=10,
        )
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="hub")
    thread.start()
    try:
        until(
            lambda: server.started,
            "start of the hub",
            seconds_max=START_SECONDS_MAX,
            poll_seconds=0.002,
            alive=thread.is_alive,
        )
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        with contextlib.suppress(AttributeError):
            app.stop_polls()
        server.should_exit = True
        thread.join(START_SECONDS_MAX)
        listener.close()
        assert not thread.is_alive(), "the hub did not stop"
