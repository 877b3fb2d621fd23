"""Help that teaches: commands whose `--help` ends with examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

EXIT_CODES = "Exit codes: 0 done or stopped cleanly, 1 failed, 2 the command was misused."


class TaughtCommand(click.Command):
    """A command with examples."""

    def __init__(self, *args: Any, examples: Sequence[str] = (), **kwargs: Any) -> None:
        kwargs.setdefault("epilog", EXIT_CODES)
        super().__init__(*args, **kwargs)
        self.examples = tuple(examples)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The examples, then the rest."""
        write_examples(self.examples, formatter)
        super().format_epilog(ctx, formatter)


class TaughtGroup(click.Group):
    """A group of commands with examples."""

    command_class = TaughtCommand

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order in which one needs them, not by name."""
        del ctx
        return list(self.commands)

    def __init__(self, *args: Any, examples: Sequence[str] = (), **kwargs: Any) -> None:
        kwargs.setdefault("epilog", EXIT_CODES)
        super().__init__(*args, **kwargs)
        self.examples = tuple(examples)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The examples, then the rest."""
        write_examples(self.examples, formatter)
        super().format_epilog(ctx, formatter)


def write_examples(examples: Sequence[str], formatter: click.HelpFormatter) -> None:
    """Each on a line of its own, however long, so that it can be copied."""
    with formatter.section("Examples"):
        for example in examples:
            formatter.write(f"{'':{formatter.current_indent}}{example}\n")
