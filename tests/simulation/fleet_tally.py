"""What simulated fleets have tried: part of the result."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class FleetTally:
    """What was tried: part of the result."""

    fleets: int = 0
    steps: int = 0
    epochs: int = 0
    requests: int = 0
    requests_failed: int = 0
    crashes: int = 0
    hub_crashes: int = 0
    takeovers: int = 0
    cut_off: int = 0
    hours_jumped: int = 0
    clocks_set: int = 0
    control_versions: int = 0
    segments_collected: int = 0

    def add(self, other: FleetTally) -> None:
        """Sum up."""
        for name in FleetTally.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def __str__(self) -> str:
        return ", ".join(f"{getattr(self, name):,} {name.replace('_', ' ')}" for name in FleetTally.__slots__)
