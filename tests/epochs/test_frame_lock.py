"""Writing a run must not lock the frame against those who look at it: with the interpreter between them, both wait for ever."""

from __future__ import annotations

import subprocess
import sys

import pytest

# What another thread might do in the middle of the write is done here by the write itself; a lock held on the frame
# then never comes free, which takes the whole process with it: so it is a process of its own.
SCRIPT = """
import io, sys
import polars as pl
from fordstone.epochs import run_file

frame = pl.DataFrame({"k": range(int(sys.argv[1]))})
looked = []

class Looking(io.BytesIO):
    def write(self, data):
        looked.append(frame.estimated_size())
        return super().write(data)

run_file.io.BytesIO = Looking
run_file.encode_run(frame, "lz4")
assert looked
"""


@pytest.mark.parametrize("rows", [100, 100_000], ids=["stream format", "file format"])
def test_a_frame_can_be_looked_at_while_it_is_written(rows: int):
    subprocess.run([sys.executable, "-c", SCRIPT, str(rows)], check=True, timeout=600)
