"""The benchmark of operators runs, compares results, and measures every section. Too small here to say anything about speed."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench"
SECTIONS = {"sliding", "session", "ewma", "join", "dedup", "pattern", "process"}


def test_every_section_is_measured_and_judged(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH / "operators.py"), "--tiny", "--json", str(tmp_path / "found.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())["findings"]
    assert {one["section"] for one in found if one["target"] is not None} == SECTIONS
    assert all(math.isfinite(one["measured"]) for one in found)
    assert all(one["details"]["rows_out"] for one in found)
