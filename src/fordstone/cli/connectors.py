"""`fordstone connectors`: what can be read from and written to, with which guarantee, and what it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from fordstone.cli.errors import UsageError
from fordstone.cli.loading import limit_polars
from fordstone.cli.options import HelpCommand
from fordstone.errors import ConfigError

if TYPE_CHECKING:
    from fordstone.connectors.base import About

NOT_POSSIBLE: Final = "-"


@click.command(
    cls=HelpCommand,
    examples=[
        "fordstone connectors         all connectors, with their guarantees",
        "fordstone connectors delta   what one of them needs and promises, with an example",
    ],
)
@click.argument("name", required=False)
def connectors(name: str | None) -> None:
    """List the connectors that are installed, or describe one.

    A guarantee is the strongest that a source or a sink can give. The guarantee of a pipeline is that of its weakest part:
    `fordstone explain` shows it.
    """
    limit_polars(1)
    from fordstone.connectors.registry import kind_named, kinds

    if name is not None:
        try:
            about = kind_named(name).about
        except ConfigError as error:
            raise UsageError(str(error)) from error
        if about is None:
            raise UsageError(f"connector {name!r} has no description.")
        click.echo(_described(name, about))
        return
    listed = []
    for kind in kinds():
        try:
            about = kind_named(kind).about
        except ConfigError as error:
            click.echo(f"warning: {error}", err=True)
            continue
        if about is not None:
            listed.append((kind, about))
    click.echo(_listed(listed))


def _listed(found: list[tuple[str, About]]) -> str:
    from fordstone.cli.format import Table

    head = ["connector", "source", "sink", "to install", "what it connects to"]
    rows = [
        [name, *_deliveries(about), f"fordstone[{about.extra}]" if _missing(about) else "", about.summary]
        for name, about in found
    ]
    return Table(head=head, rows=rows).text() + "\n\nfordstone connectors NAME describes one of them."


def _described(name: str, about: About) -> str:
    source, sink = _deliveries(about)
    lines = [f"{name}: {about.summary}", "", f"source  {source}", f"sink    {sink}", "", about.guarantee]
    if about.extra:
        state = "not installed" if _missing(about) else "installed"
        lines += ["", f"It needs {about.package} ({state}): pip install 'fordstone[{about.extra}]'"]
    lines += ["", "from fordstone.connectors import " + name] if name != "function" else [""]
    if about.source:
        lines.append(f'rows = p.source("rows", {about.source}, schema={{"device": "string"}})')
    if about.sink:
        lines.append(f'rows.sink("results", {about.sink})')
    if about.page:
        lines += ["", f"More: docs/{about.page}"]
    return "\n".join(lines)


def _deliveries(about: About) -> tuple[str, str]:
    """What the examples of a source and of a sink give."""
    from fordstone.connectors.registry import sink_delivery, source_delivery

    source = source_delivery(example(about.source)).value.replace("_", " ") if about.source else NOT_POSSIBLE
    sink = sink_delivery(example(about.sink)).value.replace("_", " ") if about.sink else NOT_POSSIBLE
    return source, sink


def example(expression: str):  # type: ignore[no-untyped-def]  # ConnectorSpec, which --help does not wait for
    """The connector that an example makes."""
    from fordstone import connectors as names
    from fordstone.connectors.base import ConnectorSpec
    from fordstone.connectors.function import function_sink

    made = eval(expression, dict(vars(names)))  # noqa: S307 - a constant of an installed package
    return made if isinstance(made, ConnectorSpec) else function_sink(made)


def _missing(about: About) -> bool:
    from importlib.util import find_spec

    return any(find_spec(module) is None for module in about.modules)
