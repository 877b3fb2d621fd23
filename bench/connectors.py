"""Connectors beside the bare client libraries, with real servers: how much of their speed is left.

    uv run python bench/connectors.py               # everything
    uv run python bench/connectors.py --quick       # smaller and noisier
    uv run python bench/connectors.py --only kafka  # one section; may be given several times

A connector adds its section to `SECTIONS`. Servers are those of the tests, and come from package registries when they are first needed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("POLARS_MAX_THREADS", "1")  # as on the edge, whose tasks are the threads

from connectors_kafka import kafka  # noqa: E402 - the tests' servers are found through the path above
from table import Finding, machine, show, show_missed, write_json  # noqa: E402 - likewise

Section = Callable[[Path, bool], list[Finding]]
"""A section gets a directory of its own, and whether it should be quick."""
SECTIONS: Final[dict[str, Section]] = {"kafka": kafka}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", action="append", choices=sorted(SECTIONS))
    parser.add_argument("--json", type=Path, default=ROOT / "bench" / "results" / "connectors.json")
    given = parser.parse_args()
    findings: list[Finding] = []
    facts = machine()
    for name in given.only or SECTIONS:
        print(name, flush=True)
        with tempfile.TemporaryDirectory() as directory:
            found = SECTIONS[name](Path(directory), given.quick)
        show(found)
        findings += found
    show_missed(findings)
    write_json(given.json, size="quick" if given.quick else "full", facts=facts, findings=findings)


if __name__ == "__main__":
    main()
