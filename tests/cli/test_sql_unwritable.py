"""`fordstone sql` where its result cannot be written as it is: one line that says why, and never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.place import SECONDS_MAX, finish, start

SOURCE = "readings=in/*.jsonl"
QUERY = "SELECT device, temp FROM readings WHERE temp > 48"
WORDS = ("GRÖßE", "漢字", "\U0001f600")


@pytest.mark.parametrize("options", [[], ["--json"], ["--explain"]])
def test_a_full_disk_is_an_error_of_one_line(place: Path, options: list[str]):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", "from fordstone.cli.main import main; main()", "sql", QUERY, "-s", SOURCE, "-q", *options],
            cwd=place, stdout=full, stderr=subprocess.PIPE, text=True, timeout=SECONDS_MAX, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "error: stdout: the result could not be written: No space left on device.\n"


def test_a_closed_standard_output_is_said(place: Path):
    command = "import os, sys; os.close(1); sys.stdout = None; from fordstone.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", command, "sql", QUERY, "-s", SOURCE, "-q"],
        cwd=place, stderr=subprocess.PIPE, text=True, timeout=SECONDS_MAX, check=False, env=dict(os.environ),
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("error: standard output is closed")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_signs_that_the_encoding_of_the_output_lacks_are_escaped(place: Path, options: list[str]):
    rows = [{"device": word, "ts": "2026-01-01T00:00:00Z", "temp": 99.0} for word in WORDS]
    (place / "in" / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    query = "SELECT device FROM readings WHERE temp = 99"
    process = start(place, "sql", query, "-s", SOURCE, "-q", *options, PYTHONIOENCODING="ascii")
    code, out, err = finish(process)
    assert (code, err) == (0, "")
    if options:
        assert {json.loads(line)["device"] for line in out.splitlines()} == set(WORDS)
    else:
        assert "GR\\u00d6\\u00dfE" in out
