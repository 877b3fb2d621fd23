"""Kill -9, rotate the input, start again: each row is in the output once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.faults.process import ROOT
from tests.waiting import until

from fordstone.connectors import rows
from fordstone.errors import SinkError

PIPELINE = """
from fordstone import Pipeline
from fordstone.connectors import files

p = Pipeline("rotated")
p.source("log", files("in/app.jsonl"), schema={"n": "bigint"}).sink("out", files("out", format="jsonl"))
"""


@contextmanager
def running(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    (folder / "rotated.py").write_text(PIPELINE)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", "from fordstone.cli.main import main; main()"]
    with (folder / "stderr").open("wb") as errors:
        process = subprocess.Popen(
            [*command, "run", "rotated.py", "--interval", "20ms"],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def read(folder: Path) -> list[int]:
    try:
        return sorted(rows(folder / "out")["n"].to_list())
    except SinkError:
        return []  # it has not begun yet


def add(path: Path, numbers: Iterable[int]) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps({"n": n}) + "\n" for n in numbers)


def test_a_log_that_is_rotated_between_kill_and_restart_is_read_once(
    tmp_path: Path, faults: Callable[..., None]
) -> None:
    log = tmp_path / "in/app.jsonl"

    def reads(process: subprocess.Popen[bytes], count: int) -> None:
        until(
            lambda: len(read(tmp_path)) >= count,
            f"{count} rows",
            alive=lambda: process.poll() is None,
            report=(tmp_path / "stderr").read_text,
        )

    add(log, range(100))
    with running(tmp_path) as process:
        reads(process, 100)
        process.send_signal(signal.SIGKILL)
        process.wait()
    faults(kills=1)
    add(log, range(100, 120))
    log.rename(log.with_name("app.jsonl.1"))
    add(log, range(120, 300))
    with running(tmp_path) as process:
        reads(process, 300)
        log.with_name("app.jsonl.1").rename(log.with_name("app.jsonl.2"))
        log.rename(log.with_name("app.jsonl.1"))
        add(log, range(300, 310))
        reads(process, 310)
    assert read(tmp_path) == list(range(310))
