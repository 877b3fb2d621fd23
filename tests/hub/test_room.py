"""A hub whose disk is full can still let go of what was read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.hub.running import running_hub
from tests.hub.sending import Node, entry

from fordstone.errors import HubAwayError
from fordstone.hub.client.client import HubClient
from fordstone.hub.messages import ConsumerPosition
from fordstone.hub.refused import Refused
from fordstone.hub.server.room import EPOCHS_SHARE, KEPT_BYTES_MAX, KEPT_SHARE, LOOK_EVERY_S, Room

GIB = 1 << 30


@dataclass
class Disk:
    free: int
    total: int = 100 * GIB


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        """Each look is at another moment."""
        self.now_s += LOOK_EVERY_S
        return self.now_s


def refuses(room: Room) -> tuple[bool, bool]:
    """Whether blobs, and epochs, are refused."""
    return _refused(room.for_blob), _refused(room.for_epochs)


def _refused(ask: Callable[[], None]) -> bool:
    try:
        ask()
    except Refused as refused:
        return (refused.status, refused.refusal.error) == (507, "storage")
    return False


@pytest.mark.parametrize(
    ("disk", "refused"),
    [
        (Disk(KEPT_BYTES_MAX), (False, False)),
        (Disk(KEPT_BYTES_MAX - 1), (True, False)),
        (Disk(KEPT_BYTES_MAX // EPOCHS_SHARE), (True, False)),
        (Disk(KEPT_BYTES_MAX // EPOCHS_SHARE - 1), (True, True)),
        (Disk(GIB // KEPT_SHARE, total=GIB), (False, False)),
        (Disk(GIB // KEPT_SHARE - 1, total=GIB), (True, False)),
        (Disk(0, total=0), (True, True)),
    ],
)
def test_blobs_are_refused_first_then_epochs(disk: Disk, refused: tuple[bool, bool]) -> None:
    assert refuses(Room([Path("log")], usage=lambda _: disk, clock_s=Clock())) == refused


def test_the_fullest_disk_counts_and_one_that_cannot_be_asked_does_not() -> None:
    disks = {Path("log"): Disk(50 * GIB), Path("blobs"): Disk(0)}
    assert refuses(Room(list(disks), usage=disks.__getitem__, clock_s=Clock())) == (True, True)

    def away(_: Path) -> Disk:
        raise OSError("no such disk")

    assert refuses(Room([Path("log")], usage=away, clock_s=Clock())) == (False, False)
    assert refuses(Room([], clock_s=Clock())) == (False, False)


def test_disks_are_looked_at_a_few_times_a_second_at_most() -> None:
    looks: list[Path] = []
    now_s = 0.0

    def usage(place: Path) -> Disk:
        looks.append(place)
        return Disk(50 * GIB)

    room = Room([Path("log")], usage=usage, clock_s=lambda: now_s)
    for _ in range(100):
        room.for_blob()
    assert len(looks) == 1
    now_s = LOOK_EVERY_S
    room.for_epochs()
    assert len(looks) == 2


@pytest.fixture
def disk() -> Disk:
    return Disk(50 * GIB)


@pytest.fixture
def client(tmp_path: Path, disk: Disk) -> Iterator[HubClient]:
    room = Room([tmp_path], usage=lambda _: disk, clock_s=Clock())
    with running_hub(tmp_path / "hub", room=room) as hub, contextlib.closing(HubClient(hub)) as client:
        yield client


def test_while_the_disk_is_nearly_full_nothing_comes_in_and_positions_are_still_taken(
    client: HubClient, disk: Disk
) -> None:
    node = Node(client)
    node.lease()
    node.put("a")
    disk.free = 1
    for ask in (lambda: node.put("b"), lambda: node.commit(entry(1, "a"))):
        with pytest.raises(HubAwayError, match="nearly full"):
            ask()
    client.consumer("p", "c", ConsumerPosition(streams={"s": {"n": 1}}))
    assert client.head("p", "n").epoch == 0
    disk.free = 50 * GIB
    node.put("b")
    assert node.commit(entry(1, "a", "b")).head == 1
