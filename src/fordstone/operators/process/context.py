"""The context of a keyed function: its key, the time, and timers."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

from fordstone.errors import ConfigError, TaskError
from fordstone.lang.duration import TIME_MIN_US, UNIT_US, duration_us, human_us
from fordstone.operators.process.cells import MOST_US, Scene, microseconds_of, time_of
from fordstone.operators.process.store import Entry, Timers

AFTER_MAX_US: Final = 1_000_000 * UNIT_US["d"]
"""Timers are set so far ahead at most, about 2,700 years: there must be a time for when they run out."""


@dataclass(slots=True, kw_only=True)
class Stage:
    """Where an operator is at the moment."""

    step: str
    shift_us: int | None
    """What to add to a time as users see it; None: the stream has no event time."""
    scene: Scene = field(default_factory=Scene)
    entry: Entry | None = None
    floor_us: int = TIME_MIN_US
    """No event timer can run out before."""
    firing_us: int | None = None
    """The event timer that is running out."""
    input_ended: bool = False
    input_over: bool = False
    """The input has ended, and all rows of the key have been seen."""

    def here(self) -> str:
        """Step and key, for errors."""
        return f"step {self.step}, key {self.scene.key!r}"


class Context:
    """Handed to `process` and `on_timer`; good only until they return (a generator: until it is exhausted)."""

    __slots__ = ("_stage",)

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    @property
    def key(self) -> Any:
        """The key: of one column its value, of several a tuple."""
        return self._stage.scene.key

    @property
    def time(self) -> dt.datetime | None:
        """The event time of the row or timer; for timers by the clock, how far event time has come. None on streams without."""
        stage = self._stage
        if stage.shift_us is None or stage.scene.now_us <= TIME_MIN_US + 1:
            return None
        return time_of(stage.scene.now_us - stage.shift_us)

    @property
    def ended(self) -> bool:
        """Whether the input has ended and all rows of this key have been seen: only timers are left."""
        return self._stage.input_over

    def set_timer(
        self,
        name: str = "",
        *,
        at: dt.datetime | None = None,
        after: str | dt.timedelta | None = None,
        clock: bool = False,
    ) -> None:
        """Have `on_timer` called at a time, or after a duration. Replaces the key's timer of that name and kind."""
        stage = self._stage
        if not isinstance(name, str):
            raise TaskError(f"{stage.here()}: set_timer({name!r}): a timer's name is a string.")
        if (at is None) == (after is None):
            raise TaskError(f"{stage.here()}: set_timer({name!r}): give either at= or after=.")
        try:
            at_us = None if at is None else microseconds_of(at)
            after_us = 0 if after is None else _span_us(after)
        except (TypeError, ConfigError) as error:
            raise TaskError(f"{stage.here()}: set_timer({name!r}): {error}") from None
        if clock:
            timers, now_us = self._timers(clock=True), stage.scene.now_us
            if at_us is None:
                timers.set_after(name, after_us, now_us)
            else:
                timers.set(name, at_us, now_us)
            return
        if stage.shift_us is None:
            raise TaskError(
                f"{stage.here()}: set_timer({name!r}): the stream has no event time. Set it by the clock (clock=True), or "
                "declare event time at the source."
            )
        due_us = stage.scene.now_us + after_us if at_us is None else at_us + stage.shift_us
        if due_us - stage.shift_us > MOST_US:
            raise TaskError(
                f"{stage.here()}: set_timer({name!r}): it would run out after the year 9999. Set it sooner."
            )
        if stage.firing_us is not None and due_us <= stage.firing_us:
            raise TaskError(
                f"{stage.here()}: set_timer({name!r}): a timer that is set by a timer must be later than that; else it would "
                "never end."
            )
        self._timers(clock=False).set(name, max(due_us, stage.floor_us), stage.scene.now_us)

    def delete_timer(self, name: str = "", *, clock: bool = False) -> None:
        """Take the key's timer of that name and kind back, if there is one."""
        self._timers(clock=clock).delete(name)

    def _timers(self, *, clock: bool) -> Timers:
        entry = self._stage.entry
        if entry is None:
            raise AssertionError("timers are set while a function works on a key")
        if clock:
            if entry.clocks is None:
                entry.clocks = Timers()
            return entry.clocks
        if entry.timers is None:
            entry.timers = Timers()
        return entry.timers


@lru_cache(maxsize=1024)
def _span_us(span: str | dt.timedelta) -> int:
    """A span that is not negative, in microseconds."""
    found = duration_us(span, what="after")
    if found < 0:
        raise ConfigError(f"after={span!r} must not be negative.")
    if found > AFTER_MAX_US:
        raise ConfigError(f"after={span!r} is longer than {human_us(AFTER_MAX_US)}, further than times go. Use less.")
    return found
