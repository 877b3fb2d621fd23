"""A pipeline of two tiers on one machine with its center on a real Spark: `fordstone run FILE`, as a batch job."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.cli.place import start
from tests.cli.test_tiers_run import EXAMPLES, devices, found, oracle, same

SECONDS_MAX = 300


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
