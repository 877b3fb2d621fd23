"""Write what each command's --help prints into docs/reference/cli.md and hub.md. The tests compare the two.

python scripts/cli_help.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PAGES = [Path(__file__).resolve().parent.parent / "docs" / "reference" / name for name in ("cli.md", "hub.md")]
_BLOCK = re.compile(r"```console\n\$ (?P<command>[^\n]+ --help)\n.*?```", re.DOTALL)


def block_of(found: re.Match[str]) -> str:
    """The block with what its command prints now, on a terminal of 100 columns."""
    program, *arguments = found["command"].split()
    command = [str(Path(sys.executable).with_name(program)), *arguments]
    environment = os.environ | {"COLUMNS": "100", "NO_COLOR": "1"}
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    lines = "\n".join(line.rstrip() for line in printed.rstrip().splitlines())
    return f"```console\n$ {found['command']}\n{lines}\n```"


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(_BLOCK.sub(block_of, page.read_text()))
