"""A pipeline of two tiers on one machine with its center on a real Spark: `fordstone run FILE`, as a batch job or over what is there now."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.cli.place import start
from tests.cli.test_tiers_run import EXAMPLES, devices, found, oracle, same

from fordstone.connectors import rows

SECONDS_MAX = 600
START = datetime(2026, 1, 1, tzinfo=UTC)
LATENESS_S, WINDOW_S = 10, 10
HOURLY = f"""
from fordstone import Pipeline, tumbling
from fordstone.connectors import files

p = Pipeline("hourly")
readings = p.source(
    "readings", files("in/*.jsonl", series="(h)"), schema={{"id": "bigint", "device": "string", "ts": "timestamp"}}, time="ts", lateness="{LATENESS_S}s"
)
readings.to_center().sink("rows", files("out/rows", format="jsonl"))
windows = readings.to_center().group_by("device").window(tumbling("{WINDOW_S}s")).agg(n="count(*)", total="sum(id)")
windows.final().sink("windows", files("out/windows", format="jsonl"))
"""
Reading = tuple[int, str, int]
"""id, device and second"""


@pytest.mark.full  # as the page about it does
def test_a_bounded_run_on_spark_gives_what_one_query_over_all_rows_gives(tmp_path: Path):
    shutil.copy(EXAMPLES / "cold_chain.py", tmp_path / "chain.py")
    devices(tmp_path, 60)
    process = start(tmp_path, "run", "chain.py", "--bounded", "--master", "local[1]")
    _, err = process.communicate(timeout=SECONDS_MAX)
    assert process.returncode == 0, err
    assert same(tmp_path), f"{found(tmp_path)}\n{oracle(tmp_path)}"
    assert "center: starting Spark ..." in err
    assert "cold-chain ended: all input was read." in err


def write_hour(place: Path, name: str, seconds: Iterable[int], first_id: int) -> list[Reading]:
    """A file with a reading of each of two devices at each second."""
    moments = [(second, device) for second in seconds for device in "ab"]
    written = [(first_id + number, device, second) for number, (second, device) in enumerate(moments)]
    (place / "in").mkdir(exist_ok=True)
    with (place / "in" / name).open("w") as file:
        for number, device, second in written:
            ts = (START + timedelta(seconds=second)).isoformat()
            file.write(json.dumps({"id": number, "device": device, "ts": ts}) + "\n")
    return written


def closed(readings: list[Reading]) -> Counter[tuple[str, int, int, int]]:
    """The windows that are complete: device, start, number of readings and sum of ids."""
    watermark = max(second for *_, second in readings) - LATENESS_S
    found: dict[tuple[str, int], list[int]] = {}
    for number, device, second in readings:
        found.setdefault((device, second // WINDOW_S * WINDOW_S), []).append(number)
    complete = {window: ids for window, ids in found.items() if window[1] + WINDOW_S <= watermark}
    return Counter((*window, len(ids), sum(ids)) for window, ids in complete.items())


def test_available_now_keeps_windows_open_between_runs_and_counts_each_row_once(tmp_path: Path):
    (tmp_path / "hourly.py").write_text(HOURLY)
    written: list[Reading] = []
    # Each later file begins with readings of windows that the run before it has left open.
    for name, seconds in (("h00.jsonl", range(25)), ("h01.jsonl", [25, 17, 18, 16, *range(26, 50)])):
        written += write_hour(tmp_path, name, seconds, len(written))
        process = start(tmp_path, "run", "hourly.py", "--available-now", "--master", "local[1]")
        _, err = process.communicate(timeout=SECONDS_MAX)
        assert process.returncode == 0, err
        assert "hourly read everything there is; the next run resumes from here." in err
        assert Counter(rows(tmp_path / "out" / "rows")["id"].to_list()) == Counter(number for number, *_ in written)
        windows = rows(tmp_path / "out" / "windows").select("device", "window_start", "n", "total")
        found = Counter((device, (at - START).seconds, n, total) for device, at, n, total in windows.iter_rows())
        assert found == closed(written)
        assert {at for _, at, *_ in found} == ({0} if name == "h00.jsonl" else {0, 10, 20})
