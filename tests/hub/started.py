"""`fordstone hub` as a process of its own, as a supervisor would start it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.waiting import until

SECONDS_MAX = 30.0
_MAIN = [sys.executable, "-c", "from fordstone.cli.main import main; main()", "hub"]


@dataclass
class Started:
    """A hub that runs; `url` is what it wrote into its ready file."""

    process: subprocess.Popen[str]
    url: str

    def finish(self) -> tuple[int, str, str]:
        """Its exit code and what it printed, once it has ended."""
        out, err = self.process.communicate(timeout=SECONDS_MAX)
        return self.process.returncode, out, err

    def stop(self) -> tuple[int, str, str]:
        """End it cleanly."""
        self.process.terminate()
        return self.finish()


def start(data: Path, *options: str, files_max: int | None = None) -> subprocess.Popen[str]:
    """Start a hub on a free port, without waiting for it. Options that come later win. `files_max`: how many it may open."""
    ready = data.with_name(f"{data.name}.url")
    ready.unlink(missing_ok=True)
    command = [*_MAIN, "--data", str(data), "--listen", "127.0.0.1:0", "--ready-file", str(ready), *options]
    if files_max is not None:
        command = ["sh", "-c", f'ulimit -n {files_max}; exec "$@"', "sh", *command]
    env = {name: value for name, value in os.environ.items() if not name.startswith("FORDSTONE")}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


@contextlib.contextmanager
def started(data: Path, *options: str, files_max: int | None = None) -> Iterator[Started]:
    """A hub that answers, on a free port; killed with the block if it still runs."""
    process = start(data, *options, files_max=files_max)
    ready = data.with_name(f"{data.name}.url")
    try:
        until(
            ready.exists,
            "address of the hub",
            seconds_max=SECONDS_MAX,
            alive=lambda: process.poll() is None,
            report=lambda: "" if process.poll() is None else process.communicate(),
        )
        yield Started(process, ready.read_text().strip())
    finally:
        process.kill()
        process.communicate()
