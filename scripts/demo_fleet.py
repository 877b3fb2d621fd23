"""The demo's processes: a hub, gateways, and a center. Each is a `fordstone` command in its own directory."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from demo_devices import Devices
from demo_network import Network

from fordstone.hub.client.address import HubAddress
from fordstone.hub.client.client import HubClient

FORDSTONE = Path(sys.executable).with_name("fordstone")
PIPELINE = Path(__file__).with_name("demo_pipeline.py")
STOP_SECONDS_MAX = 300.0
LOG_LINES_SHOWN = 12
PROGRESS = '{"event":"progress"'


class DemoError(Exception):
    """The demo cannot continue; the text says why."""


class Command:
    """One process and its children. After SIGKILL it can be started again with the same command."""

    def __init__(self, name: str, folder: Path, *arguments: str) -> None:
        self.name = name
        self.folder = folder
        self.kills = 0
        self.dead = False
        """Whether it was killed and has not been started again."""
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "fordstone.log"

    def start(self) -> None:
        self.dead = False
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [str(FORDSTONE), *self._arguments],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def pid(self) -> int | None:
        """None while it does not run."""
        return None if self._process is None else self._process.pid

    def check(self) -> None:
        """Raise if it has ended by itself."""
        if self._process is not None and self._process.poll() is not None:
            raise DemoError(f"{self.name} ended by itself, with {self._process.returncode}:\n{self._tail()}")

    def kill(self) -> None:
        """Send SIGKILL, which no program can catch, to the process and its children."""
        if self._process is None:
            raise DemoError(f"{self.name} is not running.")
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None
        self.kills += 1
        self.dead = True

    def stop(self) -> None:
        """Send SIGTERM, and wait until the process has ended."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise DemoError(f"{self.name} did not end within {STOP_SECONDS_MAX:.0f} s:\n{self._tail()}") from None
        if code != 0:
            raise DemoError(f"{self.name} ended with {code}:\n{self._tail()}")

    def close(self) -> None:
        """Kill the process if it is still running."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join([line for line in lines if not line.startswith(PROGRESS)][-LOG_LINES_SHOWN:])


@dataclass(kw_only=True)
class Gateway:
    """A node: its devices, its process and its network."""

    name: str
    command: Command
    devices: Devices
    network: Network


@dataclass(kw_only=True)
class Fleet:
    """The hub, the center and the gateways."""

    folder: Path
    hub: Command
    hub_port: int
    center: Command
    center_engine: str
    """Spark, or the edge engine: what the view and the report call it."""
    gateways: list[Gateway] = field(default_factory=list)

    @property
    def commands(self) -> list[Command]:
        return [self.hub, self.center, *(gateway.command for gateway in self.gateways)]

    def client(self) -> HubClient:
        """Return a client that connects to the hub directly, not through the networks of the gateways."""
        return HubClient(HubAddress(url=f"http://127.0.0.1:{self.hub_port}"), timeout_s=5)

    def check(self) -> None:
        for command in self.commands:
            command.check()

    def close(self) -> None:
        for command in self.commands:
            command.close()
        for gateway in self.gateways:
            gateway.network.close()


def make_fleet(
    folder: Path,
    *,
    gateways: int,
    devices: int,
    rate: float,
    seed: int,
    local: bool,
    pipeline: Path = PIPELINE,
    hub_options: tuple[str, ...] = (),
    edge_options: tuple[str, ...] = (),
    roll_seconds: float | None = None,
) -> Fleet:
    """Create directories, ports and commands, and start nothing. `local` runs the center on the edge engine, without Spark."""
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    engine = ("--on", "edge") if local else ("--on", "spark", "--master", "local[*]", "--memory", "1g")
    fleet = Fleet(
        folder=folder,
        hub=Command("the hub", folder / "hub", "hub", "--listen", f"127.0.0.1:{port}", "--data", "data", *hub_options),
        hub_port=port,
        center_engine="the edge engine" if local else "Spark",
        center=Command(
            "the center",
            folder / "center",
            "center",
            str(pipeline),
            "--hub",
            url,
            "--state",
            "state",
            "--interval",
            "1s",
            *engine,
            "--json",
        ),
    )
    for number in range(1, gateways + 1):
        name = f"gateway-{number}"
        network = Network(port)
        own = folder / name
        fleet.gateways.append(
            Gateway(
                name=name,
                devices=Devices(name, own / "in", devices=devices, rate=rate, seed=seed, roll_seconds=roll_seconds),
                network=network,
                command=Command(
                    name, own, "edge", str(pipeline), "--hub", f"http://127.0.0.1:{network.port}", "--node", name, "--state", "state",
                    "--interval", "1s", "-v", *edge_options,
                ),
            )
        )  # fmt: skip
    return fleet


def _free_port() -> int:
    """Return a port below the range of outgoing connections, so that it stays free while the hub is down."""
    for port in random.sample(range(12_000, 30_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise DemoError("no free port was found between 12000 and 30000.")
