"""Any `fordstone` command as a process of its own, if wanted with a wrong clock."""

from __future__ import annotations

import ctypes
import signal
import sys
import time

import msgspec

PR_SET_PDEATHSIG = 1


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """What to run."""

    words: tuple[str, ...]
    ahead_s: int = 0
    """By how much this machine's clock is ahead of the true time."""


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # it does not outlive the test
    command = msgspec.json.decode(sys.argv[1], type=Command)
    if command.ahead_s:
        true_ns, ahead_ns = time.time_ns, command.ahead_s * 1_000_000_000
        time.time_ns = lambda: true_ns() + ahead_ns
    from fordstone.cli.main import main as run

    sys.argv[1:] = command.words
    run()


if __name__ == "__main__":
    main()
