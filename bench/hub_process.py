"""A hub as people run it: a process of its own, on a free port of this machine, with its log and blobs on the disk."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fordstone.cli.tiers import command
from fordstone.hub.client.address import HubAddress

START_SECONDS_MAX = 60.0
STOP_SECONDS_MAX = 30.0
_TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")
_TIMES = slice(11, 13)
"""In /proc/PID/stat after the name: processor time of the process itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubProcess:
    """One that answers."""

    url: str
    data: Path
    pid: int

    @property
    def address(self) -> HubAddress:
        return HubAddress(url=self.url)

    @property
    def netloc(self) -> tuple[str, int]:
        host, _, port = self.url.rpartition("//")[2].rpartition(":")
        return host, int(port)

    def cpu_seconds(self) -> float:
        """Processor time so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return sum(map(int, fields[_TIMES])) * _TICK_SECONDS

    def metric(self, name: str) -> float:
        """One number of its metrics, over all labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=START_SECONDS_MAX) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition(" ")[0].partition("{")[0] == name)


@contextmanager
def hub_process(directory: Path | None, fill: Callable[[Path], None] = lambda _: None) -> Iterator[HubProcess]:
    """A new hub that is gone with the block, and its data with it. `fill` writes its log before it starts."""
    with tempfile.TemporaryDirectory(dir=directory, prefix="fordstone-hub-bench-") as home:
        data, ready = Path(home) / "hub", Path(home) / "url"
        fill(data)
        words = ("hub", "--listen", "127.0.0.1:0", "--data", str(data), "--ready-file", str(ready))
        process = subprocess.Popen(command(*words), stdout=subprocess.DEVNULL)
        try:
            until = time.monotonic() + START_SECONDS_MAX
            while not ready.exists():
                if process.poll() is not None or time.monotonic() > until:
                    raise SystemExit("the hub did not come up.")
                time.sleep(0.02)
            yield HubProcess(url=ready.read_text(encoding="ascii").strip(), data=data, pid=process.pid)
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
