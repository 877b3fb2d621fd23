"""Threads that decode one class for the first time do not crash the process."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.edge.test_ahead import Node

from fordstone.edge import run
from fordstone.hub.client import client
from fordstone.hub.client.address import HubAddress
from fordstone.hub.store import log
from fordstone.hub.store.sqlite import SqliteStore

RACE = """
import sys, threading, types
import msgspec
from fordstone.structs import prepare_structs

CLASSES = 100
made = types.ModuleType("fordstone.made")
sys.modules["fordstone.made"] = made
source = "from __future__ import annotations\\nimport msgspec\\n"
for number in range(CLASSES):
    source += f"class B{number}(msgspec.Struct):\\n    x: int\\n    y: tuple[int, ...] = ()\\n"
    source += f"class A{number}(msgspec.Struct):\\n    a: int\\n    b: B{number} | None = None\\n    c: dict[str, B{number}] = {{}}\\n"
exec(source, made.__dict__)
prepare_structs()
sys.setswitchinterval(1e-6)
together = threading.Barrier(4)

def decode():
    for number in range(CLASSES):
        together.wait()
        msgspec.json.decode(b'{"a": 1, "b": {"x": 1}, "c": {"k": {"x": 2}}}', type=made.__dict__[f"A{number}"])

threads = [threading.Thread(target=decode) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print("whole")
"""


def test_threads_decode_prepared_classes_for_the_first_time_together():
    done = subprocess.run([sys.executable, "-c", RACE], capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr


def test_classes_are_prepared_before_threads_of_a_node_a_hub_and_a_client_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path
):
    prepared: list[str] = []
    for module in (run, client, log):
        monkeypatch.setattr(module, "prepare_structs", lambda name=module.__name__: prepared.append(name))
    run.ThreadScheduler(Node().engine.steppables()).run(lambda: True)
    client.HubClient(HubAddress(url="http://127.0.0.1:9"))
    log.HubLog(SqliteStore(tmp_path / "log.sqlite"), clock_us=lambda: 0).close()
    assert prepared == [module.__name__ for module in (run, client, log)]
