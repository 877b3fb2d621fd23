"""Read the code blocks of a page and run them.

A page is run from top to bottom in an empty directory, with nothing of the repository in it. Whatever it has left running ends
with it:

- `python` runs in one namespace for the whole page. If its first line is a comment with a file's name (`# word_count.py`),
  the block is also saved under that name.
- `text` right below a `python` block is what that block prints.
- `console` holds commands after `$ ` (continued after `> `) and what they print; a command without output below it
  only has to end with 0. With `console ends 137` the last command must end with that code instead. A command of Fordstone
  that needs no shell runs in this process, and with its Spark, if it has one.

In expected output a line `...` stands for any lines, and `…` for any characters within a line.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tests.cli.place import commands as commands_in
from tests.guardian import VARIABLE
from tests.java_options import LAUNCHER, OPTIONS

from fordstone.connectors import registry
from fordstone.connectors.base import ConnectorKind

REPOSITORY = Path(__file__).resolve().parents[2]
KINDS = {"python", "console", "text", "json", "mermaid", "toml"}
COMMAND_SECONDS_MAX = 900
SERVED = {
    "docs/how-to/avro-and-protobuf.md",
    "docs/how-to/kafka.md",
    "docs/how-to/mqtt.md",
    "docs/how-to/postgresql.md",
    "docs/how-to/redis.md",
    "docs/how-to/s3-and-hdfs.md",
}
"""The pages that need a server, which `test_pages_with_services` starts."""
FROM_A_CHECKOUT = {"README.md", "CONTRIBUTING.md"}
"""The pages that may call the scripts of the repository."""
_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
_PLAIN = re.compile(r"fordstone (?!.*--help)[^|&;<>$*\\()`{}~\n]+")
"""A command that needs no shell, nor the width of the terminal, which click's runner does not tell."""
_SAVED = re.compile(r"# (?P<name>[\w./-]+\.py)\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block. `line` is where its first line of code stands in the page."""

    info: str
    body: str
    line: int
    printed: str | None = None
    """What the page says that it prints."""

    @property
    def kind(self) -> str:
        return self.info.split(" ")[0]

    @property
    def ends_with(self) -> int:
        """The exit code of the last command of a console block."""
        _, ends, code = self.info.partition(" ends ")
        return int(code) if ends else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command of a console block, and what is shown below it; None: nothing is."""

    text: str
    shown: str | None


def blocks_of(page: str) -> list[Block]:
    """The blocks of a page in order. A `text` block that shows what the one above prints is part of that one."""
    found: list[Block] = []
    end = 0
    for fence in _FENCE.finditer(page):
        between, end = page[end : fence.start()], fence.end()
        block = Block(info=fence["info"].strip(), body=fence["body"], line=page[: fence.start("body")].count("\n") + 1)
        if block.kind == "text" and found and found[-1].kind == "python" and not between.strip():
            above = found.pop()
            block = Block(info=above.info, body=above.body, line=above.line, printed=block.body)
        found.append(block)
    return found


def commands_of(body: str) -> list[Command]:
    """The commands of a console block."""
    commands: list[tuple[list[str], list[str]]] = []
    for line in body.splitlines():
        if line.startswith("$ "):
            commands.append(([line[2:]], []))
        elif not commands:
            raise ValueError(f"a console block begins with a command after '$ ', not with {line!r}")
        elif line.startswith("> ") and not commands[-1][1]:
            commands[-1][0].append(line[2:])
        else:
            commands[-1][1].append(line)
    return [Command(text="\n".join(text), shown="\n".join(shown) if shown else None) for text, shown in commands]


def fits(shown: str, printed: str) -> bool:
    """Whether what was printed is what the page shows, its wildcards considered."""
    pattern = ""
    for line in shown.strip("\n").splitlines():
        if line.strip() == "...":
            pattern += r"(?:[^\n]*\n)*?"
        else:
            pattern += re.escape(line.rstrip()).replace("…", r"[^\n]*?") + r"[ \t]*\n"
    return re.fullmatch(pattern, printed.strip("\n") + "\n") is not None


@dataclass(kw_only=True)
class Page:
    """Runs the blocks of one page in a directory. A context manager: what the page leaves running ends with it."""

    name: str
    directory: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    """What its commands find in addition."""
    namespace: dict[str, Any] = field(default_factory=lambda: {"__name__": "docs_page"})
    groups: list[int] = field(default_factory=list)
    """The process groups of its commands."""
    registered: dict[str, type[ConnectorKind]] = field(default_factory=dict)
    """The kinds of connectors that were there before: those of the page end with it."""

    def __enter__(self) -> Self:
        self.registered = dict(registry._REGISTERED)
        return self

    def __exit__(self, *failure: object) -> None:
        registry._REGISTERED.clear()
        registry._REGISTERED.update(self.registered)
        for group in self.groups:
            _end_group(group)

    def run_all(self, page: str) -> None:
        """Run all blocks of a page's text."""
        for block in blocks_of(page):
            self.run(block)

    def run(self, block: Block) -> None:
        """Run one block; raises `AssertionError` that names the page and line if it does not do what the page says."""
        if block.kind == "python":
            self._python(block)
        elif block.kind == "console":
            self._console(block)

    def _python(self, block: Block) -> None:
        saved = _SAVED.match(block.body)
        if saved is not None:
            (self.directory / saved["name"]).parent.mkdir(parents=True, exist_ok=True)
            (self.directory / saved["name"]).write_text(block.body)
        code = compile("\n" * (block.line - 1) + block.body, self.name, "exec")
        with contextlib.redirect_stdout(io.StringIO()) as out, _working_in(self.directory):
            exec(code, self.namespace)
        self._compare(block, block.printed, out.getvalue())

    def _console(self, block: Block) -> None:
        commands = commands_of(block.body)
        for command in commands:
            wanted = block.ends_with if command is commands[-1] else 0
            done = self._here if _PLAIN.fullmatch(command.text) else self._process
            text = _stand_in(command.text) if self.name in FROM_A_CHECKOUT else command.text
            code, printed = done(text)
            assert code == wanted, f"{self.name}:{block.line}: `{command.text}` ended with {code}:\n{printed}"
            self._compare(block, command.shown, printed)

    def _here(self, command: str) -> tuple[int, str]:
        """Run a command line in this process; return its exit code and what it printed."""
        words = shlex.split(command)
        with _working_in(self.directory), commands_in(self.directory, **self._environment()) as run:
            result = run(*words[1:])
        # A command ends by SystemExit; anything else is a bug of it.
        bug = result.exception if not isinstance(result.exception, SystemExit) else None
        return result.exit_code, result.output + "".join(traceback.format_exception(bug) if bug else ())

    def _process(self, command: str) -> tuple[int, str]:
        """Run a command in a shell; return its exit code and what it printed."""
        done = subprocess.Popen(
            ["bash", "-c", command],
            cwd=self.directory,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.groups.append(done.pid)
        try:
            printed = done.communicate(timeout=COMMAND_SECONDS_MAX)[0].decode()
        except subprocess.TimeoutExpired:
            _end_group(done.pid)
            raise
        # A shell that became the command dies of its signal; people see what a shell makes of that.
        return done.returncode if done.returncode >= 0 else 128 - done.returncode, printed

    def _environment(self) -> dict[str, str]:
        return _environment(self.directory) | dict(self.environment)

    def _compare(self, block: Block, shown: str | None, printed: str) -> None:
        if shown is not None:
            assert fits(shown, printed), f"{self.name}:{block.line} shows\n{shown}\nbut it prints\n{printed}"


def _end_group(pid: int) -> None:
    """End a command and all that it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


@contextlib.contextmanager
def _working_in(directory: Path) -> Iterator[None]:
    """Work in a directory whose modules can be imported; forget them afterwards, for the next page has others."""
    before, known = Path.cwd(), set(sys.modules)
    os.chdir(directory)
    sys.path.insert(0, str(directory))
    try:
        yield
    finally:
        sys.path.remove(str(directory))
        os.chdir(before)
        for name in set(sys.modules) - known:
            if str(getattr(sys.modules[name], "__file__", None)).startswith(str(directory)):
                del sys.modules[name]


def _environment(directory: Path) -> dict[str, str]:
    """What a command finds: this environment's programs, and nothing of the person who runs the tests."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    ours = {"PATH": path, "HOME": str(directory), "COLUMNS": "100", "LANG": "C.UTF-8", "TERM": "dumb", "NO_COLOR": "1"}
    # By this tag the guardian of the run finds what an interrupted run has left.
    return ours | {VARIABLE: os.environ[VARIABLE], LAUNCHER: OPTIONS}


def _stand_in(command: str) -> str:
    """The scripts set an environment up and then do this; the tests are the environment."""
    words = command.split()
    if words and words[0] == "./scripts/demo":
        return " ".join([sys.executable, str(REPOSITORY / "scripts" / "demo.py"), "--seconds", "1", *words[1:]])
    if words and words[0] == "./scripts/test":
        return "true"  # it is running: it runs this
    return command
