"""What the soak says about memory and open files."""

from __future__ import annotations

import importlib
import os
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
        ((200, 220, 240, 260), (20, 20, 20, 20), True),
        ((200, 250, 320, 400), (20, 20, 20, 20), False),
        ((200, 200, 200, 200), (20, 30, 40, 50), False),
    ],
)
def test_a_process_that_grows_is_not_flat(memory: tuple[int, ...], files: tuple[int, ...], flat: bool, script: Any):
    soak, measured = script("soak"), script("soak_usage")
    usage = measured.Usage()
    usage.samples["hub"] = [
        measured.Sample(pid=1, memory_bytes=size * MIB, files=count) for size, count in zip(memory, files, strict=True)
    ]
    (growth,) = usage.growth()
    assert growth.flat(share=soak.GROWTH_MAX, spare_bytes=soak.SPARE_BYTES, spare_files=soak.SPARE_FILES) is flat


def test_only_the_newest_process_of_a_command_is_compared_with_itself(script: Any):
    measured = script("soak_usage")
    usage = measured.Usage()
    usage.samples["hub"] = [
        measured.Sample(pid=pid, memory_bytes=size * MIB, files=5) for pid, size in ((1, 50), (2, 900), (2, 900))
    ]
    (growth,) = usage.growth()
    assert (growth.memory_before, growth.memory_after, growth.samples) == (900 * MIB, 900 * MIB, 2)


def test_children_in_sessions_of_their_own_belong_to_the_family(script: Any):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as child:
        assert child.pid in script("soak_usage").family(os.getpid())
        child.communicate(b"\n")
