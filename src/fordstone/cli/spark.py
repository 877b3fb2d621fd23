"""Run a pipeline on Spark for a command: `run --on spark` and `center` both come here.

Spark takes some seconds to start, so what can be checked without it is checked before, and the person sees what the
seconds are spent on. Spark is started here and not by the engine: its settings are the command's, and it replaces the
handler of SIGINT, which the engine then replaces by its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from fordstone.cli.errors import Misuse
from fordstone.cli.loading import file_of
from fordstone.cli.view.showing import make_view, shown
from fordstone.errors import FordstoneError

if TYPE_CHECKING:
    from fordstone.operators.base import Functions
    from fordstone.plan.plan import Plan
    from fordstone.runtime.progress import Report
    from fordstone.spark.config import SparkConfig

STARTING: Final = "starting Spark ..."
_LOG_LEVELS: Final = ("OFF", "WARN", "INFO")


def run_on_spark(
    plan: Plan,
    functions: Functions,
    options: Mapping[str, Any],
    *,
    file: str,
    as_json: bool,
    verbose: int,
    logged_every: str | None = None,
) -> None:
    """Run a plan that came from FILE[:NAME]. `options` are those of `run_options` that Spark has.

    A task is a process with Polars of its own; several threads in each would only get in each other's way. So whoever comes
    here has limited Polars to one before it was loaded.
    """
    options = dict(options)
    master, memory, settings = (options.pop(name) for name in ("master", "memory", "settings"))
    config = _config(options)
    spark_settings = read_settings(settings)
    from fordstone.spark.hosted.query import dead_letters_of
    from fordstone.spark.run import run_plan
    from fordstone.spark.session.application import application

    letters = dead_letters_of(config, plan.pipeline)
    view = make_view(
        plan,
        bounded=config.bounded,
        dead_letters=letters,
        as_json=as_json,
        batch_job=config.bounded,
        logged_every=logged_every,
    )

    def work() -> Report:
        view.note(plan.pipeline, STARTING)
        with application(
            name=f"fordstone {plan.pipeline}",
            master=master,
            memory=memory,
            log_level=_LOG_LEVELS[min(verbose, len(_LOG_LEVELS) - 1)],
            config=spark_settings,
            file=file_of(file),
        ) as spark:
            view.note(plan.pipeline, "running as a batch job ..." if config.bounded else "starting the query ...")
            return run_plan(plan, functions, config, spark=spark, on_progress=view.show)

    shown(view, work)


def read_settings(given: Sequence[str]) -> dict[str, str]:
    """Settings of Spark's, from NAME=VALUE."""
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.startswith("spark."):
            raise Misuse(f"--conf {text!r}: write NAME=VALUE, as in --conf spark.executor.memory=4g.")
        found[name] = value
    return found


def _config(options: Mapping[str, Any]) -> SparkConfig:
    if options["interval"] == "auto":
        raise Misuse("--interval auto goes with --on edge. On Spark, write a span, as in --interval 10s.")
    if options["allow_new_state"] and options["from_checkpoint"] is None:
        raise Misuse(
            "--allow-new-state goes with --from-checkpoint on Spark, which can neither drop nor add state of a query that "
            "has begun. Begin a new one from a checkpoint of the old: fordstone checkpoints import-spark."
        )
    from fordstone.spark.config import SparkConfig

    try:
        return SparkConfig(**options)
    except FordstoneError as error:
        raise Misuse(str(error)) from error
