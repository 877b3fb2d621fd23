"""A pipeline that `fordstone run` runs in a process of its own, to be killed and started again. Its sink is `files("out", format="jsonl")`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path


class PipelineRun:
    """The pipeline in a process of its own, which may be killed and started again."""

    def __init__(self, place: Path, code: str) -> None:
        self.place = place
        (place / "p.py").write_text(code)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [
            str(Path(sys.executable).parent / "fordstone"),
            "run",
            "p.py",
            "--state",
            "state",
            "--interval",
            "100ms",
        ]
        with (self.place / "log").open("ab") as log:
            self.process = subprocess.Popen(command, cwd=self.place, stdout=log, stderr=log, env=os.environ)

    def end(self, how: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(how)
        self.process.wait(120)

    def rows(self) -> Counter[int]:
        return Counter(
            json.loads(line)["n"]
            for path in sorted(self.place.glob("out/*.jsonl"))
            for line in path.read_text().splitlines()
        )

    def log(self) -> str:
        return (self.place / "log").read_text()[-4_000:]
