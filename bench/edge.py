"""The edge engine beside what it is measured against: a table, and JSON.

    uv run python bench/edge.py [--quick] [--only SECTION] [--json FILE] [--directory DIR] [--profile]

README.md beside this file says what each section measures. Ratios come from one run, A and B in turn.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import edge_node
import edge_throughput
from edge_size import SIZES, Size, SizeName
from table import Finding, machine, show, show_missed, write_json
from worker import ask_once

Section = Callable[[Size, str | None], list[Finding]]

SECTIONS: Mapping[str, Section] = {
    "tumbling": edge_throughput.tumbling,
    "checkpoint_cost": edge_throughput.checkpoint_cost,
    "pause": edge_node.pause,
    "restore": edge_node.restore,
    "latency": edge_node.latency,
    "memory": edge_node.memory,
    "startup": edge_node.startup,
}
PLACES_SHOWN = 25


def profile(size: Size, directory: str | None) -> None:
    """Show where the threads of the tumbling aggregate spend their time."""
    for parallelism in (1, edge_throughput.CORES):
        found = ask_once(
            "edge_loads.tumbling_run",
            rows=size.tumbling_rows,
            keys=1_000,
            batch_rows=size.batch_rows,
            parallelism=parallelism,
            interval="1s",
            directory=directory,
            sampled=True,
        )
        print(f"tumbling, parallelism {parallelism}: {found['seconds']:.2f} s; share of that time, by thread and place")
        for sample in found["samples"][:PLACES_SHOWN]:
            print(f"  {100 * sample['share']:5.1f} %  {sample['thread']:32} {sample['place']}")
        print()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument(
        "--quick", dest="size", action="store_const", const="quick", help="smaller and noisier, a few minutes"
    )
    sizes.add_argument("--tiny", dest="size", action="store_const", const="tiny", help="only to see that it runs")
    parser.add_argument("--only", action="append", choices=SECTIONS, metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "edge.json")
    parser.add_argument("--directory", help="where state is written; the system's temporary directory if left out")
    parser.add_argument(
        "--profile", action="store_true", help="show where the tumbling aggregate spends its time, and stop"
    )
    options = parser.parse_args()
    name: SizeName = options.size or "full"
    size = SIZES[name]
    if options.profile:
        profile(size, options.directory)
        return 0
    facts = machine()
    print(", ".join(f"{key} {value}" for key, value in facts.items()) + f"; size {name}\n")
    findings: list[Finding] = []
    for section, measure in SECTIONS.items():
        if options.only is None or section in options.only:
            print(section, flush=True)
            found = measure(size, options.directory)
            show(found)
            findings += found
            # After each section: what was measured is not lost when a later one fails.
            write_json(options.json, size=name, facts=facts, findings=findings)
    show_missed(findings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
