"""What the soak says about memory and open files."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MIB = 1 << 20
SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module


@pytest.mark.parametrize(
    ("memory", "files", "flat"),
    [
        ((200, 200, 201, 199), (20, 20, 21, 20), True),
        ((200, 210, 220, 230), (20, 20, 20, 20), True),
        ((200, 220, 240, 260), (20, 20, 20, 20), False),
        ((200, 200, 200, 200), (20, 30, 40, 50), False),
    ],
)
def test_a_process_that_grows_is_not_flat(memory: tuple[int, ...], files: tuple[int, ...], flat: bool, script: Any):
    soak, measured = script("soak"), script("soak_usage")
    usage = measured.Usage()
    warm = measured.WARM_UP_SECONDS
    usage.samples["hub"] = [measured.Sample(pid=1, at_s=0.0, memory_bytes=MIB, files=1)] + [
        measured.Sample(pid=1, at_s=warm + number, memory_bytes=size * MIB, files=count)
        for number, (size, count) in enumerate(zip(sorted(memory * 2), sorted(files * 2), strict=True))
    ]
    (growth,) = usage.growth()
    assert growth.judged
    assert (growth.mib_per_hour > 10_000) is (memory[-1] - memory[0] > 20)
    assert growth.flat(share=soak.GROWTH_MAX, spare_bytes=soak.SPARE_BYTES, spare_files=soak.SPARE_FILES) is flat


@pytest.mark.parametrize(("memory_mib", "flat"), [(140, True), (170, False)])
def test_a_hub_may_take_memory_for_pages_of_its_log(memory_mib: int, flat: bool, script: Any):
    grown = script("soak_usage").Growth(
        name="the hub",
        memory_before=96 * MIB,
        memory_after=memory_mib * MIB,
        memory_peak=memory_mib * MIB,
        files_before=30,
        files_after=30,
        minutes=15.0,
        mib_per_hour=100.0,
        judged=True,
    )
    describe = script("soak").describe
    assert describe(grown, cache_bytes=30 * MIB) is flat
    assert not describe(grown)


def test_java_may_fill_its_heap_but_not_open_ever_more_files(script: Any):
    measured = script("soak_usage")
    usage = measured.Usage()

    def grown(name: str, files: int) -> bool:
        usage.samples = {
            name: [
                measured.Sample(pid=1, at_s=at_s, memory_bytes=int(100 + at_s) * MIB, files=20 + number * files)
                for number, at_s in enumerate(range(0, 600, 20))
            ]
        }
        (growth,) = usage.growth()
        return bool(growth.flat(share=1.1, spare_bytes=24 * MIB, spare_files=16))

    assert grown(f"the center{measured.OF_JAVA}", files=0)
    assert not grown(f"the center{measured.OF_JAVA}", files=5)
    assert not grown("the center", files=0)


def test_only_the_newest_process_of_a_command_is_compared_with_itself(script: Any):
    measured = script("soak_usage")
    usage = measured.Usage()
    usage.samples["hub"] = [
        measured.Sample(pid=pid, at_s=at_s, memory_bytes=size * MIB, files=5)
        for pid, at_s, size in ((1, 0.0, 50), (2, 5.0, 900), (2, 10.0, 900))
    ]
    (growth,) = usage.growth()
    assert (growth.memory_before, growth.memory_after) == (900 * MIB, 900 * MIB)
    assert not growth.judged


def test_a_soak_without_one_of_its_kinds_of_fault_is_not_good(script: Any):
    faults = {"kill the hub": 1, "kill gateway-2": 3, "cut gateway-1": 2, "pause the center": 1}
    missing = script("soak").missing_faults
    assert missing(faults, ["the hub", "the center"]) == ["kill the center"]
    assert missing(faults | {"kill the center": 1}, ["the hub", "the center"]) == []


@pytest.mark.slow
def test_a_short_soak_loses_and_doubles_nothing(tmp_path: Path):
    done = subprocess.run(
        [
            sys.executable,
            str(SCRIPTS / "soak.py"),
            "--minutes",
            "0.5",
            "--center",
            "local",
            "--devices",
            "10",
            "--seed",
            "7",
            "--out",
            str(tmp_path / "soak"),
        ],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 lost, 0 doubled, 0 late" in done.stdout


SHORT_OVERLOAD = """
import sys
import soak

soak.OUTBOX_MAX, soak.LEVEL_SECONDS = sys.argv.pop(1), 10.0
make_fleet = soak.make_fleet


def make_fleet_that_logs_often(*arguments, **options):
    fleet = make_fleet(*arguments, **options)
    for gateway in fleet.gateways:
        _, *words = gateway.command._arguments
        gateway.command._arguments = ("run", *words, "--part", "edge", "--logs", "json", "--progress-every", "1s")
    return fleet


soak.make_fleet = make_fleet_that_logs_often
sys.exit(soak.main())
"""
"""The soak with outboxes of the given size, small enough to be full after seconds. The gateways run without their agent, which logs once
per minute whether the outbox is full."""


@pytest.mark.slow
def test_a_short_overload_fills_every_outbox_and_loses_and_doubles_nothing(tmp_path: Path):
    options = "--overload --minutes 0.4 --center local --devices 10 --rate 100 --seed 7"
    done = subprocess.run(
        [sys.executable, "-c", SHORT_OVERLOAD, "100kB", *options.split(), "--out", str(tmp_path / "soak")],
        cwd=SCRIPTS,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 lost, 0 doubled, 0 late" in done.stdout
    assert "outboxes: 3 of 3 were full." in done.stdout
    recovery = re.search(
        r"full\. ([\d,]+) rows waited; level again after \d+ s, ([\d,]+) rows/s$", done.stdout, re.MULTILINE
    )
    assert recovery is not None, done.stdout
    waited, per_second = (int(number.replace(",", "")) for number in recovery.groups())
    assert waited > 10_000
    assert per_second > 0
    assert "All of it is right." in done.stdout


def test_children_in_sessions_of_their_own_belong_to_the_family(script: Any):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as child:
        assert child.pid in script("soak_usage").family(os.getpid())
        child.communicate(b"\n")
