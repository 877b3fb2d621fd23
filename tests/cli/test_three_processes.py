"""Hub, edge and center as processes that know each other by address and token alone."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.place import SECONDS_MAX, finish, start
from tests.cli.test_tiers_run import EXAMPLES, devices, same, until

Begin = Callable[..., subprocess.Popen[str]]


class Place:
    """A working directory with the example, a hub that wants tokens, and what was started."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.started: list[subprocess.Popen[str]] = []
        shutil.copy(EXAMPLES / "cold_chain.py", path / "chain.py")
        devices(path, 60)
        for name, role in (("gateway", ["--node", "gateway"]), ("center", ["--center"]), ("admin", ["--admin"])):
            code, out, err = finish(start(path, "hub", "token", "add", name, *role, "--data", "hub"))
            assert code == 0, err
            (path / f"{name}.token").write_text(out.strip().splitlines()[-1])
        hub = self.begin("hub", "--listen", "127.0.0.1:0", "--data", "hub", "--ready-file", "url")
        until((path / "url").exists, hub, "the hub listened")
        self.url = (path / "url").read_text().strip()

    def begin(self, *words: str) -> subprocess.Popen[str]:
        self.started.append(start(self.path, *words))
        return self.started[-1]

    def with_hub(self, token: str, *words: str) -> list[str]:
        return [*words, "--hub", self.url, "--token-file", f"{token}.token"]

    def ask(self, *words: str, token: str = "admin") -> tuple[int, str, str]:
        return finish(start(self.path, *self.with_hub(token, *words)))

    def nodes(self) -> list[dict[str, Any]]:
        code, out, err = self.ask("nodes", "--json")
        assert code == 0, err
        found: list[dict[str, Any]] = json.loads(out)["nodes"]
        return found

    def states(self) -> dict[tuple[str, str], str | None]:
        """The newest state that each pipeline of each node has reported."""
        return {(one["node"], one["pipeline"]): (one["health"] or {}).get("state") for one in self.nodes()}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    for process in reversed(made.started):
        process.kill()
        process.communicate(timeout=SECONDS_MAX)


def stop(process: subprocess.Popen[str]) -> str:
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 0, err
    return err


def test_each_with_its_token_does_its_part_and_another_machine_takes_over_where_the_first_was(place: Place):
    edge = ["edge", "chain.py", "--node", "gateway", "--interval", "200ms"]
    first = place.begin(*place.with_hub("gateway", *edge))
    center = place.begin(
        *place.with_hub("center", "center", "chain.py", "--on", "edge", "--interval", "200ms", "--state", "c")
    )
    until(lambda: same(place.path), center, "all rows were at the center")
    until(lambda: place.states() == {("gateway", "cold-chain"): "running"}, first, "the node had reported that it runs")
    stop(first)
    until(lambda: place.states() == {("gateway", "cold-chain"): "stopped"}, center, "the hub knew that it had stopped")
    head = place.nodes()[0]["head"]

    refused = place.begin(*place.with_hub("gateway", *edge), "--state", "new")
    assert refused.stderr is not None
    devices(place.path, 30, after=60)
    said = next(line for line in refused.stderr if "another holder" in line or "held" in line or "take" in line.lower())
    assert "--take-over" in said
    stop(refused)

    second = place.begin(*place.with_hub("gateway", *edge), "--state", "newer", "--take-over")
    until(lambda: same(place.path), center, "what came meanwhile was counted once")
    assert place.nodes()[0]["head"] > head
    stop(second)
    stop(center)


def test_a_token_for_something_else_is_reported_where_it_is_used(place: Place):
    code, _, err = place.ask("nodes", token="gateway")
    assert (code, "fordstone hub token add" in err) == (1, True), err
    edge = place.begin(*place.with_hub("center", "edge", "chain.py", "--node", "gateway", "--interval", "200ms"))
    assert edge.stderr is not None
    said = next(line for line in edge.stderr if '"WARNING"' in line or '"ERROR"' in line)
    assert "token" in said, said
