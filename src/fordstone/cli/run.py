"""`fordstone run` and `fordstone center`: run a pipeline until its input ends or a signal stops it, on the edge engine or on Spark.

A pipeline of two tiers runs as several processes (`cli.tiers`), unless `--part` or `center` selects one half. Spark takes some seconds
to start, so what can be checked without it is checked first. Spark is started here and not by the engine: its settings are the
command's, and it replaces the handler of SIGINT, which the engine then replaces by its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, Final, Literal

import click

from fordstone.cli.errors import UsageError, wrong_usage
from fordstone.cli.fresh import check_yes, confirm_fresh
from fordstone.cli.loading import file_of, limit_polars, load_pipeline, trim_memory
from fordstone.cli.logs import add_log_fields, configure_logging
from fordstone.cli.options import (
    EXIT_CODES,
    FENCED_CODE,
    HUB,
    OUTBOX,
    HelpCommand,
    TierOption,
    address_of,
    available_now_option,
    bounded_option,
    edge_options,
    engine_option,
    engine_options,
    fresh_options,
    from_earliest_option,
    is_given,
    node_of,
    node_option,
    outbox_of,
    outbox_options,
    reject_engine_options,
    reject_tier_options,
    shared_options,
    spark_options,
    state_option,
    tier_hub_options,
)
from fordstone.cli.view.view import make_view, run_shown

if TYPE_CHECKING:
    from fordstone.api.pipeline import Pipeline
    from fordstone.edge.config import RunConfig
    from fordstone.hub.client.address import HubAddress
    from fordstone.plan.plan import Plan
    from fordstone.protocol.progress import Progress, Report
    from fordstone.runtime.health import PipelineWatch
    from fordstone.spark.config import SparkConfig

Part = Literal["edge", "center"]
CENTER_NODE: Final = "center"
HEALTH_TIMEOUT_S: Final = 5.0
STARTING_SPARK: Final = "starting Spark ..."
_SPARK_LOG_LEVELS: Final = ("OFF", "WARN", "INFO")


@click.command(
    cls=HelpCommand,
    epilog=f"{EXIT_CODES} {FENCED_CODE}",
    examples=[
        "fordstone run cold_chain.py --bounded",
        "fordstone run cold_chain.py --available-now        as often as you like: each run reads what is new",
        "fordstone run cold_chain.py --state /var/lib/cold-chain --interval auto --recovery-goal 10s",
        "fordstone run pipelines.py:cold_chain --parallelism 4 --json",
        "fordstone run cold_chain.py --on spark --bounded",
        "fordstone run cold_chain.py --on spark --state /srv/center --from-checkpoint /var/lib/cold-chain",
        "fordstone run cold_chain.py --center local         two tiers, without a JVM",
        "fordstone run cold_chain.py --part edge --hub https://hub.example:7411 --token-file token",
    ],
)
@click.argument("file", metavar="FILE[:NAME]")
@engine_option("The engine: this process, or Spark. The results are the same.", default="edge")
@bounded_option
@available_now_option
@fresh_options
@state_option
@node_option(" With --part edge also its name at the hub, by default this machine's name.")
@shared_options
@edge_options
@spark_options
@click.option(
    "--center",
    "center_on",
    cls=TierOption,
    type=click.Choice(["spark", "local"]),
    default="spark",
    help="The center's engine when everything runs on this machine: Spark, or the edge engine without a JVM.",
)
@click.option(
    "--part",
    cls=TierOption,
    type=click.Choice(["edge", "center"]),
    default=None,
    help="Run only this half, with the hub given by --hub.  [default: everything on this machine]",
)
@tier_hub_options
@from_earliest_option
@outbox_options
@click.pass_context
def run(context: click.Context, /, file: str, *, engine: str, part: Part | None, **options: Any) -> None:
    """Run a pipeline, on this machine or on Spark.

    FILE is a Python file that declares a pipeline; NAME is the variable, if there are several. Checkpoints are written to the
    state directory: after a stop, a crash or a power failure, the same command resumes from the last checkpoint.

    A pipeline of two tiers (one with to_center) runs as three processes: its edge half, a hub, and its center on Spark. They
    start and stop together. With --part only one half runs.

    SIGINT (Ctrl-C) and SIGTERM finish the epoch and stop cleanly; a second signal stops at once. Progress is printed to stderr,
    so that sinks may print to stdout.
    """
    configure_logging(options["verbose"], as_json=options["logs"] == "json")
    check_yes(fresh=options["fresh"], yes=options["yes"])
    limit_polars(1 if part != "edge" and engine == "spark" else options["parallelism"])
    if part is not None:
        _check_part(context, part, engine)
    pipeline = load_pipeline(file)
    plan = pipeline.plan()
    add_log_fields(pipeline=plan.pipeline)
    if part is None and plan.tiered:
        from fordstone.cli.tiers import run_tiers

        run_tiers(context, file, plan)
        return
    if part is None:
        why = f"pipeline {plan.pipeline} has one tier: it does not use to_center(). Omit the option."
        reject_tier_options(context, frozenset(), why)
    reject_engine_options(context, engine)
    _run(context, file, pipeline, options, part=part, engine=engine)


@click.command(
    cls=HelpCommand,
    examples=[
        "fordstone center cold_chain.py --hub https://hub.example:7411 --token-file token --state /srv/state",
        "fordstone center cold_chain.py --hub http://127.0.0.1:7411 --on edge",
        "fordstone center cold_chain.py --master spark://center:7077 --state /srv/state",
        "fordstone center cold_chain.py --master 'local[4]' --memory 8g",
        "fordstone center cold_chain.py --state /srv/state --from-checkpoint /var/lib/cold-chain",
    ],
)
@click.argument("file", metavar="FILE[:NAME]")
@engine_option(
    "The engine: Spark, or the edge engine in this process, without a JVM. The results are the same.", default="spark"
)
@available_now_option
@state_option
@node_option()
@shared_options
@spark_options
@edge_options
@tier_hub_options
@from_earliest_option
@click.pass_context
def center(context: click.Context, /, file: str, *, engine: str, **options: Any) -> None:
    """Run the center of a pipeline, until stopped.

    For a pipeline of two tiers this runs the steps after to_center(), over the rows of all nodes, which it reads from the hub. A
    pipeline of one tier runs as a whole, on Spark. Without --master, the settings of spark-submit or SPARK_CONF_DIR apply; without
    those, Spark runs on this machine with all its cores. On a cluster, every executor must reach --state and the paths of sources and
    sinks by the same name.

    SIGINT (Ctrl-C) and SIGTERM finish the epoch and stop cleanly; a second signal stops at once. The same command resumes.
    """
    reject_engine_options(context, engine)
    configure_logging(options["verbose"], as_json=options["logs"] == "json")
    limit_polars(1 if engine == "spark" else options["parallelism"])
    pipeline = load_pipeline(file)
    plan = pipeline.plan()
    add_log_fields(pipeline=plan.pipeline)
    if not plan.tiered:
        why = f"pipeline {plan.pipeline} has one tier: it does not use to_center() and reads no hub. Omit the option."
        reject_tier_options(context, frozenset(), why)
        if engine == "edge":
            raise UsageError(
                f"pipeline {plan.pipeline} has one tier, so it has no center. Run it with: fordstone run FILE."
            )
    _run(context, file, pipeline, options, part="center" if plan.tiered else None, engine=engine)


def _check_part(context: click.Context, part: Part, engine: str) -> None:
    if context.params["fresh"]:
        raise UsageError(
            f"--fresh does not go with --part {part}: the hub keeps what this half has sent or read. Without --part, edge, hub and center "
            "start over together."
        )
    if part == "edge" and engine == "spark":
        raise UsageError("--part edge runs in this process; --on spark goes with --part center.")
    if part == "edge":
        reject_tier_options(context, HUB | OUTBOX | {"part"}, "with --part edge no center runs here.")
    else:
        reject_tier_options(
            context, HUB | {"part", "from_earliest"}, "this goes with --part edge; the center has no outbox."
        )


def _run(
    context: click.Context, file: str, pipeline: Pipeline, options: dict[str, Any], *, part: Part | None, engine: str
) -> None:
    """Run a pipeline of one tier, or one half of a pipeline of two."""
    plan = pipeline.plan()
    as_json, verbose, logs, every = (options.pop(name) for name in ("as_json", "verbose", "logs", "progress_every"))
    output: dict[str, Any] = {"as_json": as_json, "logged_every": every if logs == "json" else None}
    health: str | None = options.pop("health")
    for name in (*engine_options(context, "spark" if engine == "edge" else "edge"), "center_on"):
        options.pop(name, None)
    given = {name: options.pop(name, None) for name in HUB}
    hub = None if part is None else address_of(**given, why=f"the {part} part of a pipeline")
    from_earliest = options.pop("from_earliest", False)
    if hub is not None and part is not None:
        plan = half_of(plan, part, hub, from_earliest=from_earliest)
        if not is_given(context, "node"):
            options["node"] = node_of(None) if part == "edge" else CENTER_NODE
    outbox = outbox_of(options) if options.keys() >= OUTBOX else {}
    yes = options.pop("yes", False)
    with _watched(plan.pipeline, health) as watch:
        if engine == "spark":
            _run_on_spark(plan, pipeline, options, watch, file=file, verbose=verbose, yes=yes, **output)
        else:
            config = config_of(options | ({"hub": hub} | outbox if part == "edge" else {}))
            _run_on_edge(plan, pipeline, config, watch, yes=yes, **output)


@contextmanager
def _watched(pipeline: str, address: str | None) -> Iterator[PipelineWatch | None]:
    """Serve the health of a pipeline at this address; None: do not."""
    if address is None:
        yield None
        return
    from fordstone.runtime.health import HealthServer, PipelineWatch

    watch = PipelineWatch(pipeline)
    with wrong_usage():
        server = HealthServer(address, [watch])
    with server:
        yield watch


def _showing(*shown: Callable[[Progress], None] | None) -> Callable[[Progress], None]:
    """A function that passes progress on to each of these."""
    given = [show for show in shown if show is not None]

    def show(progress: Progress) -> None:
        for one in given:
            one(progress)

    return show


def half_of(plan: Plan, part: Part, hub: HubAddress, *, from_earliest: bool = False) -> Plan:
    """The half of a plan that runs at this tier, with the hub's address."""
    from fordstone.planner.split import placed, split

    tiers = split(plan)
    half = tiers.edge if part == "edge" else tiers.center
    if half is None:
        raise UsageError(
            f"pipeline {plan.pipeline} has no {part} part: it does not use to_center(). Run it with: fordstone run FILE."
        )
    return placed(half, hub, from_earliest=from_earliest)


def _run_on_edge(
    plan: Plan, pipeline: Pipeline, config: RunConfig, watch: PipelineWatch | None, *, yes: bool, **output: Any
) -> None:
    from fordstone.edge.run import run as run_plan

    if config.fresh:
        confirm_fresh(plan, [config.home_of(plan.pipeline)], yes=yes)
    dead_letters = config.home_of(plan.pipeline) / "dead-letters"
    view = make_view(plan, bounded=config.bounded, dead_letters=dead_letters, **output)
    hub = config.hub
    watched = None if watch is None else watch.show
    on_failure = None if watch is None else watch.restarting
    trim_memory()

    def work() -> Report:
        if hub is None:
            show = _showing(watched, view.show)
            return run_plan(plan, pipeline.functions, config, on_progress=show, on_failure=on_failure)
        import fordstone
        from fordstone.edge.agent.health import HealthReporter
        from fordstone.hub.client.client import HubClient
        from fordstone.runtime.clock import SystemClock

        names = {"node": config.node, "pipeline": plan.pipeline, "version": fordstone.__version__}
        with (
            closing(HubClient(hub, timeout_s=HEALTH_TIMEOUT_S)) as client,
            HealthReporter(client, clock=SystemClock(), **names) as health,
        ):
            show = _showing(watched, health.show, view.show)
            return run_plan(plan, pipeline.functions, config, on_progress=show, on_failure=on_failure)

    run_shown(view, work)


def config_of(options: dict[str, Any]) -> RunConfig:
    """The configuration of the edge engine, from options."""
    from fordstone.edge.config import RunConfig

    with wrong_usage():
        return RunConfig(**options)


def _run_on_spark(
    plan: Plan,
    pipeline: Pipeline,
    options: dict[str, Any],
    watch: PipelineWatch | None,
    *,
    file: str,
    verbose: int,
    yes: bool,
    **output: Any,
) -> None:
    """A task on Spark is a process with its own Polars, so Polars was limited to one thread before it was loaded."""
    master, memory, settings = (options.pop(name) for name in ("master", "memory", "settings"))
    config = _spark_config(options)
    spark_settings = read_settings(settings)
    if config.fresh:
        confirm_fresh(plan, [config.checkpoint_of(plan.pipeline)], yes=yes)
    from fordstone.spark.hosted.query import dead_letters_of
    from fordstone.spark.run import run_plan
    from fordstone.spark.session.application import application

    dead_letters = dead_letters_of(config, plan.pipeline)
    bounded = config.bounded
    show = None if watch is None else watch.show
    on_failure = None if watch is None else watch.restarting
    view = make_view(plan, bounded=bounded, dead_letters=dead_letters, **output)

    def work() -> Report:
        view.note(STARTING_SPARK)
        with application(
            name=f"fordstone {plan.pipeline}",
            master=master,
            memory=memory,
            log_level=_SPARK_LOG_LEVELS[min(verbose, len(_SPARK_LOG_LEVELS) - 1)],
            config=spark_settings,
            file=file_of(file),
        ) as spark:
            view.note("running as a batch job ..." if config.bounded else "starting the query ...")
            shown = _showing(show, view.show)
            return run_plan(plan, pipeline.functions, config, spark=spark, on_progress=shown, on_failure=on_failure)

    run_shown(view, work)


def read_settings(given: Sequence[str]) -> dict[str, str]:
    """Spark properties, from NAME=VALUE."""
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.startswith("spark."):
            raise UsageError(f"--conf {text!r}: write NAME=VALUE, as in --conf spark.executor.memory=4g.")
        found[name] = value
    return found


def _spark_config(options: dict[str, Any]) -> SparkConfig:
    if options["interval"] == "auto":
        raise UsageError("--interval auto goes with --on edge. On Spark, write a span, as in --interval 10s.")
    if options["allow_new_state"] and options["from_checkpoint"] is None:
        raise UsageError(
            "--allow-new-state needs --from-checkpoint on Spark, which can neither drop nor add state of a query that has started. "
            "Start a new query from a checkpoint of the old one: fordstone checkpoints import-spark."
        )
    from fordstone.spark.config import SparkConfig

    with wrong_usage():
        return SparkConfig(**options)
