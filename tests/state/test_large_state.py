"""State of five times the memory that a process may have: it works on disk, gives what it would give in memory, and fails there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIMES = 5
CASES = [
    # RocksDB has threads, each with an arena of its own, which count before they are used.
    ("rocksdb", "table", 320),
    ("file", "timeline", 128),
    ("file", "search", 128),
]


def ran(directory: Path, kind: str, shape: str, limit_mib: int, state_mib: int) -> subprocess.CompletedProcess[str]:
    directory.mkdir()
    arguments = [sys.executable, "-m", "tests.state.large_state", kind, shape, str(limit_mib), str(state_mib)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "POLARS_MAX_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    return subprocess.run(
        arguments, check=False, cwd=directory, env=environment, capture_output=True, text=True, timeout=1200
    )


def result(ended: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert ended.returncode == 0, ended.stderr[-3000:]
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "shape", "limit_mib"), CASES)
def test_state_of_five_times_the_memory_limit_works(kind: str, shape: str, limit_mib: int, tmp_path: Path) -> None:
    state_mib = TIMES * limit_mib
    limited = result(ran(tmp_path / "limited", kind, shape, limit_mib, state_mib))
    without_limit = result(ran(tmp_path / "memory", "memory", shape, 0, state_mib))
    assert limited["rows"] > 1000
    assert (limited["rows"], limited["digest"]) == (without_limit["rows"], without_limit["digest"])
    # Else the limit would be none.
    in_memory = ran(tmp_path / "limited-memory", "memory", shape, limit_mib, state_mib)
    assert in_memory.returncode != 0
    assert not in_memory.stdout
