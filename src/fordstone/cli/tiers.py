"""`fordstone run` of a pipeline of two tiers: hub, edge half and center half as child processes that start and stop together.

The hub starts first and stops last. On a signal the edge stops first and sends what it has; then the center finishes its epoch; then
the hub stops. A run with `--bounded` or `--available-now` is the edge to its end, then the center over what the hub has. `Schedule` decides this order; it is given the
supervisor and reads no clock.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import click

from fordstone.cli.errors import FAILURE, FENCED, WRONG_USAGE, TakenOverError, UsageError, UserError
from fordstone.cli.fresh import set_tiers_aside
from fordstone.cli.logs import json_line, text_line, write_line
from fordstone.cli.options import OUTBOX, engine_options, given_options, is_given, is_typed, reject_tier_options
from fordstone.cli.view.view import OVER, PREPARES, PROGRESS, TWO, View, make_view
from fordstone.storage.clock import monotonic_clock_us

if TYPE_CHECKING:
    from collections.abc import Callable

    from fordstone.edge.agent.supervisor import Job, OnLine, Process, Spawn, Supervisor
    from fordstone.plan.plan import Plan


# -P: do not search the working directory for modules, as the installed script does not either.
_FORDSTONE: Final = ("-P", "-c", "from fordstone.cli.main import main; main()")


def command(*words: str) -> tuple[str, ...]:
    """`fordstone` with these words, on the Python that runs now."""
    return (sys.executable, *_FORDSTONE, *words)


def spawning(on_line: OnLine, *, catch_out: bool) -> Spawn:
    """The function by which a supervisor starts children whose lines are passed to `on_line`."""
    from fordstone.edge.agent.supervisor import ChildProcess

    def spawn(name: str, words: Sequence[str]) -> Process:
        return ChildProcess(name, words, on_line=on_line, catch_out=catch_out)

    return spawn


def event_of(text: str) -> dict[str, Any] | None:
    """The JSON object in a line; None if it is anything else."""
    if not text.startswith("{"):
        return None
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def forwarded(name: str, text: str) -> str:
    """A child's log line as one of ours. Any other line, such as one of a traceback, becomes the text of a log line."""
    found = event_of(text)
    if found is not None and "event" in found and "level" in found:
        return text if "pipeline" in found else json.dumps(found | {"pipeline": name}, ensure_ascii=False)
    return json_line("ERROR", "output", {"pipeline": name, "text": text}, at_s=time.time())


HUB: Final = "hub"
EDGE: Final = "edge"
CENTER: Final = "center"
LOOK_EVERY_S: Final = 0.05
HUB_READY_WAIT_S: Final = 60.0
EDGE_STOP_WAIT_US: Final = 60_000_000
HUB_STOP_WAIT_US: Final = 15_000_000
_SHARED: Final = frozenset(
    {"interval", "allow_new_state", "discard_later_output", "batch_rows", "bounded", "available_now", "verbose"}
)
_FROM_CHECKPOINT: Final = (
    "--from-checkpoint: it is for one half only. Run the center alone: fordstone center FILE --hub URL."
)
_PROGRESS_EVERY: Final = "1s"
Phase = Literal["hub", "running", "center", "stopping edge", "stopping center", "stopping hub", "over"]
_STOPS: Final[dict[Phase, str]] = {"stopping edge": EDGE, "stopping center": CENTER, "stopping hub": HUB}
PHASE_TEXT: Final[dict[Phase, str]] = {
    "hub": "starting the hub ...",
    "running": "",
    "center": "the edge has ended; the center is running",
    "stopping edge": "stopping: the edge finishes its epoch and sends what it has (again to stop at once)",
    "stopping center": "stopping: the center finishes its epoch (again to stop at once)",
    "stopping hub": "stopping the hub",
    "over": "",
}


class Schedule:
    """Decides what runs when. Call `step` until `phase` is "over"; `stop` may be called at any time."""

    def __init__(
        self,
        jobs: Supervisor,
        *,
        hub: Callable[[str], Job],
        halves: Callable[[str], dict[str, Job]],
        ready: Callable[[], str | None],
        one_by_one: bool,
    ) -> None:
        """`hub`: the hub's job, given an address; `halves`: the jobs of edge and center, given the hub's URL; `ready`: that URL.

        `one_by_one`: the halves end by themselves, and the center starts when the edge has ended.
        """
        self._jobs = jobs
        self._hub = hub
        self._halves = halves
        self._ready = ready
        self._one_by_one = one_by_one
        self._waiting: dict[str, Job] = {}
        self._begun: list[str] = [HUB]
        self.phase: Phase = "hub"
        self.url: str | None = None
        self.failed: str | None = None
        """The part that failed, which is why the others were stopped."""
        jobs.add(hub("127.0.0.1:0"))

    def step(self) -> None:
        self._jobs.step()
        if self.failed is None and self._jobs.given_up:
            self.failed = next(iter(self._jobs.given_up))
            self.stop()
        match self.phase:
            case "hub":
                self.url = self._ready()
                if self.url is not None:
                    self._begin(self.url)
            case "running" if self._one_by_one and self._jobs.has_ended(EDGE):
                self._after_edge()
            case "center" if self._jobs.has_ended(CENTER):
                self._stop_next()
            case "stopping edge" | "stopping center" | "stopping hub":
                self._stop_next()
            case _:
                return

    def stop(self) -> None:
        """Stop everything, in order. May be called again."""
        if self.phase != "over":
            self._waiting.clear()
            self._stop_next()

    def _begin(self, url: str) -> None:
        # A hub that is killed restarts at the same address.
        self._jobs.renew(HUB, self._hub(url.rpartition("//")[2]).command)
        self._waiting = self._halves(url)
        self._start(EDGE)
        if not self._one_by_one and CENTER in self._waiting:
            self._start(CENTER)
        self.phase = "running"

    def _after_edge(self) -> None:
        if CENTER in self._waiting:
            self._start(CENTER)
            self.phase = "center"
        else:
            self._stop_next()

    def _start(self, name: str) -> None:
        self._jobs.add(self._waiting.pop(name))
        self._begun.append(name)

    def _stop_next(self) -> None:
        """Stop the first part that still runs. The next one is stopped only after it has ended."""
        for phase, name in _STOPS.items():
            if name in self._begun and not self._jobs.has_ended(name):
                self.phase = phase
                self._jobs.stop(name)
                return
        self.phase = "over"


def run_tiers(context: click.Context, file: str, plan: Plan) -> None:
    """Run a pipeline of two tiers on this machine. `context` is that of `fordstone run`."""
    options = context.params
    _reject_options(context)
    from fordstone.edge.agent.supervisor import Supervisor
    from fordstone.protocol.retry import AT_A_TERMINAL
    from fordstone.runtime.signals import Signals

    state = Path(options["state"])
    if options["fresh"]:
        states = [state / part for part in (HUB, EDGE, CENTER)]
        spark = state / CENTER / plan.pipeline / "_spark" / "fordstone"
        set_tiers_aside(plan, states, [*states, spark], yes=options["yes"])
    view = make_view(plan, names=TWO, bounded=options["bounded"], as_json=options["as_json"])
    router = LineRouter(view, verbose=options["verbose"] > 0)
    ready_file = state / HUB / "ready"
    try:
        ready_file.parent.mkdir(parents=True, exist_ok=True)
        ready_file.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"--state {state}: the directory cannot be written ({error}).") from error
    supervisor = Supervisor(
        spawn=spawning(router.on_line, catch_out=True),
        monotonic_us=monotonic_clock_us,
        policy=AT_A_TERMINAL,
        given_up_level=logging.INFO,
    )
    schedule = Schedule(
        supervisor,
        hub=lambda listen: _hub_job(state, listen, ready_file),
        halves=lambda url: _halves(context, file, plan, state, url),
        ready=lambda: _url_in(ready_file),
        one_by_one=options["bounded"] or options["available_now"],
    )
    try:
        with view, Signals() as signals:
            _follow(schedule, view, lambda: signals.stop_requested or router.stdout_closed)
    finally:
        supervisor.kill()
    if schedule.failed is not None:
        part = schedule.failed
        raise _failure(part, router.error_of(part), supervisor.given_up.get(part, ""), supervisor.code_of(part))
    if router.stdout_closed:
        raise UserError("stdout: the reader of the output has closed it. Stopped.")
    view.finish(stopped=signals.stop_requested)


def _follow(schedule: Schedule, view: View, stop_requested: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + HUB_READY_WAIT_S
    while schedule.phase != "over":
        schedule.step()
        if stop_requested():
            schedule.stop()
        if schedule.phase == "hub" and time.monotonic() > give_up_at:
            schedule.stop()
            schedule.failed = HUB
        view.phase(PHASE_TEXT[schedule.phase], schedule.url)
        time.sleep(LOOK_EVERY_S)


class LineRouter:
    """Routes the lines of children: progress to the view, rows to standard output, log lines to standard error.

    Called from the children's threads, one line at a time.
    """

    def __init__(self, view: View, *, verbose: bool) -> None:
        self._view = view
        self._verbose = verbose
        self._errors: dict[str, str] = {}
        self._lock = threading.Lock()
        self.stdout_closed = False
        """Whether the reader of our standard output has closed it."""

    def on_line(self, name: str, stream: str, text: str) -> None:
        """Take one line. Errors do not stop the reading: a child whose output is not read would block."""
        try:
            with self._lock:
                self._route(name, stream, text)
        except OSError:
            self.stdout_closed = True

    def _route(self, name: str, stream: str, text: str) -> None:
        if stream == "out":
            if name != HUB:
                write_line(text, sys.stdout)
            return
        event = event_of(text)
        if event is None or "event" not in event:
            self._print(name, text)
        elif event["event"] in {PREPARES, PROGRESS, OVER} and name in TWO:
            self._show(name, event)
        elif event["event"] == FAILURE:
            self._errors[name] = str(event.get("problem", ""))
        elif self._verbose or event.get("level") not in {"INFO", "DEBUG"}:
            self._print(name, text_line(event))

    def _show(self, name: str, event: dict[str, Any]) -> None:
        import msgspec

        from fordstone.protocol.progress import Progress, Report

        if event["event"] == PREPARES:
            self._view.note(str(event.get("doing", "")), name)
            return
        try:
            if event["event"] == PROGRESS:
                self._view.show(msgspec.convert(event, Progress), name)
            else:
                self._view.end(msgspec.convert(event | {"progress": event}, Report), name)
        except msgspec.ValidationError:
            # Not ours: the code of the pipeline printed a line that looks like it.
            self._print(name, text_line(event))

    def error_of(self, name: str) -> str:
        with self._lock:
            return self._errors.get(name, "").strip()

    def _print(self, name: str, text: str) -> None:
        # A closed standard error does not stop a pipeline.
        with contextlib.suppress(OSError):
            if text.strip():
                write_line(f"{name}: {text}")


def _reject_options(context: click.Context) -> None:
    """Reject options that do not apply when everything runs on one machine."""
    if is_given(context, "engine"):
        raise UsageError(
            "--on: this pipeline has two tiers, edge and center. Choose the center's engine with --center spark|local."
        )
    reject_tier_options(
        context,
        (OUTBOX - {"take_over"}) | {"center_on"},
        "this goes with --part edge or --part center. Without --part everything runs here, with its own hub.",
    )
    if is_typed(context, "health"):
        raise UsageError(
            "--health: this pipeline has two tiers, which run here as several processes. It goes with --part edge or --part center."
        )
    if is_typed(context, "from_checkpoint"):
        raise UsageError(_FROM_CHECKPOINT)
    if context.params["center_on"] == "spark":
        return
    for name, option in engine_options(context, "spark").items():
        if is_given(context, name):
            raise UsageError(f"{option.opts[0]} goes with --center spark, not with --center local.")


def _hub_job(state: Path, listen: str, ready_file: Path) -> Job:
    from fordstone.edge.agent.supervisor import Job

    words = ("hub", "--listen", listen, "--data", str(state / HUB), "--ready-file", str(ready_file))
    return Job(name=HUB, command=command(*words), stop_timeout_us=HUB_STOP_WAIT_US)


def _halves(context: click.Context, file: str, plan: Plan, state: Path, url: str) -> dict[str, Job]:
    from fordstone.edge.agent.supervisor import Job
    from fordstone.planner.split import split

    node = context.params["node"] if is_given(context, "node") else EDGE
    common = ("--hub", url, "--logs", "json", "--progress-every", _PROGRESS_EVERY)
    edge = command(
        "run", file, "--part", "edge", *common, "--node", node, "--state", str(state / EDGE),
        *given_options(context, _SHARED | engine_options(context, "edge").keys() | OUTBOX),
    )  # fmt: skip
    jobs = {EDGE: Job(name=EDGE, command=edge, stop_timeout_us=EDGE_STOP_WAIT_US)}
    if split(plan).center is None:
        return jobs
    engine = "spark" if context.params["center_on"] == "spark" else "edge"
    # The options of the edge engine are for the edge half; a center on the same engine runs with the defaults.
    own = frozenset(engine_options(context, "spark")) if engine == "spark" else frozenset[str]()
    center = command(
        "run", file, "--part", "center", "--on", engine, *common, "--state", str(state / CENTER),
        *given_options(context, _SHARED | own),
    )  # fmt: skip
    return jobs | {CENTER: Job(name=CENTER, command=center)}


def _url_in(ready_file: Path) -> str | None:
    """The address that the hub writes once it listens. The file appears whole."""
    try:
        text = ready_file.read_text().strip()
    except FileNotFoundError:
        return None
    return text or None


def _failure(part: str, error: str, why: str, code: int | None) -> UserError:
    name = {HUB: "the hub", EDGE: "the edge part", CENTER: "the center"}[part]
    text = error or (f"{why}. Its output is above." if why else "it did not start in time.")
    kind = {WRONG_USAGE: UsageError, FENCED: TakenOverError}.get(code or 0, UserError)
    return kind(f"{name} failed, and the rest was stopped: {text}")
