"""Help pages: commands whose `--help` ends with examples, and lists the options of an engine and of two tiers apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

EXIT_CODES = "Exit codes: 0 finished or stopped cleanly, 1 failed, 2 wrong usage."
FENCED_CODE = "3 with a hub: another process has taken the pipeline over."
TIERS_TITLE = "Options of two tiers"


class EngineOption(click.Option):
    """An option that only one engine has."""

    def __init__(self, *args: Any, engine: str, otherwise: str = "", **kwargs: Any) -> None:
        """`otherwise`: a sentence that says what to do instead on the other engine."""
        super().__init__(*args, **kwargs)
        self.engine = engine
        self.otherwise = otherwise


class TierOption(click.Option):
    """An option that only a pipeline of two tiers has."""


class _Examples(click.Command):
    """A command whose help ends with examples and exit codes."""

    def __init__(self, *args: Any, examples: Sequence[str] = (), **kwargs: Any) -> None:
        kwargs.setdefault("epilog", EXIT_CODES)
        super().__init__(*args, **kwargs)
        self.examples = tuple(examples)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each example on one line, however long, so that it can be copied; then the epilog."""
        with formatter.section("Examples"):
            for example in self.examples:
                formatter.write(f"{'':{formatter.current_indent}}{example}\n")
        super().format_epilog(ctx, formatter)


class HelpCommand(_Examples):
    """A command with examples, and with sections of options."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options that always apply, then those of each engine and of two tiers."""
        has_engines = any(one.name == "engine" for one in self.params)
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        for option in self.get_params(ctx):
            record = option.get_help_record(ctx) if isinstance(option, click.Option) else None
            if record is None:
                continue
            title = "Options"
            if has_engines and isinstance(option, EngineOption):
                title = f"Options with --on {option.engine}"
            elif has_engines and isinstance(option, TierOption):
                title = TIERS_TITLE
            sections.setdefault(title, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


class HelpGroup(_Examples, click.Group):
    """A group of commands with examples, listed in the order in which one needs them."""

    command_class = HelpCommand

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(self.commands)
