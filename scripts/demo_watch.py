"""Samples of the fleet while it runs, taken twice a second and kept for the view and the report.

Their times are seconds since the devices began to write. Nothing is kept from the time before, in which the center starts.
"""

from __future__ import annotations

import json
import threading
import time
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl
from demo_fleet import Fleet, Gateway
from demo_oracle import epoch_files

from fordstone.errors import HubError
from fordstone.hub.messages import NodeInfo

TAIL_SECONDS = 0.01


@dataclass(kw_only=True)
class GatewayView:
    """One gateway over time: (seconds, value)."""

    info: NodeInfo | None = None
    sealed: int = 0
    alarms: int = 0
    head: list[tuple[float, float]] = field(default_factory=list)
    outbox: list[tuple[float, float]] = field(default_factory=list)
    checkpoint_ms: list[tuple[float, float]] = field(default_factory=list)

    @property
    def waiting(self) -> int:
        """Epochs that are sealed, and not yet at the hub by its last report."""
        return max(0, self.sealed - (self.info.head if self.info is not None else 0))


class SealedEpochs:
    """Reads the sealed epochs from a gateway's log, each once."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._read = 0

    def sealed(self) -> list[dict[str, Any]]:
        if not self._log.exists():
            return []
        with self._log.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        lines = [json.loads(line) for line in whole.splitlines() if line.startswith(b"{")]
        return [line for line in lines if line.get("event") == "epoch sealed"]


class AlarmTail:
    """Reads the alarms of one gateway in a thread, to measure their delay."""

    def __init__(self, gateway: Gateway) -> None:
        self.alarms = 0
        self.seconds: list[float] = []
        self._gateway = gateway
        self._folder = gateway.command.folder / "out" / "alarms"
        self._read: dict[Path, int] = {}
        self._seen: set[str] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._over.wait(TAIL_SECONDS):
            for file in sorted(self._folder.glob("rows-*.jsonl")):
                self._take(file)

    def _take(self, file: Path) -> None:
        offset = self._read.get(file, 0)
        with file.open("rb") as opened:
            opened.seek(offset)
            data = opened.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read[file] = offset + len(whole)
        now = time.monotonic()
        for line in whole.splitlines():
            row = json.loads(line)
            if row["__id"] not in self._seen:
                self._seen.add(row["__id"])
                self.seconds.append(now - self._gateway.devices.written_at(row["seq"]))
        self.alarms = len(self._seen)


class Watch:
    """Takes samples from files and from the hub. Changes nothing in the fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._client = fleet.client()
        self._began = time.monotonic()
        self._writing_since: float | None = None
        self._seen: set[Path] = set()
        self._windows: dict[tuple[str, Any], int] = {}
        self._logs = {gateway.name: SealedEpochs(gateway.command.log) for gateway in fleet.gateways}
        self._tails = {gateway.name: AlarmTail(gateway) for gateway in fleet.gateways}
        self.gateways = {gateway.name: GatewayView() for gateway in fleet.gateways}
        self.hub_answers = False
        self.counted = 0
        self.produced: list[tuple[float, float]] = []
        self.counts: list[tuple[float, float]] = []
        self.lag: list[tuple[float, float]] = []
        self._delays: list[tuple[float, int]] = []
        """For each sample in which the center had counted more: the age of those rows in seconds, and how many they were."""

    @property
    def alarm_seconds(self) -> list[float]:
        """The sorted delays from a reading to its alarm, without repeated alarms."""
        return sorted(second for tail in self._tails.values() for second in tail.seconds)

    @property
    def center_seconds(self) -> list[float]:
        """The sorted delays from a reading to its count at the center, one per row, as far as the samples tell them apart."""
        return sorted(seconds for seconds, rows in self._delays for _ in range(rows))

    def close(self) -> None:
        for tail in self._tails.values():
            tail.close()

    @property
    def seconds(self) -> float:
        """Seconds since the demo began."""
        return time.monotonic() - self._began

    def start(self) -> None:
        """Begin to keep samples: the devices write from now on."""
        self._writing_since = time.monotonic()

    @property
    def writing_seconds(self) -> float:
        """Seconds since the devices began to write; 0 before."""
        return 0.0 if self._writing_since is None else time.monotonic() - self._writing_since

    def look(self) -> None:
        """Take a sample."""
        self._ask_hub()
        for gateway in self._fleet.gateways:
            self._look_at(gateway)
        if self._writing_since is None:
            return
        before = self.counted
        self._count()
        now = self.writing_seconds
        produced = sum(gateway.devices.rows for gateway in self._fleet.gateways)
        self.produced.append((now, produced))
        self.counts.append((now, self.counted))
        if self.counted > before:
            middle = (before + self.counted) / 2
            at = bisect_left(self.produced, middle, key=lambda point: point[1])
            self._delays.append((now - self.produced[min(at, len(self.produced) - 1)][0], self.counted - before))
        self.lag.append((now, self._lag_at(now)))

    def _ask_hub(self) -> None:
        try:
            nodes = self._client.nodes().nodes
        except HubError:
            self.hub_answers = False
            return
        self.hub_answers = True
        for info in nodes:
            if info.node in self.gateways:
                self.gateways[info.node].info = info

    def _count(self) -> None:
        """Read the new output of the center. A later result of a window replaces the previous one."""
        directory = self._fleet.center.folder / "out" / "per_device"
        for file in epoch_files(directory):
            if file in self._seen:
                continue
            self._seen.add(file)
            for device, start, n in pl.read_parquet(file).select("device", "window_start", "n").iter_rows():
                self.counted += n - self._windows.get((device, start), 0)
                self._windows[device, start] = n

    def _lag_at(self, now: float) -> float:
        """Return the time since as many rows had been written as the center has counted now."""
        if self.counted >= self.produced[-1][1]:
            return 0.0
        at = bisect_right(self.produced, float(self.counted), key=lambda point: point[1])
        return now - self.produced[max(at - 1, 0)][0]

    def _look_at(self, gateway: Gateway) -> None:
        view = self.gateways[gateway.name]
        now = self.writing_seconds
        writing = self._writing_since is not None
        for sealed in self._logs[gateway.name].sealed():
            view.sealed = int(sealed["epoch"])
            if writing:
                view.checkpoint_ms.append((now, sealed["took_us"] / 1000))
        if writing and view.info is not None:
            view.head.append((now, view.info.head))
        if writing:
            view.outbox.append((now, view.waiting))
        view.alarms = self._tails[gateway.name].alarms
