"""The options by which pipelines are run: those that both engines have, and those of one. Which command has which is here.

Defaults are written out, because the configurations that have them too (`edge.config`, `spark.config`) take too long to
import for `--help`; the tests compare them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import click
from click.core import ParameterSource

from fordstone.cli.errors import Misuse
from fordstone.cli.help import EngineOption

_F = TypeVar("_F", bound=Callable[..., Any])
_Decorator = Callable[[_F], _F]
_GIVEN: Final = frozenset({ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT, ParameterSource.PROMPT})


def _all(*options: _Decorator[Any]) -> _Decorator[Any]:
    """Several options as one decorator, in the order in which the help lists them."""

    def decorate(command: _F) -> _F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def _edge(*names: str, otherwise: str, **facts: Any) -> _Decorator[Any]:
    return click.option(*names, cls=EngineOption, engine="edge", otherwise=otherwise, **facts)


def _spark(*names: str, otherwise: str, **facts: Any) -> _Decorator[Any]:
    return click.option(*names, cls=EngineOption, engine="spark", otherwise=otherwise, **facts)


bounded_option = click.option("--bounded", is_flag=True, help="Stop when everything that is there now has been read.")

_interval = click.option(
    "--interval",
    metavar="SPAN",
    default="1s",
    show_default=True,
    help="Between two checkpoints; on the edge, 'auto' chooses it by their cost.",
)
_allow_new_state = click.option(
    "--allow-new-state", is_flag=True, help="Go on although stateful steps changed; the state of those is dropped."
)
_batch_rows = click.option(
    "--batch-rows", metavar="N", type=int, default=65_536, show_default=True, help="Rows read at a time."
)

shared_options = _all(
    click.option("--state", metavar="DIR", default="state", show_default=True, help="Where checkpoints are kept."),
    click.option(
        "--node",
        metavar="ID",
        default="node",
        show_default=True,
        help="The name of the edge machine in the state directory; with --part edge also at the hub, and this machine's own "
        "unless given.",
    ),
    _interval,
    _allow_new_state,
    _batch_rows,
    click.option(
        "--json",
        "as_json",
        is_flag=True,
        help="Print JSON lines to stdout: progress once a second, a report at the end.",
    ),
    click.option("-v", "--verbose", count=True, help="Log more; twice for everything."),
    click.option(
        "--logs",
        type=click.Choice(["text", "json"]),
        default="text",
        show_default=True,
        help="How log lines look on stderr; with 'json' there is nothing else on it.",
    ),
    click.option("--progress-every", metavar="SPAN", default="60s", hidden=True, help="With --logs json."),
)

edge_options = _all(
    _edge(
        "--parallelism",
        metavar="N",
        type=int,
        default=1,
        show_default=True,
        otherwise="On Spark, --master says how many tasks run at once, as in --master 'local[4]'.",
        help="Subtasks a keyed step and source; may change between runs.",
    ),
    _edge(
        "--failure-every",
        metavar="SPAN",
        default="1d",
        show_default=True,
        otherwise="On Spark the interval is what --interval says.",
        help="For 'auto': the mean time between failures.",
    ),
    _edge(
        "--recovery-goal",
        metavar="SPAN",
        default=None,
        otherwise="On Spark the interval is what --interval says.",
        help="For 'auto': in what time after a failure all should be as before.",
    ),
    _edge(
        "--checkpoint-timeout",
        metavar="SPAN",
        default="10m",
        show_default=True,
        otherwise="On Spark a batch takes as long as it takes.",
        help="After this a checkpoint is given up and tried anew.",
    ),
    _edge(
        "--keep",
        metavar="N",
        type=int,
        default=3,
        show_default=True,
        otherwise="On Spark, --conf spark.sql.streaming.minBatchesToRetain=100 says how much of its state is kept.",
        help="How many checkpoints are kept.",
    ),
    _edge(
        "--compression",
        type=click.Choice(["lz4", "zstd", "none"]),
        default="lz4",
        show_default=True,
        otherwise="On Spark, --conf spark.io.compression.codec=zstd says how state is compressed.",
        help="Of what is stored.",
    ),
    _edge(
        "--remote",
        metavar="URL",
        default=None,
        otherwise="On Spark, --state may be a URL that all executors reach.",
        help="Copy checkpoints there in the background (any fsspec URL).",
    ),
)

pipeline_options = _all(_interval, _allow_new_state, _batch_rows, edge_options)
"""How pipelines are run on the edge, for a command that starts others."""

spark_options = _all(
    _spark(
        "--master",
        metavar="URL",
        default=None,
        otherwise="The edge runs in this process; --parallelism says how many tasks it has.",
        help="Where Spark runs: local[4], spark://host:7077 ...  [default: what SPARK_CONF_DIR or spark-submit says, "
        "else this machine]",
    ),
    _spark(
        "--memory",
        metavar="SIZE",
        default=None,
        otherwise="The edge takes what its state needs.",
        help="Of Spark here, or on a cluster of each executor: 2g, 512m.",
    ),
    _spark(
        "--conf",
        "settings",
        metavar="NAME=VALUE",
        multiple=True,
        otherwise="Those are settings of Spark's.",
        help="A setting of Spark's; may be given several times.",
    ),
    _spark(
        "--shards",
        metavar="N",
        type=int,
        default=None,
        otherwise="On the edge, --parallelism says how many tasks share the keys.",
        help="Into how many parts keys are divided, for as long as the state lives.  [default: as many as tasks run "
        "at once]",
    ),
    _spark(
        "--rows-max",
        metavar="N",
        type=int,
        default=4_000_000,
        show_default=True,
        otherwise="On the edge, --interval alone cuts epochs.",
        help="About how many rows of each source an epoch has at most.",
    ),
    _spark(
        "--available-now",
        is_flag=True,
        otherwise="On the edge, --bounded reads what is there.",
        help="Read what is there now, keep the state, and stop: the next run goes on.",
    ),
    _spark(
        "--from-checkpoint",
        metavar="DIR",
        default=None,
        otherwise="The edge goes on from what is in its --state.",
        help="Begin with the state that an edge has left in this state directory.",
    ),
)


def refuse_others(context: click.Context, engine: str) -> None:
    """Refuse options that were given and that the chosen engine does not have: they would be dropped silently."""
    for option in context.command.params:
        if not isinstance(option, EngineOption) or option.engine == engine or option.name is None:
            continue
        if context.get_parameter_source(option.name) in _GIVEN:
            raise Misuse(f"{option.opts[0]} goes with --on {option.engine}, not with --on {engine}. {option.otherwise}")
