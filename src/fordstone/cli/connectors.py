"""`fordstone connectors`: what can be read from and written to, with which guarantee, and what it needs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

import click

from fordstone.cli.errors import UsageError
from fordstone.cli.loading import limit_polars
from fordstone.cli.options import HelpCommand
from fordstone.errors import ConfigError

if TYPE_CHECKING:
    from fordstone.connectors.base import About, ConnectorKind

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
            kind = kind_named(name)
            if kind.about is None:
                raise UsageError(f"connector {name!r} has no description.")
            click.echo(_described(name, kind, kind.about))
        except ConfigError as error:
            raise UsageError(str(error)) from error
        return
    rows = []
    for one in kinds():
        try:
            kind = kind_named(one)
            if kind.about is not None:
                rows.append(_row(one, kind, kind.about))
        except ConfigError as error:
            click.echo(f"warning: {error}", err=True)
    click.echo(_listed(rows))


def _row(name: str, kind: type[ConnectorKind], about: About) -> list[str]:
    needed = f"fordstone[{about.extra}]" if _missing(about) else ""
    return [name, *_deliveries(kind, about), needed, about.summary]


def _listed(rows: list[list[str]]) -> str:
    from fordstone.cli.format import Table

    head = ["connector", "source", "sink", "to install", "what it connects to"]
    return Table(head=head, rows=rows).text() + "\n\nfordstone connectors NAME describes one of them."


def _described(name: str, kind: type[ConnectorKind], about: About) -> str:
    source, sink = _deliveries(kind, about)
    lines = [f"{name}: {about.summary}", "", f"source  {source}", f"sink    {sink}", "", about.guarantee]
    if about.extra:
        state = "not installed" if _missing(about) else "installed"
        lines += ["", f"It needs {about.package} ({state}): pip install 'fordstone[{about.extra}]'"]
    module = "fordstone.connectors" if kind.__module__.startswith("fordstone.") else kind.__module__
    lines += ["", f"from {module} import {name}"] if name != "function" else [""]
    if about.source:
        lines.append(f'rows = p.source("rows", {about.source}, schema={{"device": "string"}})')
    if about.sink:
        lines.append(f'rows.sink("results", {about.sink})')
    if about.page:
        lines += ["", f"More: docs/{about.page}"]
    return "\n".join(lines)


def _deliveries(kind: type[ConnectorKind], about: About) -> tuple[str, str]:
    """What the examples of a source and of a sink give."""
    from fordstone.connectors.registry import sink_delivery, source_delivery

    source = source_delivery(example(about.source, kind)).value.replace("_", " ") if about.source else NOT_POSSIBLE
    sink = sink_delivery(example(about.sink, kind)).value.replace("_", " ") if about.sink else NOT_POSSIBLE
    return source, sink


def example(expression: str, kind: type[ConnectorKind]):  # type: ignore[no-untyped-def]  # ConnectorSpec, which --help does not wait for
    """The connector that an example of a kind makes. It may use our names, and those of the kind's module."""
    from fordstone import connectors as names
    from fordstone.connectors.base import ConnectorSpec
    from fordstone.connectors.function import function_sink

    known = dict(vars(names)) | vars(sys.modules.get(kind.__module__, names))
    try:
        made = eval(expression, known)  # noqa: S307 - a constant of an installed package
    except Exception as error:
        raise ConfigError(
            f"the example {expression!r} of {kind.__module__}.{kind.__name__} is wrong: {error}. Report it to the author of the package."
        ) from error
    return made if isinstance(made, ConnectorSpec) else function_sink(made)


def _missing(about: About) -> bool:
    from importlib.util import find_spec

    return any(find_spec(module) is None for module in about.modules)
