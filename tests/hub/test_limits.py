"""Limits: rates, slots, and the space that lets a full hub still remove what was read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.hub.running import running_hub
from tests.hub.sending import Node, entry

from fordstone.errors import ConfigError, HubAwayError
from fordstone.hub.client.client import HubClient
from fordstone.hub.messages import ConsumerPosition, NodePosition, Rejection
from fordstone.hub.server.limits import (
    DISK_CHECK_INTERVAL_S,
    EPOCHS_SHARE,
    RESERVED_BYTES_MAX,
    RESERVED_SHARE,
    DiskQuota,
    Limits,
    RateLimiter,
    Slots,
)

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
        self.now_s += DISK_CHECK_INTERVAL_S
        return self.now_s


def refuses(quota: DiskQuota) -> tuple[bool, bool]:
    """Whether blobs, and epochs, are refused."""
    return _refused(quota.check_blob), _refused(quota.check_epochs)


def _refused(ask: Callable[[], None]) -> bool:
    try:
        ask()
    except Rejection as refused:
        return (refused.status, refused.refusal.error) == (507, "storage")
    return False


@pytest.mark.parametrize(
    ("disk", "refused"),
    [
        (Disk(RESERVED_BYTES_MAX), (False, False)),
        (Disk(RESERVED_BYTES_MAX - 1), (True, False)),
        (Disk(RESERVED_BYTES_MAX // EPOCHS_SHARE), (True, False)),
        (Disk(RESERVED_BYTES_MAX // EPOCHS_SHARE - 1), (True, True)),
        (Disk(GIB // RESERVED_SHARE, total=GIB), (False, False)),
        (Disk(GIB // RESERVED_SHARE - 1, total=GIB), (True, False)),
        (Disk(0, total=0), (True, True)),
    ],
)
def test_blobs_are_refused_first_then_epochs(disk: Disk, refused: tuple[bool, bool]) -> None:
    assert refuses(DiskQuota([Path("log")], usage=lambda _: disk, clock_s=Clock())) == refused


def test_the_fullest_disk_counts_and_one_that_cannot_be_asked_does_not() -> None:
    disks = {Path("log"): Disk(50 * GIB), Path("blobs"): Disk(0)}
    assert refuses(DiskQuota(list(disks), usage=disks.__getitem__, clock_s=Clock())) == (True, True)

    def away(_: Path) -> Disk:
        raise OSError("no such disk")

    assert refuses(DiskQuota([Path("log")], usage=away, clock_s=Clock())) == (False, False)
    assert refuses(DiskQuota([], clock_s=Clock())) == (False, False)


def test_disks_are_looked_at_a_few_times_a_second_at_most() -> None:
    looks: list[Path] = []
    now_s = 0.0

    def usage(place: Path) -> Disk:
        looks.append(place)
        return Disk(50 * GIB)

    quota = DiskQuota([Path("log")], usage=usage, clock_s=lambda: now_s)
    for _ in range(100):
        quota.check_blob()
    assert len(looks) == 1
    now_s = DISK_CHECK_INTERVAL_S
    quota.check_epochs()
    assert len(looks) == 2


@pytest.fixture
def disk() -> Disk:
    return Disk(50 * GIB)


@pytest.fixture
def client(tmp_path: Path, disk: Disk) -> Iterator[HubClient]:
    quota = DiskQuota([tmp_path], usage=lambda _: disk, clock_s=Clock())
    with running_hub(tmp_path / "hub", quota=quota) as hub, contextlib.closing(HubClient(hub)) as client:
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
    client.consumer("p", "c", ConsumerPosition(streams={"s": {"n": NodePosition()}}))
    assert client.head("p", "n").epoch == 0
    disk.free = 50 * GIB
    node.put("b")
    assert node.commit(entry(1, "a", "b")).head == 1


def test_callers_beyond_the_bound_are_forgotten_oldest_first():
    rates = RateLimiter(rate_per_s=1.0, burst=1.0, callers_max=2)
    assert [rates.take(caller, 0.0) for caller in "abc"] == [0.0, 0.0, 0.0]
    assert len(rates) == 2
    assert rates.take("c", 0.0) > 0
    assert rates.take("a", 0.0) == 0.0


def test_a_clock_that_goes_back_gives_no_requests_and_takes_none():
    rates = RateLimiter(rate_per_s=1.0, burst=2.0, callers_max=9)
    assert rates.take("a", 10.0) == 0.0
    assert rates.take("a", 5.0) == 0.0
    assert rates.take("a", 5.0) == pytest.approx(1.0)


def test_more_than_a_bucket_holds_is_granted_once_and_owed():
    rates = RateLimiter(rate_per_s=10.0, burst=100.0, callers_max=9)
    assert rates.take("a", 0.0, amount=300.0) == 0.0
    assert rates.take("a", 0.0) == pytest.approx(20.1)
    rates.correct("a", 0.0, amount=-250.0)
    assert rates.take("a", 0.0) == 0.0
    rates.correct("a", 0.0, amount=1000.0)
    assert rates.take("a", 0.0) > 90
    assert rates.take("a", 200.0) == 0.0


def test_slots_are_given_back_whatever_happens():
    slots = Slots(1, node_max=1)
    with contextlib.suppress(ValueError), slots.one() as inside:
        assert inside
        with slots.one() as second:
            assert not second
        assert slots.taken == 1
        raise ValueError("x")
    assert slots.taken == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"blob_bytes_max": 0},
        {"body_bytes_max": 1 << 40},
        {"rate_per_s": 0.0},
        {"rate_per_s": float("nan")},
        {"bytes_per_hour": 0},
    ],
)
def test_limits_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ConfigError):
        Limits(**wrong)
