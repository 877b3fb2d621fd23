"""The benchmarks of hub and tiers run, compare results, and judge by what they measured. Too small here to say anything about speed."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "bench"
SECONDS_MAX = 600


def found_by(script: str, home: Path, *words: str, may_miss: bool = False) -> list[dict[str, Any]]:
    """What a tiny run of one section found. It leaves only its JSON. `may_miss`: a target that is missed is its exit code."""
    file = home / "found.json"
    command = [sys.executable, str(BENCH / script), "--tiny", "--json", str(file), "--directory", str(home), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS_MAX)
    assert done.returncode in ((0, 1) if may_miss else (0,)), done.stderr
    assert [path.name for path in home.iterdir()] == ["found.json"], "the benchmark leaves nothing behind"
    findings: list[dict[str, Any]] = json.loads(file.read_text())["findings"]
    assert all(math.isfinite(one["measured"]) for one in findings)
    for one in findings:
        if one["target"] is not None:
            bound, measured = one["target"]["bound"], one["measured"]
            assert one["reached"] == (measured >= bound if one["target"]["at_least"] else measured <= bound)
    return findings


def test_every_commit_of_every_node_is_answered_and_counted(tmp_path: Path) -> None:
    findings = found_by("hub.py", tmp_path, "--only", "commits")
    once_a_second = [one for one in findings if one["unit"] == "commits/s"]
    assert len(once_a_second) == 2
    for one in once_a_second:
        assert one["details"]["errors"] == 0, one["details"]["first_error"]
        assert 0 < one["details"]["commits"] <= 10 * (one["details"]["counted_s"] + 1)
    assert all(rate > 0 for rate in findings[-1]["details"]["transactions_per_s"])


def test_blobs_go_to_the_hub_and_to_its_peer(tmp_path: Path) -> None:
    findings = found_by("hub.py", tmp_path, "--only", "blobs")
    assert len(findings) == 2
    assert all(one["details"]["mb_per_s"] and one["details"]["files_mb_per_s"] for one in findings)


@pytest.mark.full
@pytest.mark.spark
def test_spark_reads_the_same_from_a_hub_as_from_files(tmp_path: Path) -> None:
    findings = found_by("hub.py", tmp_path, "--only", "spark")
    assert [one["target"]["bound"] for one in findings if one["target"] is not None] == [0.45, 1.0]


@pytest.mark.full
def test_both_ways_over_two_tiers_give_the_same_windows(tmp_path: Path) -> None:
    speed, sent, _ = found_by("two_tier.py", tmp_path, "--only", "local")
    assert speed["details"]["rows"] == 4_000
    assert sent["target"] == {"bound": 10.0, "at_least": True}
    assert all(size_bytes > 0 for way in sent["details"]["sent_bytes"].values() for size_bytes in way)


def test_what_reads_the_index_of_a_hub_is_measured_by_itself(tmp_path: Path) -> None:
    findings = found_by("hub_lag.py", tmp_path, may_miss=True)
    assert [one["case"].partition(",")[0] for one in findings] == ["planner", "task", "center's source"]
    assert [one["details"]["epochs"] for one in findings] == [100, 50, 100]
    assert [one["target"]["bound"] - one["details"]["libraries_mb"] for one in findings][1] == pytest.approx(60)
    assert [one["target"]["bound"] for one in findings][::2] == [200, 200]
