"""The options of commands and their help pages: how pipelines run, which options belong to one engine or to two tiers, where a hub is.

Defaults are written out, because the configurations that have them too (`edge.config`, `spark.config`) take too long to import for
`--help`; the tests compare them. A token is never given on the command line, where every user of the machine could read it: it is in
a file or in a variable.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
from click.core import ParameterSource

from fordstone.cli.errors import UsageError, wrong_usage
from fordstone.errors import FordstoneError

if TYPE_CHECKING:
    from fordstone.hub.client.address import HubAddress

HUB_VARIABLE: Final = "FORDSTONE_HUB"
TOKEN_VARIABLE: Final = "FORDSTONE_HUB_TOKEN"  # noqa: S105 - the name of a variable
TOKEN_FILE_VARIABLE: Final = "FORDSTONE_HUB_TOKEN_FILE"  # noqa: S105 - likewise
LOCAL_HUB: Final = "http://127.0.0.1:7411"
"""The default address of a hub."""
TOKEN_BYTES_MAX: Final = 4096
HUB: Final = frozenset({"hub_url", "token_file", "ca", "direct_blobs"})
"""The parameters of `hub_options`."""
OUTBOX: Final = frozenset({"outbox_max", "outbox_full", "hub_state", "take_over"})
"""The parameters of `outbox_options`."""
_GIVEN: Final = frozenset({ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT, ParameterSource.PROMPT})
_UNITS: Final = {"": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("kMGT", start=1)
    for unit, base in (("B", 1000), ("iB", 1024))
}
_F = TypeVar("_F", bound=Callable[..., Any])
_Decorator = Callable[[_F], _F]


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


def options_of(*options: _Decorator[Any]) -> _Decorator[Any]:
    """Several options as one decorator, in the order in which the help lists them."""

    def decorate(command: _F) -> _F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


_edge = partial(click.option, cls=EngineOption, engine="edge")
_spark = partial(click.option, cls=EngineOption, engine="spark")


def engine_option(help: str, **facts: Any) -> _Decorator[Any]:  # noqa: A002 - as Click names it
    """`--on`."""
    return click.option("--on", "engine", type=click.Choice(["edge", "spark"]), help=help, **facts)


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
verbose_option = click.option(
    "-v", "--verbose", count=True, show_default=False, help="Log more; give it twice to log everything."
)
bounded_option = click.option(
    "--bounded", is_flag=True, help="Stop when all input that exists now has been read, and close all windows."
)
available_now_option = click.option(
    "--available-now",
    is_flag=True,
    help="Read all input that exists now, keep windows open, and stop; the next run resumes.",
)
fresh_options = options_of(
    click.option(
        "--fresh",
        is_flag=True,
        help="Start over: set aside (rename) the state and the outputs of this pipeline first. Asks.",
    ),
    click.option("--yes", is_flag=True, help="With --fresh: do not ask."),
)

_interval = click.option(
    "--interval",
    metavar="SPAN",
    default="1s",
    help="Time between two checkpoints; on the edge, 'auto' chooses it by their cost.",
)
_allow_new_state = click.option(
    "--allow-new-state", is_flag=True, help="Resume although stateful steps changed; the state of those is dropped."
)
_discard_later_output = click.option(
    "--discard-later-output",
    is_flag=True,
    help="Set aside the epochs that sinks have beyond those of the state, as after the loss of a disk. Use it once.",
)
_batch_rows = click.option("--batch-rows", metavar="N", type=int, default=65_536, help="Rows read at a time.")

health_option = click.option(
    "--health",
    metavar="[HOST:]PORT",
    default=None,
    help="Answer GET /healthz and /readyz at this address, for probes. Without HOST, only this machine reaches it.  [default: off]",
)
state_option = click.option("--state", metavar="DIR", default="state", help="Directory for checkpoints.")


def node_option(more: str = "") -> _Decorator[Any]:
    """`--node`, with more help."""
    about = f"Name of the edge machine in the state directory.{more}"
    return click.option("--node", metavar="ID", default="node", help=about)


shared_options = options_of(
    _interval,
    _allow_new_state,
    _discard_later_output,
    _batch_rows,
    click.option(
        "--json",
        "as_json",
        is_flag=True,
        help="Print JSON lines to stdout: progress once a second, a report at the end.",
    ),
    verbose_option,
    click.option(
        "--logs",
        type=click.Choice(["text", "json"]),
        default="text",
        help="Format of log lines on stderr. With 'json', stderr has nothing else.",
    ),
    health_option,
    click.option("--progress-every", metavar="SPAN", default="60s", hidden=True, help="With --logs json."),
)

edge_options = options_of(
    _edge(
        "--parallelism",
        metavar="N",
        type=int,
        default=1,
        otherwise="On Spark, --master sets how many tasks run at once, as in --master 'local[4]'.",
        help="Subtasks per source and keyed step; may change between runs.",
    ),
    _edge(
        "--failure-every",
        metavar="SPAN",
        default="1d",
        otherwise="On Spark, --interval is a span.",
        help="For 'auto': the mean time between failures.",
    ),
    _edge(
        "--recovery-goal",
        metavar="SPAN",
        default=None,
        otherwise="On Spark, --interval is a span.",
        help="For 'auto': the maximum time to catch up after a failure.",
    ),
    _edge(
        "--checkpoint-timeout",
        metavar="SPAN",
        default="10m",
        otherwise="On Spark a batch has no timeout.",
        help="Time after which a checkpoint is given up and retried.",
    ),
    _edge(
        "--keep",
        metavar="N",
        type=int,
        default=3,
        otherwise="On Spark, --conf spark.sql.streaming.minBatchesToRetain=100 sets how much of its state is retained.",
        help="Number of checkpoints to retain.",
    ),
    _edge(
        "--compression",
        type=click.Choice(["lz4", "zstd", "none"]),
        default="lz4",
        otherwise="On Spark, --conf spark.io.compression.codec=zstd sets how state is compressed.",
        help="Compression of checkpoints.",
    ),
    _edge(
        "--state-max",
        "state_bytes_max",
        metavar="SIZE",
        default=None,
        callback=lambda context, option, value: None if value is None else size_of(value, "--state-max"),  # noqa: ARG005 - click's
        otherwise="On Spark, the memory of executors bounds the state: --memory.",
        help="Maximum size of the state: above it, only input that holds time back is read, and above 1.25 times of it nothing.  [default: half of the memory]",
    ),
    _edge(
        "--remote",
        metavar="URL",
        default=None,
        otherwise="On Spark, --state may be a URL that all executors reach.",
        help="Copy checkpoints there in the background (any fsspec URL).",
    ),
)

pipeline_options = options_of(_interval, _allow_new_state, _discard_later_output, _batch_rows, edge_options)
"""The options of pipelines on the edge, for a command that starts others."""

spark_options = options_of(
    _spark(
        "--master",
        metavar="URL",
        default=None,
        otherwise="The edge runs in this process; --parallelism sets how many tasks it has.",
        help="Where Spark runs: local[4], spark://host:7077 ...  [default: as SPARK_CONF_DIR or spark-submit say, "
        "else this machine]",
    ),
    _spark(
        "--memory",
        metavar="SIZE",
        default=None,
        otherwise="The edge has no such limit.",
        help="Memory of Spark on this machine, or of each executor on a cluster: 2g, 512m.",
    ),
    _spark(
        "--conf",
        "settings",
        metavar="NAME=VALUE",
        multiple=True,
        otherwise="It sets a Spark property.",
        help="A Spark property; may be given several times.",
    ),
    _spark(
        "--shards",
        metavar="N",
        type=int,
        default=None,
        otherwise="On the edge, --parallelism sets how many tasks share the keys.",
        help="Number of parts that keys are divided into; fixed for the lifetime of the state.  [default: the number of "
        "tasks that run at once]",
    ),
    _spark(
        "--rows-max",
        metavar="N",
        type=int,
        default=4_000_000,
        otherwise="On the edge, only --interval ends an epoch.",
        help="Approximate maximum of rows per source and epoch.",
    ),
    _spark(
        "--from-checkpoint",
        metavar="DIR",
        default=None,
        otherwise="The edge resumes from its --state.",
        help="Start with the state of an edge run, from its state directory.",
    ),
)


def _hub_options(*, default: str | None = None, kind: type[click.Option] = click.Option) -> _Decorator[Any]:
    return options_of(
        click.option(
            "--hub", "hub_url", cls=kind, metavar="URL", envvar=HUB_VARIABLE, default=default,
            help=f"Address of the hub, as in https://hub.example:7411; or the variable {HUB_VARIABLE}.",
        ),
        click.option(
            "--token-file", cls=kind, metavar="FILE", envvar=TOKEN_FILE_VARIABLE, default=None,
            help=f"File with the token that 'fordstone hub token add' printed; or the variable {TOKEN_VARIABLE}.",
        ),
        click.option(
            "--ca", cls=kind, metavar="FILE", default=None,
            help="Certificate authority of the hub, if it is not a public one.",
        ),
    )  # fmt: skip


def _direct_option(kind: type[click.Option] = click.Option) -> _Decorator[Any]:
    return click.option(
        "--direct-blobs/--no-direct-blobs", cls=kind, default=True,
        help="Whether to read rows where the hub says that they are stored, if that can be reached from here.",
    )  # fmt: skip


hub_options = options_of(_hub_options(), _direct_option())
"""`--hub`, `--token-file`, `--ca` and `--direct-blobs`; `address_of` makes an address of them."""
reader_options = _hub_options(default=LOCAL_HUB)
"""For commands that only read from a hub: by default the one on this machine."""
tier_hub_options = options_of(_hub_options(kind=TierOption), _direct_option(TierOption))
"""For commands that also run pipelines without a hub."""

from_earliest_option = click.option(
    "--from-earliest", cls=TierOption, is_flag=True,
    help="Begin with the earliest epochs that the hub keeps, although it has removed older ones: for a center without state.",
)  # fmt: skip
outbox_options = options_of(
    click.option(
        "--outbox-max", cls=TierOption, metavar="SIZE", default="10GiB",
        help="Maximum size of the epochs that wait on this disk for the hub: 500MB, 10GiB.",
    ),
    click.option(
        "--outbox-full", cls=TierOption, type=click.Choice(["block", "drop-oldest"]), default="block",
        help="What to do then: wait for the hub, or drop the oldest epochs, which at_most_once allows.",
    ),
    click.option(
        "--hub-state/--no-hub-state", cls=TierOption, default=True,
        help="Keep a copy of the newest checkpoint at the hub.",
    ),
    click.option(
        "--take-over", cls=TierOption, is_flag=True,
        help="Fence the process that ran this pipeline as this node before, and resume from its state: for a replacement machine.",
    ),
)  # fmt: skip


def address_of(
    hub_url: str | None,
    token_file: str | None,
    ca: str | None,
    *,
    direct_blobs: bool | None = None,
    why: str = "this command",
) -> HubAddress:
    """The hub's address. `why`: what needs a hub, for the error."""
    if hub_url is None:
        raise UsageError(f"{why} needs a hub: give --hub URL, or set {HUB_VARIABLE}. `fordstone hub` runs one.")
    from fordstone.hub.client.address import HubAddress

    if ca is not None and not Path(ca).is_file():
        raise UsageError(f"--ca {ca}: there is no such file.")
    with wrong_usage():
        return HubAddress(url=hub_url, token=_token(token_file), ca=ca, direct=direct_blobs is not False)


def _token(token_file: str | None) -> str | None:
    if token_file is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    try:
        with Path(token_file).open("rb") as file:
            text = file.read(TOKEN_BYTES_MAX).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--token-file {token_file}: cannot be read ({error}).") from error
    if not text:
        raise UsageError(
            f"--token-file {token_file}: the file is empty. Put the output of `fordstone hub token add` there."
        )
    return text


def outbox_of(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the options of the outbox from `options` and return them as `RunConfig` has them."""
    return {
        "outbox_bytes_max": size_of(options.pop("outbox_max"), "--outbox-max"),
        "outbox_full": options.pop("outbox_full").replace("-", "_"),
        "hub_state": options.pop("hub_state"),
        "take_over": options.pop("take_over"),
    }


def size_of(text: str, what: str) -> int:
    """Bytes, from `500MB` or `10GiB`."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKMGT]?i?B?)\s*", text)
    unit = "" if found is None else found[2].replace("K", "k")
    unit = unit if not unit or unit.endswith("B") else f"{unit}B"
    unit = "" if unit == "B" else unit
    if found is None or unit not in _UNITS or float(found[1]) <= 0:
        raise UsageError(f"{what} {text}: this is not a size. Write a number with a unit, such as 500MB or 10GiB.")
    return int(float(found[1]) * _UNITS[unit])


def node_of(name: str | None) -> str:
    """The node's name: the given one, or this machine's."""
    from fordstone.plan.ids import checked_name

    try:
        return checked_name(name if name is not None else socket.gethostname(), "node")
    except FordstoneError as error:
        more = "" if name is not None else " This is the machine's name; give another one with --node."
        raise UsageError(f"{error}{more}") from error


def is_given(context: click.Context, name: str) -> bool:
    """Whether an option was given, on the command line or by a variable, rather than left at its default."""
    return context.get_parameter_source(name) in _GIVEN


def is_typed(context: click.Context, name: str) -> bool:
    """Whether an option was given on the command line. A variable may be set for other commands."""
    return context.get_parameter_source(name) is ParameterSource.COMMANDLINE


def engine_options(context: click.Context, engine: str) -> dict[str, EngineOption]:
    """The options of a command that only this engine has, by name."""
    params = context.command.params
    return {one.name or "": one for one in params if isinstance(one, EngineOption) and one.engine == engine}


def reject_engine_options(context: click.Context, engine: str) -> None:
    """Reject options that were given and that the chosen engine does not have: they would be ignored silently."""
    other = "spark" if engine == "edge" else "edge"
    for name, option in engine_options(context, other).items():
        if is_given(context, name):
            raise UsageError(f"{option.opts[0]} goes with --on {other}, not with --on {engine}. {option.otherwise}")


def reject_tier_options(context: click.Context, allowed: frozenset[str], why: str) -> None:
    """Reject options of two tiers that were typed and would be ignored silently."""
    for option in context.command.params:
        name = option.name or ""
        if isinstance(option, TierOption) and name not in allowed and is_typed(context, name):
            raise UsageError(f"{option.opts[0]}: {why}")


def given_options(context: click.Context, names: frozenset[str]) -> list[str]:
    """Those of the named options that were given, as arguments of another command of ours."""
    words: list[str] = []
    for option in context.command.params:
        if not isinstance(option, click.Option) or option.name not in names or not is_given(context, option.name):
            continue
        value = context.params[option.name]
        if option.is_flag:
            words += [option.opts[0] if value else option.secondary_opts[0]]
        elif option.count:
            words += [option.opts[0]] * value
        elif option.multiple:
            words += [word for one in value for word in (option.opts[0], str(one))]
        elif value is not None:
            words += [option.opts[0], str(value)]
    return words
