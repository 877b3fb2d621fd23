"""Commands of our own as child processes: the words to start them by, and what they say, passed on."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from fordstone.cli.logs import json_line

if TYPE_CHECKING:
    from fordstone.edge.child_process import OnLine
    from fordstone.edge.supervisor import Process, Spawn

# -P: the working directory is not to be searched for modules, as it is not when the script is called.
_FORDSTONE: Final = ("-P", "-c", "from fordstone.cli.main import main; main()")


def command(*words: str) -> tuple[str, ...]:
    """`fordstone` with these words, on the Python that runs now."""
    return (sys.executable, *_FORDSTONE, *words)


def spawning(on_line: OnLine, *, catch_out: bool) -> Spawn:
    """How a supervisor starts children whose lines go to `on_line`."""
    from fordstone.edge.child_process import ChildProcess

    def spawn(name: str, words: Sequence[str]) -> Process:
        return ChildProcess(name, words, on_line=on_line, catch_out=catch_out)

    return spawn


def event_of(text: str) -> dict[str, Any] | None:
    """The JSON object of a line; None if it is anything else."""
    if not text.startswith("{"):
        return None
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def passed_on(name: str, text: str) -> str:
    """A log line of a child's as one of ours. What is no log line, such as a traceback, becomes one."""
    found = event_of(text)
    if found is not None and "event" in found and "level" in found:
        return text if "pipeline" in found else json.dumps(found | {"pipeline": name}, ensure_ascii=False)
    return json_line("ERROR", "said", {"pipeline": name, "text": text}, at_s=time.time())
