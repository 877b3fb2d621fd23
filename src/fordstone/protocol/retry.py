"""Decide how long to wait before a retry, and whether a failed pipeline or a process that has ended is started again. Pure.

The wait grows with each failure in a row, up to a cap, with jitter: a thousand nodes that lost the hub together do not all come back at
the same moment. The caller draws the random number. A run that lasted long enough resets the count. For a
process (`edge.agent.supervisor` starts and watches it), some exit codes say that another start would fail the same way.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from typing import Final

DISK_RETRY_US: Final = 500_000
"""The wait before a local disk that refused is tried again. It does not grow: a node is alone with its disk."""
_EXPONENT_MAX: Final = 62
"""Bounds the power, so that a night of failures does not build a number with a thousand digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """The waits of one kind of retry."""

    first_us: int
    max_us: int
    factor: int = 2
    jitter: float = 0.5
    """The share of each wait that is random: 0.5 waits between half and all of it, 0 always all of it."""
    retry_after_max_us: int = 600_000_000
    """The longest wait that a server may ask for."""

    def wait_us(self, failures: int, *, chance: float, retry_after_us: int | None = None) -> int:
        """Return the wait after this number of failures in a row, counted from 1.

        `chance` is a random number from 0 to 1; 1 gives the longest wait. The wait is at least `retry_after_us`, which
        the server asked for, up to `retry_after_max_us`.
        """
        grown_us: int = self.first_us * self.factor ** min(max(failures - 1, 0), _EXPONENT_MAX)
        full_us = min(self.max_us, grown_us)
        wait_us = full_us - round(full_us * self.jitter * (1.0 - chance))
        if retry_after_us is None:
            return wait_us
        return max(wait_us, min(retry_after_us, self.retry_after_max_us))

    def wait_s(self, failures: int, *, chance: float, retry_after_s: float | None = None) -> float:
        asked_us = None if retry_after_s is None else int(retry_after_s * 1e6)
        return self.wait_us(failures, chance=chance, retry_after_us=asked_us) / 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """The limits of restarts."""

    failures_max: int = 5
    """Maximum number of failures in a row; after one more, nothing is started again."""
    wait_first_us: int = 100_000
    wait_max_us: int = 30_000_000
    forgiven_after_us: int = 60_000_000
    """A run that lasted this long resets the count of failures."""


@dataclass(frozen=True, slots=True)
class RestartAfter:
    """Start again after this wait. `failures` is the count to remember."""

    wait_us: int
    failures: int


@dataclass(frozen=True, slots=True)
class Stop:
    """It has failed too often in a row, or twice in the same way."""

    failures: int


RestartDecision = RestartAfter | Stop


def decide_restart(
    policy: RestartPolicy, *, failures: int, lasted_us: int, chance: float, repeated: bool = False
) -> RestartDecision:
    """Judge the failure of a run that lasted `lasted_us`, after `failures` in a row. `chance`: see `Backoff.wait_us`.

    `repeated`: a step failed on the same rows as the last time, with the same exception, so another try would fail the same way.
    """
    count = 1 if lasted_us >= policy.forgiven_after_us else failures + 1
    if count > policy.failures_max or (repeated and count > 1):
        return Stop(count)
    backoff = Backoff(first_us=policy.wait_first_us, max_us=policy.wait_max_us)
    return RestartAfter(backoff.wait_us(count, chance=chance), count)


EXIT_MISUSED: Final = 2
"""The command was misused: the same command would fail again."""
EXIT_FENCED: Final = 3
"""Another process owns the pipeline now: a restart would take it back, and then it would be taken over again."""
_UNLIMITED: Final = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisionPolicy:
    """When a process is started again."""

    restart: RestartPolicy = field(default_factory=RestartPolicy)
    final_codes: Container[int] = frozenset({EXIT_MISUSED, EXIT_FENCED})
    """Exit codes after which a process is not started again."""


AGENT: Final = SupervisionPolicy(
    restart=RestartPolicy(failures_max=_UNLIMITED, wait_first_us=500_000, wait_max_us=60_000_000)
)
"""For a gateway, where no one restarts things by hand: it never gives up on a failure that may pass."""
AT_A_TERMINAL: Final = SupervisionPolicy(final_codes=range(1, 256))
"""For a command that a user watches: errors are shown. Only a process that was killed is started again."""


@dataclass(frozen=True, slots=True)
class Finished:
    """It ended successfully, or because it was asked to stop."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Do not start it again."""

    reason: str


ExitDecision = Finished | RestartAfter | GiveUp


def judge_exit(
    policy: SupervisionPolicy,
    *,
    code: int,
    stop_requested: bool,
    failures: int,
    lasted_us: int,
    chance: float,
    killed: bool = False,
) -> ExitDecision:
    """Judge the end of a process. `code` is `subprocess`'s: below 0 for a signal.

    `failures`: in a row, before this one. `killed`: it did not stop within its timeout, so the supervisor killed it.
    """
    if code == 0:
        return Finished()
    if stop_requested:
        # A process that is asked to stop before it handles signals dies of the signal: that is a clean stop, too.
        if code < 0 and not killed:
            return Finished()
        return GiveUp(
            "it did not stop in time and was killed" if killed else f"it ended with code {code} as it stopped"
        )
    if code in policy.final_codes:
        return GiveUp(_describe_exit(code))
    match decide_restart(policy.restart, failures=failures, lasted_us=lasted_us, chance=chance):
        case Stop(failures=count):
            return GiveUp(f"it failed {count} times in a row")
        case RestartAfter() as decision:
            return decision


def _describe_exit(code: int) -> str:
    match code:
        case 2:
            return "the command was misused (exit code 2), and would be misused again"
        case 3:
            return "another holder has taken its pipeline over (exit code 3)"
        case _:
            return f"it failed (exit code {code})"
