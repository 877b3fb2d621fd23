"""The hub beside what it is measured against: a table, and JSON.

    uv run python bench/hub.py [--quick] [--only SECTION] [--json FILE] [--directory DIR]

README.md beside this file says what each section measures. The hub is a process of its own, as `fordstone hub` starts it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import hub_intake
import hub_reading
from edge_size import SizeName
from hub_size import SIZES, Size
from table import Finding, machine, show, show_missed, write_json

Section = Callable[[Size, Path | None], list[Finding]]

SECTIONS: Mapping[str, Section] = {
    "commits": hub_intake.commits,
    "blobs": hub_intake.blobs,
    "spark": hub_reading.spark_reads,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--quick", dest="size", action="store_const", const="quick", help="smaller and noisier")
    sizes.add_argument("--tiny", dest="size", action="store_const", const="tiny", help="only to see that it runs")
    parser.add_argument("--only", action="append", choices=SECTIONS, metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "hub.json")
    parser.add_argument("--directory", type=Path, help="where hubs keep their data; a temporary one if left out")
    options = parser.parse_args()
    name: SizeName = options.size or "full"
    facts = machine()
    print(", ".join(f"{key} {value}" for key, value in facts.items()) + f"; size {name}\n")
    findings: list[Finding] = []
    for section, measure in SECTIONS.items():
        if options.only is None or section in options.only:
            print(section, flush=True)
            found = measure(SIZES[name], options.directory)
            show(found)
            findings += found
            # After each section: what was measured is not lost when a later one fails.
            write_json(options.json, size=name, facts=facts, findings=findings)
    show_missed(findings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
