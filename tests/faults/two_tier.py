"""Hub, nodes and center as real processes on this machine, each in a folder of its own; and what must come of their rows.

The oracle is that of one machine, over the files of all nodes together: crossing changes nothing.
"""

from __future__ import annotations

import contextlib
import errno
import json
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Any, Self

import polars as pl
from tests.faults.oracle import EPOCH, Expected, Feed, Row, expect
from tests.faults.process import Ended, Process
from tests.faults.two_tier_child import Command
from tests.hub.reading import epochs_at

from fordstone.connectors import latest, rows
from fordstone.epochs.run_file import decode_run
from fordstone.hub.client.address import HubAddress
from fordstone.hub.client.client import HubClient
from fordstone.hub.client.publisher import apply_changes
from fordstone.hub.messages import StreamEpoch

FILE = str(Path(__file__).with_name("two_tier_pipeline.py"))
LIVE = ("--interval", "50ms")
FEED_ROWS = 24
ROUNDS_MAX = 400
STREAMS = ("plain", "sums")
AWAY = "hub not reached"
"""What a node logs when it could not send, with the reason."""


class Part(Process):
    """One running command of `fordstone`."""

    poll_seconds = 0.02

    def __init__(
        self,
        folder: Path,
        *words: str,
        failpoint: str = "",
        ahead_s: int = 0,
        limits: dict[str, float] | None = None,
        mutant: str = "",
        inside: tuple[str, ...] = (),
    ) -> None:
        folder.mkdir(exist_ok=True, parents=True)
        command = Command(words=words, ahead_s=ahead_s, limits=limits or {}, mutant=mutant)
        super().__init__(folder, command, failpoint=failpoint, module="tests.faults.two_tier_child", inside=inside)

    def errors(self) -> str:
        """What it has written to standard error so far."""
        return self._err.read_text()

    def until_said(self, *words: str) -> str:
        """Wait until one line of its log has all of these words; gives the line."""

        def found() -> str | None:
            return next((line for line in self.errors().splitlines() if all(word in line for word in words)), None)

        self.until(lambda: found() is not None, f"saying {words}")
        line = found()
        assert line is not None
        return line


class Fleet:
    """A pipeline of two tiers. What was started ends with the block."""

    def __init__(self, folder: Path, *nodes: str, seed: int = 0, ahead_s: dict[str, int] | None = None) -> None:
        """`ahead_s`: where the times of a node's rows begin."""
        self.folder, self.pipeline = folder, "fleet"
        self.feeds: dict[str, Feed] = {}
        for number, node in enumerate(nodes):
            begin = (ahead_s or {}).get(node, 0)
            self.feeds[node] = Feed(folder=folder / node, seed=seed + number, ahead_s=(begin,) * 3)
        self.port = free_port()
        self.token: str | None = None
        """Of an admin, for looking, if the hub wants one."""
        self.parts: list[Part] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        for part in reversed(self.parts):
            if part.running:
                part.kill()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def out(self) -> Path:
        """The output of the center."""
        return self.folder / "center" / "out"

    @property
    def written(self) -> dict[str, Sequence[Row]]:
        """All files of all nodes."""
        return {f"{node}/{name}": part for node, feed in self.feeds.items() for name, part in feed.written.items()}

    # Processes.

    def start(self, folder: Path, *words: str, **options: Any) -> Part:
        self.parts.append(Part(folder, *words, **options))
        return self.parts[-1]

    def hub(self, *words: str, data: str = "data", **options: Any) -> Part:
        """A hub that answers, always at the same port; or one that a failpoint has ended before it could."""
        folder = self.folder / "hub"
        ready = folder / "url"
        ready.unlink(missing_ok=True)
        listen = ("hub", "--listen", f"127.0.0.1:{self.port}", "--data", data, "--ready-file", "url", "--json")
        hub = self.start(folder, *listen, *words, **options)
        hub.until_dead_or(ready.exists, "a hub that answers")
        assert hub.running or options.get("failpoint"), hub.errors()
        return hub

    def node(
        self, node: str, *words: str, url: str | None = None, live: bool = True, at: str | None = None, **options: Any
    ) -> Part:
        """The edge half, live or to the end of its input. `at`: the folder, if it is not the node's own."""
        half = ("run", FILE, "--part", "edge", "--hub", url or self.url, "--node", node, "--json")
        return self.start(self.folder / (at or node), *half, *(LIVE if live else ("--bounded",)), *words, **options)

    def center(self, *words: str, url: str | None = None, live: bool = True, **options: Any) -> Part:
        """The other half, on the engine of the edge."""
        half = ("center", FILE, "--on", "edge", *LIVE) if live else ("run", FILE, "--part", "center", "--bounded")
        return self.start(self.folder / "center", *half, "--hub", url or self.url, "--json", *words, **options)

    # What happens.

    def sealed(self, node: str) -> int:
        """The newest epoch of a node, or of the center, with a manifest."""
        manifests = self.folder / node / "state" / self.pipeline / node / "manifests"
        return max((int(file.stem) for file in manifests.glob("*.json")), default=0)

    @contextlib.contextmanager
    def client(self) -> Iterator[HubClient]:
        client = HubClient(HubAddress(url=self.url, token=self.token))
        try:
            yield client
        finally:
            client.close()

    def head(self, node: str) -> int:
        """The newest epoch of a node at the hub."""
        with self.client() as client:
            return client.head(self.pipeline, node).epoch

    def feed_until(self, part: Part, met: Callable[[], bool], what: str) -> None:
        """Let the input grow with the epochs of the nodes until something has happened, or the part has ended."""
        for _ in range(ROUNDS_MAX):
            before = {node: self.sealed(node) for node in self.feeds}
            for feed in self.feeds.values():
                feed.write(FEED_ROWS)

            def went_on(before: dict[str, int] = before) -> bool:
                return met() or any(self.sealed(node) > epoch for node, epoch in before.items())

            part.until_dead_or(went_on, what)
            if not part.running or met():
                return
        raise AssertionError(f"no {what} in {ROUNDS_MAX} epochs")

    def feed_until_killed(self, part: Part) -> Ended:
        """Until the part's failpoint has ended it."""
        self.feed_until(part, lambda: False, "failpoint that fires")
        return part.ended()

    # How it ends.

    def finish(self, **options: Any) -> None:
        """Run nodes and center to the end of all input, and judge."""
        for node in self.feeds:
            ended = self.node(node, live=False, **options).ended()
            assert ended.report["outcome"] in {"ended", "already_ended"}, ended.errors
            assert ended.report["progress"]["outbox_epochs"] == 0
        assert self.center(live=False, **options).ended().report["outcome"] in {"ended", "already_ended"}
        self.judge()

    def finish_live(self, center: Part, *nodes: Part) -> None:
        """Let time go on until the running processes have released and published everything, stop them, and judge."""
        for feed in self.feeds.values():
            feed.close()
        wanted = expect(self.written)
        whole = {key: value[0] for key, value in wanted.windows.items()}
        center.poll_seconds = 0.1  # every look reads all that is out
        center.until(lambda: counted(self.out) == (wanted.kept.total(), whole), "all rows and windows at the center")
        # Windows are shown before they close, so the table may still follow.
        center.until(lambda: self.limits() == newest_windows(wanted), "control table with the last windows")
        for part in (*nodes, center):
            assert part.stop().report["outcome"] == "stopped"
        self.judge()

    def judge(self) -> None:
        """Nothing lost, nothing doubled, nothing wrong: at the center, and at the nodes that it steers."""
        wanted = self.judge_center()
        for node, feed in self.feeds.items():
            joined = list(rows(self.folder / node / "out" / "joined").iter_rows())
            ours = Counter((id_, k, second(ts), n) for id_, k, ts, n, _ in joined)
            same(f"rows of {node}", ours, expect(feed.written).kept)
            for _, k, _, _, most in joined:
                assert most is None or most in {n for (key, _), (n, _) in wanted.windows.items() if key == k}, (k, most)

    def judge_center(self) -> Expected:
        """Nothing lost, nothing doubled, nothing wrong at the center."""
        wanted = expect(self.written)
        same("rows at the center", kept(self.out), wanted.kept)
        same("windows at the center", windows(self.out), wanted.windows)
        return wanted

    def steered(self, node: str) -> int:
        """The number of rows that a node has released and that the center's table was joined with."""
        directory = self.folder / node / "out" / "joined"
        if not (directory / "_stream.json").exists():
            return 0
        most = rows(directory).get_column("most")
        return len(most) - most.null_count()

    def limits(self) -> dict[int, int]:
        """The control table as the hub has it."""
        with self.client() as client:
            page = client.control_page(self.pipeline, "limits")
            changes = [decode_run(client.read_blob(version.blob), version.blob) for version in page.versions]
        if not changes:
            return {}
        table = apply_changes(changes[0].clear(), changes, ["k"])
        return dict(table.select("k", "most").iter_rows())

    def crossed(self) -> dict[str, tuple[StreamEpoch, ...]]:
        """Everything that the hub lists of every stream."""
        with self.client() as client:
            return {stream: tuple(epochs_at(client, self.pipeline, stream)) for stream in STREAMS}


def newest_windows(wanted: Expected) -> dict[int, int]:
    """What the control table holds in the end: the number of rows in the last window of each key."""
    found: dict[int, tuple[int, int]] = {}
    for (k, start), (n, _) in wanted.windows.items():
        found[k] = max(found.get(k, (start, n)), (start, n))
    return {k: n for k, (_, n) in found.items()}


def kept(out: Path) -> Counter[Row]:
    """The plain rows that the center has released."""
    if not (out / "kept" / "_stream.json").exists():
        return Counter()
    return Counter((id_, k, second(ts), n) for id_, k, ts, n in rows(out / "kept").iter_rows())


def windows(out: Path) -> dict[tuple[int, int], tuple[int, int]]:
    """The newest of each window at the center."""
    if not (out / "windows" / "_stream.json").exists():
        return {}
    table = latest(out / "windows").select("k", "window_start", "n", "total")
    return {(k, second(start)): (n, total) for k, start, n, total in table.iter_rows()}


def counted(out: Path) -> tuple[int, dict[tuple[int, int], int]]:
    """How many rows are there, and in which windows; while the center runs."""
    try:
        return kept(out).total(), {key: n for key, (n, _) in windows(out).items()}
    except (FileNotFoundError, pl.exceptions.PolarsError):  # a file was just put into its place
        return 0, {}


def second(time: datetime) -> int:
    return int((time - EPOCH).total_seconds())


def same(what: str, got: Any, wanted: Any) -> None:
    """Compare by key, and say some of what differs."""
    lost = {key: (value, got.get(key)) for key, value in wanted.items() if got.get(key) != value}
    more = {key: value for key, value in got.items() if key not in wanted}
    few = [json.dumps([f"{key}: {value}" for key, value in list(some.items())[:3]]) for some in (lost, more)]
    assert not lost, f"{what}: {len(lost)} lost or wrong, such as {few[0]}; {len(more)} too many, such as {few[1]}"
    assert not more, f"{what}: {len(more)} too many, such as {few[1]}"


def free_port() -> int:
    """A port that nothing listens at, and below those that the system gives to connections: it stays free while a hub is down."""
    rng = Random()
    while True:
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port := rng.randrange(12_000, 30_000)))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                return port
