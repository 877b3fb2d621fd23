"""Processes are killed while they upload a large file to S3 in parts: a checkpoint's run, and an epoch of a sink."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.examples import rest
from tests.faults.process import WAIT_SECONDS_MAX
from tests.faults.proxy import Trouble, proxied
from tests.services.fixtures import use_s3
from tests.services.s3 import S3
from tests.waiting import until

from fordstone.connectors import latest, rows
from fordstone.storage.remote import S3_PART_BYTES, open_filesystem

ROWS = 40
TEXT_BYTES = 9 * S3_PART_BYTES // (4 * ROWS)
"""Over two parts in all, also when they are compressed: random bytes of which text is made."""
JOB = """
import json, sys
from fordstone import Pipeline
from fordstone.connectors import files

url, remote = sys.argv[1:]
p = Pipeline("large")
read = p.source("rows", files("in/*.jsonl"), schema={"k": "bigint", "text": "string"})
read.sink("all", files(f"{url}/all", format="parquet"))
read.group_by("k").agg(text="max(text)").sink("by_key", files("by_key", format="jsonl"))
report = p.run(bounded=True, node="n", state="state", remote=remote)
print(json.dumps([report.outcome, report.resumed_from]))
"""


@contextmanager
def started(folder: Path, url: str) -> Iterator[subprocess.Popen[str]]:
    """A process that does not outlive the block."""
    command = [sys.executable, "-c", JOB, url, f"{url}/copies"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def run_to_end(folder: Path, url: str) -> tuple[str, int | None]:
    """Return the outcome, and the checkpoint that the run began with."""
    with started(folder, url) as process:
        out, _ = process.communicate(timeout=WAIT_SECONDS_MAX)
    assert process.returncode == 0
    outcome, resumed_from = json.loads(out)
    return outcome, resumed_from


def unfinished(url: str) -> list[str]:
    """The keys of the uploads that have begun and not ended."""
    filesystem, bucket = open_filesystem(url, kind="files")
    return [upload["Key"] for upload in filesystem.list_multipart_uploads(bucket)]


def files_in(url: str) -> list[str]:
    filesystem, bucket = open_filesystem(url, kind="files")
    found: list[str] = filesystem.find(bucket)
    return found


@pytest.mark.parametrize("place", ["copies/large/n/runs/", *rest("all/epoch-")])
def test_a_kill_in_the_middle_of_an_upload_in_parts_shows_nothing_of_it(
    place: str, s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: Callable[..., None]
) -> None:
    random = Random(91)
    given: list[dict[str, Any]] = [
        {"k": k, "text": base64.b64encode(random.randbytes(TEXT_BYTES)).decode()} for k in range(ROWS)
    ]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    url = f"s3://{s3.bucket()}"
    second = Trouble(what="hold", where=rf"^PUT .*/{place}.*partNumber=2\b")
    with proxied(s3.port, second) as proxy:
        use_s3(s3, monkeypatch, proxy.url)
        with started(tmp_path, url) as process:
            until(
                lambda: second.happened > 0,
                "the second part",
                seconds_max=WAIT_SECONDS_MAX,
                alive=lambda: process.poll() is None,
            )
        faults(kills=1)
    use_s3(s3, monkeypatch)
    assert any(place in key for key in unfinished(url))
    assert [name for name in files_in(url) if place in name] == []
    assert run_to_end(tmp_path, url)[0] in {"ended", "already_ended"}
    assert unfinished(url) == []
    assert any(place in name for name in files_in(url))
    assert rows(f"{url}/all").sort("k").to_dicts() == given
    assert latest(tmp_path / "by_key").sort("k").to_dicts() == given
    # The copy is whole.
    shutil.rmtree(tmp_path / "state")
    assert run_to_end(tmp_path, url)[1] is not None
    assert rows(f"{url}/all").sort("k").to_dicts() == given
