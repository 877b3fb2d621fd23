"""Operators beside one plain query over the same rows: a table, and JSON.

    uv run python bench/operators.py [--quick] [--only SECTION] [--json FILE]

Each operator is driven as a task of the edge engine drives it: batches of 64 Ki rows that are slightly out of order, a
watermark after each, a barrier with a snapshot every 16 batches. Its peer has all rows at once and does the work in one
query. Both have one thread; speed is by processor time, the sides in turn; the ratio is of the middle of each.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

# Before Polars is loaded: one thread for both sides.
os.environ.setdefault("POLARS_MAX_THREADS", "1")

from edge_size import SizeName
from operator_drive import drive
from operator_loads import LATE_US, LOADS, Load
from table import Finding, Target, machine, middle, number, show, show_missed, spread, write_json

SIZES = {"full": (8_000_000, 5), "quick": (2_000_000, 3), "tiny": (60_000, 1)}
"""Rows and repetitions."""


def measured(load: Load, rows: int, repetitions: int) -> list[Finding]:
    """The rows of the table: beside the quickest plain query, and beside each that is tuned."""
    inputs = load.rows(rows)
    count = sum(frame.height for frame in inputs)
    ours: list[float] = []
    theirs: dict[str, list[float]] = {name: [] for name in (*load.peers, *load.tuned)}
    out = 0
    for _ in range(repetitions):
        driven = drive(load.pipeline(), load.step, inputs, time_column="ts", late_us=LATE_US)
        ours.append(count / driven.cpu_seconds)
        out = driven.rows_out
        for name, peer in (load.peers | load.tuned).items():
            began = time.process_time()
            given = peer(inputs)
            theirs[name].append(count / (time.process_time() - began))
            if given != out and name not in load.other_windows:
                raise SystemExit(f"{load.section}: {load.case}: {out:,} rows came out, {given:,} of {name}")
    details = {"rows": count, "rows_out": out, "rows_per_s": ours, "peers_rows_per_s": theirs}
    speed = f"{number(middle(ours))} rows/s ({spread(ours)}), {number(out)} out"

    def finding(share: float, unit: str, target: Target | None, note: str) -> Finding:
        return Finding(
            section=load.section,
            case=load.case,
            measured=share,
            unit=unit,
            target=target,
            note=note,
            details=details,
        )

    if not theirs:
        return [finding(middle(ours), "rows/s", load.target, speed)]
    rates = {name: middle(found) for name, found in theirs.items()}
    best = max(load.peers, key=lambda name: rates[name])
    return [
        finding(
            middle(ours) / rates[name],
            f"of {name}",
            load.target if name == best else None,
            f"{speed}; {number(rates[name])} rows/s",
        )
        for name in (best, *load.tuned)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--quick", dest="size", action="store_const", const="quick", help="smaller and noisier")
    sizes.add_argument("--tiny", dest="size", action="store_const", const="tiny", help="only to see that it runs")
    sections = tuple(dict.fromkeys(load.section for load in LOADS))
    parser.add_argument("--only", action="append", choices=sections, metavar="SECTION", help=", ".join(sections))
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "operators.json")
    options = parser.parse_args()
    name: SizeName = options.size or "full"
    facts = machine()
    print(", ".join(f"{key} {value}" for key, value in facts.items()) + f"; size {name}\n")
    findings: list[Finding] = []
    for section in sections:
        if options.only is None or section in options.only:
            print(section, flush=True)
            loads = [load for load in LOADS if load.section == section]
            found = [finding for load in loads for finding in measured(load, *SIZES[name])]
            show(found)
            findings += found
            write_json(options.json, size=name, facts=facts, findings=findings)
    show_missed(findings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
