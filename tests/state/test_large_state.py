"""State of several times the memory that a process may have: it works on disk, gives what it would give in memory, and fails there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
CASES = [
    ("rocksdb", "table", 120, 3),
    pytest.param("rocksdb", "table", 120, 5, marks=pytest.mark.full),
    pytest.param("file", "timeline", 48, 5, marks=pytest.mark.full),
    pytest.param("file", "search", 48, 5, marks=pytest.mark.full),
]
"""With the limit in MiB, and how many times as large the state is. With 88 MiB, one step of RocksDB sometimes needs more than there is."""
STACK_BYTES = 512 * 1024
"""Of a thread. RocksDB has some, and all of a stack counts before it is used."""


def begun(directory: Path, kind: str, shape: str, limit_mib: int, state_mib: int) -> subprocess.Popen[str]:
    directory.mkdir()
    arguments = [sys.executable, "-m", "tests.state.large_state", kind, shape, str(limit_mib), str(state_mib)]
    return subprocess.Popen(
        ["sh", "-c", f'ulimit -s {STACK_BYTES // 1024} && exec "$@"', "sh", *arguments],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": str(ROOT), "POLARS_MAX_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, errors = process.communicate(timeout=1200)
    assert process.returncode == 0, errors[-3000:]
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "shape", "limit_mib", "times"), CASES)
def test_state_of_several_times_the_memory_limit_works(
    kind: str, shape: str, limit_mib: int, times: int, tmp_path: Path
) -> None:
    state_mib = times * limit_mib
    with (
        begun(tmp_path / "limited", kind, shape, limit_mib, state_mib) as limited,
        begun(tmp_path / "memory", "memory", shape, 0, state_mib) as without_limit,
        begun(tmp_path / "limited-memory", "memory", shape, limit_mib, state_mib) as in_memory,
    ):
        try:
            found, expected = result(limited), result(without_limit)
            # Else the limit would be none.
            out, errors = in_memory.communicate(timeout=1200)
        finally:
            for process in (limited, without_limit, in_memory):
                process.kill()
    assert found["rows"] > 900
    assert (found["rows"], found["digest"]) == (expected["rows"], expected["digest"])
    assert in_memory.returncode != 0
    assert not out
    # What it dies of has several names, most of them of whatever asked for memory.
    assert any(word in errors for word in ("emory", "alloc", "OSError", "PyObject pointer is null")), errors[-3000:]
