"""Help that teaches: commands whose `--help` ends with examples, and lists an engine's options apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import click

EXIT_CODES = "Exit codes: 0 done or stopped cleanly, 1 failed, 2 the command was misused."
FENCED_CODE = "3 with a hub: another holder has taken the pipeline over."
TIERS_TITLE = "Options of two tiers"


class EngineOption(click.Option):
    """An option that only one engine has."""

    def __init__(self, *args: Any, engine: str, otherwise: str = "", **kwargs: Any) -> None:
        """`otherwise`: what to do instead on the other engine, as a sentence."""
        super().__init__(*args, **kwargs)
        self.engine = engine
        self.otherwise = otherwise


class TierOption(click.Option):
    """An option that only a pipeline of two tiers has."""


class TaughtCommand(click.Command):
    """A command with examples."""

    def __init__(self, *args: Any, examples: Sequence[str] = (), **kwargs: Any) -> None:
        kwargs.setdefault("epilog", EXIT_CODES)
        super().__init__(*args, **kwargs)
        self.examples = tuple(examples)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Those that always hold, then those of each engine."""
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        for option in self.get_params(ctx):
            record = option.get_help_record(ctx) if isinstance(option, click.Option) else None
            if record is not None:
                title = f"Options with --on {option.engine}" if _of_one_engine(option, self) else "Options"
                title = TIERS_TITLE if isinstance(option, TierOption) and _can_choose(self) else title
                sections.setdefault(title, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)

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


def _of_one_engine(option: click.Parameter, command: click.Command) -> TypeGuard[EngineOption]:
    """Whether the option holds for one engine only, in a command that can choose."""
    return isinstance(option, EngineOption) and _can_choose(command)


def _can_choose(command: click.Command) -> bool:
    return any(one.name == "engine" for one in command.params)


def write_examples(examples: Sequence[str], formatter: click.HelpFormatter) -> None:
    """Each on a line of its own, however long, so that it can be copied."""
    with formatter.section("Examples"):
        for example in examples:
            formatter.write(f"{'':{formatter.current_indent}}{example}\n")
