"""Decide what becomes of a child process that has ended.

Pure. `edge.supervisor` starts the processes and waits for them. Waits are those of `protocol.restart`; what differs is that an
exit code may say that starting again would only say the same again.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from typing import Final

from fordstone.protocol.restart import RestartAfter, RestartPolicy, Stop, decide

EXIT_MISUSED: Final = 2
"""The command was misused: the same command will be misused again."""
EXIT_FENCED: Final = 3
"""Somebody else owns the pipeline now: starting again would take it back and forth."""
NEVER: Final = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisionPolicy:
    """How patient to be, and with what."""

    restart: RestartPolicy = field(default_factory=RestartPolicy)
    final_codes: Container[int] = frozenset({EXIT_MISUSED, EXIT_FENCED})
    """Exit codes after which a process is not started again."""


AGENT: Final = SupervisionPolicy(
    restart=RestartPolicy(failures_max=NEVER, wait_first_us=500_000, wait_max_us=60_000_000)
)
"""On a gateway nobody is there to start things again: it never gives up on what might pass, and asks once a minute at most."""
AT_A_TERMINAL: Final = SupervisionPolicy(final_codes=range(1, 256))
"""Somebody is watching: what a process says as it fails is shown. Only one that was killed is started again."""


@dataclass(frozen=True, slots=True)
class Done:
    """It ended as it should, or was told to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartAgain:
    """Start it again after this wait. `failures` is the count to remember."""

    wait_us: int
    failures: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """Do not start it again."""

    why: str


EndDecision = Done | StartAgain | GiveUp


def judge_end(
    policy: SupervisionPolicy, *, code: int, told: bool, failures: int, lasted_us: int, deaf: bool = False
) -> EndDecision:
    """Judge an end: `code` as `subprocess` gives it (below 0: a signal), `told` to stop, after `failures` in a row before.

    `deaf`: it did not stop when told, and was killed.
    """
    if code == 0:
        return Done()
    if told:
        # A process that is told to stop before it listens dies of the signal: that is a clean stop too.
        if code < 0 and not deaf:
            return Done()
        return GiveUp(
            why="it did not stop in time and was killed" if deaf else f"it ended with code {code} as it stopped"
        )
    if code in policy.final_codes:
        return GiveUp(why=_said(code))
    match decide(policy.restart, failures=failures, lasted_us=lasted_us):
        case Stop(failures=count):
            return GiveUp(why=f"it failed {count} times in a row")
        case RestartAfter(wait_us=wait_us, failures=count):
            return StartAgain(wait_us=wait_us, failures=count)


def _said(code: int) -> str:
    match code:
        case 2:
            return "the command was misused (exit code 2); starting it again would not mend that"
        case 3:
            return "another holder has taken its pipeline over (exit code 3)"
        case _:
            return f"it failed (exit code {code})"
