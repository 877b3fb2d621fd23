"""Any `fordstone` command as a process of its own, if wanted with a wrong clock or a fault of its own."""

from __future__ import annotations

import ctypes
import signal
import sys
import time
from contextlib import AbstractContextManager, nullcontext

import msgspec

PR_SET_PDEATHSIG = 1
GRACE_US = 1_000_000
ROUND_EVERY_S = 0.5


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """What to run."""

    words: tuple[str, ...]
    ahead_s: int = 0
    """By how much this machine's clock is ahead of the true time."""
    limits: dict[str, float] = {}
    """Of a hub, where the usual ones take too long to wait for."""
    mutant: str = ""
    """A deliberate fault, to see that the tests notice."""


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # it does not outlive the test
    command = msgspec.json.decode(sys.argv[1], type=Command)
    if command.ahead_s:
        true_ns, ahead_ns = time.time_ns, command.ahead_s * 1_000_000_000
        time.time_ns = lambda: true_ns() + ahead_ns
        if command.words[0] == "hub":
            from fordstone.hub.store.retention import Retention

            # A hub counts the time that it has run, which a clock that is ahead does not change.
            Retention.__init__.__kwdefaults__.update(grace_us=GRACE_US, every_s=ROUND_EVERY_S)  # type: ignore[union-attr]  # it has defaults
    if command.limits:
        from fordstone.hub.server.limits import Limits

        Limits.__init__.__kwdefaults__.update(command.limits)  # type: ignore[union-attr]  # all its fields have defaults
    from fordstone.cli.main import main as run

    sys.argv[1:] = command.words
    with mutant(command.mutant) if command.mutant else nullcontext():
        run()


def mutant(name: str) -> AbstractContextManager[None]:
    from tests.simulation.fleet_mutants import FLEET_MUTANTS
    from tests.simulation.mutants import MUTANTS

    return (MUTANTS | FLEET_MUTANTS)[name]()


if __name__ == "__main__":
    main()
