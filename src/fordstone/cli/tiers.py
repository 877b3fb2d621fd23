"""`fordstone run` of a pipeline of two tiers: hub, edge half and center half as processes of their own, started and stopped together.

The order is what matters. The hub comes first and goes last. Told to stop, the edge goes first and sends what it has; then the
center finishes its epoch; then the hub. A bounded run is the edge to its end, then the center over what the hub has.
`Course` decides; it is handed the supervisor, and looks at no clock.

Commands of our own as child processes: the words to start them by, and what they say, passed on.
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
from click.core import ParameterSource

from fordstone.cli.errors import FAILURE, FENCED, MISUSED, Fenced, Mistake, Misuse
from fordstone.cli.help import EngineOption
from fordstone.cli.hub_options import GIVEN, given_options
from fordstone.cli.logs import json_line, line_of
from fordstone.cli.tier_options import OUTBOX, given, refuse_tier_options
from fordstone.cli.view.showing import check_stdout
from fordstone.cli.view.view import OVER, PREPARES, PROGRESS

if TYPE_CHECKING:
    from collections.abc import Callable

    from fordstone.cli.view.tiers_view import TiersView
    from fordstone.edge.agent.supervisor import Job, OnLine, Process, Spawn, Supervisor
    from fordstone.plan.plan import Plan


# -P: the working directory is not to be searched for modules, as it is not when the script is called.
_FORDSTONE: Final = ("-P", "-c", "from fordstone.cli.main import main; main()")


def command(*words: str) -> tuple[str, ...]:
    """`fordstone` with these words, on the Python that runs now."""
    return (sys.executable, *_FORDSTONE, *words)


def spawning(on_line: OnLine, *, catch_out: bool) -> Spawn:
    """How a supervisor starts children whose lines go to `on_line`."""
    from fordstone.edge.agent.supervisor import ChildProcess

    def spawn(name: str, words: Sequence[str]) -> Process:
        return ChildProcess(name, words, on_line=on_line, catch_out=catch_out)

    return spawn


def event_of(text: str) -> dict[str, Any] | None:
    """The JSON object of a line; None if it is anything else."""
    if not text.startswith("{"):
        return None
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def passed_on(name: str, text: str) -> str:
    """A log line of a child's as one of ours. What is no log line, such as a traceback, becomes one."""
    found = event_of(text)
    if found is not None and "event" in found and "level" in found:
        return text if "pipeline" in found else json.dumps(found | {"pipeline": name}, ensure_ascii=False)
    return json_line("ERROR", "said", {"pipeline": name, "text": text}, at_s=time.time())


HUB: Final = "hub"
EDGE: Final = "edge"
CENTER: Final = "center"
LOOK_EVERY_S: Final = 0.05
HUB_READY_WAIT_S: Final = 60.0
EDGE_STOP_WAIT_US: Final = 60_000_000
HUB_STOP_WAIT_US: Final = 15_000_000
LAST_WORDS_MAX: Final = 200
"""So many lines of what a process says as it fails are kept."""
_SHARED: Final = frozenset({"interval", "allow_new_state", "batch_rows", "bounded", "verbose"})
_SENSELESS: Final = {
    "available_now": "--available-now: an edge has no such end. Use --bounded, or run the halves with --part.",
    "from_checkpoint": "--from-checkpoint: which half is meant? Run the center alone: fordstone center FILE --hub URL.",
}
_SHOWN: Final = frozenset({PREPARES, PROGRESS, OVER})
_PROGRESS_EVERY: Final = "1s"
Phase = Literal["hub", "running", "center", "stopping edge", "stopping center", "stopping hub", "over"]
_STOPS: Final[dict[Phase, str]] = {"stopping edge": EDGE, "stopping center": CENTER, "stopping hub": HUB}


class Course:
    """What runs when. Call `step` until `phase` is "over"; `stop` may be called at any time."""

    def __init__(
        self,
        jobs: Supervisor,
        *,
        hub: Callable[[str], Job],
        halves: Callable[[str], dict[str, Job]],
        ready: Callable[[], str | None],
        bounded: bool,
    ) -> None:
        """`hub`: the hub's job, for a place to listen at; `halves`: those of edge and center, for the hub's URL; `ready`: that URL, once."""
        self._jobs = jobs
        self._hub = hub
        self._halves = halves
        self._ready = ready
        self._bounded = bounded
        self._waiting: dict[str, Job] = {}
        self._begun: list[str] = [HUB]
        self.phase: Phase = "hub"
        self.url: str | None = None
        self.failed: str | None = None
        """The part that failed, for whose sake the others were stopped."""
        jobs.add(hub("127.0.0.1:0"))

    def step(self) -> None:
        """Do what is next, if it is time for that."""
        self._jobs.step()
        if self.failed is None and self._jobs.given_up:
            self.failed = next(iter(self._jobs.given_up))
            self.stop()
        match self.phase:
            case "hub":
                self.url = self._ready()
                if self.url is not None:
                    self._begin(self.url)
            case "running" if self._bounded and self._jobs.has_ended(EDGE):
                self._go_on_behind_the_edge()
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

    @property
    def stopping(self) -> bool:
        """Whether it is on its way out."""
        return self.phase.startswith("stopping")

    def _begin(self, url: str) -> None:
        # A hub that is killed comes back where everybody looks for it.
        self._jobs.renew(HUB, self._hub(url.rpartition("//")[2]).command)
        self._waiting = self._halves(url)
        self._start(EDGE)
        if not self._bounded and CENTER in self._waiting:
            self._start(CENTER)
        self.phase = "running"

    def _go_on_behind_the_edge(self) -> None:
        if CENTER in self._waiting:
            self._start(CENTER)
            self.phase = "center"
        else:
            self._stop_next()

    def _start(self, name: str) -> None:
        self._jobs.add(self._waiting.pop(name))
        self._begun.append(name)

    def _stop_next(self) -> None:
        """Stop the first that still runs. A later one is not told before it is gone."""
        for phase, name in _STOPS.items():
            if name in self._begun and not self._jobs.has_ended(name):
                self.phase = phase
                self._jobs.stop(name)
                return
        self.phase = "over"


def run_tiers(context: click.Context, file: str, plan: Plan, *, as_json: bool) -> None:
    """Run a pipeline of two tiers on this machine. `context` is that of `fordstone run`."""
    options = context.params
    _refuse(context)
    if as_json:
        check_stdout(plan)
    from fordstone.cli.view.tiers_view import make_tiers_view
    from fordstone.edge.agent.supervisor import Supervisor
    from fordstone.protocol.restart import AT_A_TERMINAL
    from fordstone.runtime.clock import SystemClock
    from fordstone.runtime.signals import Signals

    state = Path(options["state"])
    view = make_tiers_view(plan.pipeline, as_json=as_json)
    talk = Talk(view, verbose=options["verbose"] > 0)
    ready_file = state / HUB / "ready"
    try:
        ready_file.parent.mkdir(parents=True, exist_ok=True)
        ready_file.unlink(missing_ok=True)
    except OSError as error:
        raise Mistake(f"--state {state}: nothing can be kept there ({error}).") from error
    supervisor = Supervisor(
        spawn=spawning(talk.heard, catch_out=True),
        monotonic_us=SystemClock().monotonic_us,
        policy=AT_A_TERMINAL,
        given_up_level=logging.INFO,
    )
    course = Course(
        supervisor,
        hub=lambda listen: _hub_job(state, listen, ready_file),
        halves=lambda url: _halves(context, file, plan, state, url),
        ready=lambda: _url_in(ready_file),
        bounded=options["bounded"],
    )
    try:
        with view, Signals() as signals:
            _follow(course, view, lambda: signals.stop_requested or talk.nobody_reads)
    finally:
        supervisor.kill()
    if course.failed is not None:
        code = supervisor.code_of(course.failed)
        raise _failure(course.failed, talk.last_words(course.failed), supervisor.given_up.get(course.failed, ""), code)
    if talk.nobody_reads:
        raise Mistake("stdout: whoever read the output has gone. Stopped.")
    view.report(bounded=options["bounded"], told=signals.stop_requested)


def _follow(course: Course, view: TiersView, told: Callable[[], bool]) -> None:
    """Go through the course to its end."""
    give_up_at = time.monotonic() + HUB_READY_WAIT_S
    while course.phase != "over":
        course.step()
        if told():
            course.stop()
        if course.phase == "hub" and time.monotonic() > give_up_at:
            course.stop()
            course.failed = HUB
        view.phase(course.phase, course.url)
        time.sleep(LOOK_EVERY_S)


class Talk:
    """What the children say: progress to the view, rows to standard output, log lines to the person, last words kept.

    Called from the children's threads, a line at a time.
    """

    def __init__(self, view: TiersView, *, verbose: bool) -> None:
        self._view = view
        self._verbose = verbose
        self._last: dict[str, str] = {}
        self._lock = threading.Lock()
        self.nobody_reads = False
        """Whoever read our standard output has gone."""

    def heard(self, name: str, stream: str, text: str) -> None:
        """One line. Whatever becomes of it, the next one is read: a child whose lines nobody takes would wait for ever."""
        try:
            self._pass_on(name, stream, text)
        except OSError:
            self.nobody_reads = True

    def _pass_on(self, name: str, stream: str, text: str) -> None:
        with self._lock:
            if stream == "out":
                if name != HUB:
                    print(text, flush=True)
                return
            event = event_of(text)
            if event is None or "event" not in event:
                self._say(name, text)
            elif event["event"] in _SHOWN:
                self._view.heard(name, event)
            elif event["event"] == FAILURE:
                self._last[name] = str(event.get("problem", ""))
            elif self._verbose or event.get("level") not in {"INFO", "DEBUG"}:
                self._say(name, line_of(event))

    def last_words(self, name: str) -> str:
        """What a part said as it failed."""
        with self._lock:
            return self._last.get(name, "").strip()

    def _say(self, name: str, text: str) -> None:
        # Somebody who no longer reads standard error is no reason to stop.
        with contextlib.suppress(OSError):
            if text.strip():
                print(f"{name}: {text}", file=sys.stderr, flush=True)


def _refuse(context: click.Context) -> None:
    """What makes no sense with all on one machine."""
    if context.get_parameter_source("engine") in GIVEN:
        raise Misuse(
            "--on: this pipeline has two tiers, the edge's and the center's. Choose the center's engine: --center spark|local."
        )
    allowed = (OUTBOX - {"take_over"}) | {"center_on"}
    refuse_tier_options(
        context,
        allowed,
        "that goes with --part edge or --part center. Without --part all runs here, with a hub of its own.",
    )
    for name, words in _SENSELESS.items():
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise Misuse(words)
    if context.params["center_on"] == "spark":
        return
    for option in context.command.params:
        if (
            isinstance(option, EngineOption)
            and option.engine == "spark"
            and context.get_parameter_source(option.name or "") in GIVEN
        ):
            raise Misuse(f"{option.opts[0]} goes with --center spark, not with --center local.")


def _hub_job(state: Path, listen: str, ready_file: Path) -> Job:
    from fordstone.edge.agent.supervisor import Job

    words = ("hub", "--listen", listen, "--data", str(state / HUB), "--ready-file", str(ready_file))
    return Job(name=HUB, command=command(*words), stop_timeout_us=HUB_STOP_WAIT_US)


def _halves(context: click.Context, file: str, plan: Plan, state: Path, url: str) -> dict[str, Job]:
    """The jobs of edge and center, by name; those that the pipeline has."""
    from fordstone.edge.agent.supervisor import Job
    from fordstone.planner.split import split

    def of(engine: str) -> frozenset[str]:
        return frozenset(
            one.name or "" for one in context.command.params if isinstance(one, EngineOption) and one.engine == engine
        )

    node = context.params["node"] if given(context, "node") else EDGE
    common = ("--hub", url, "--logs", "json", "--progress-every", _PROGRESS_EVERY)
    edge = command(
        "run", file, "--part", "edge", *common, "--node", node, "--state", str(state / EDGE),
        *given_options(context, _SHARED | of("edge") | OUTBOX),
    )  # fmt: skip
    jobs = {EDGE: Job(name=EDGE, command=edge, stop_timeout_us=EDGE_STOP_WAIT_US)}
    if split(plan).center is None:
        return jobs
    engine = "spark" if context.params["center_on"] == "spark" else "edge"
    # The edge's options are about the edge; a center on the same engine runs with the defaults.
    own = of("spark") if engine == "spark" else frozenset[str]()
    center = command(
        "run", file, "--part", "center", "--on", engine, *common, "--state", str(state / CENTER),
        *given_options(context, _SHARED | own),
    )  # fmt: skip
    return jobs | {CENTER: Job(name=CENTER, command=center)}


def _url_in(ready_file: Path) -> str | None:
    """The address that the hub has written down, once it listens. The file appears whole."""
    try:
        text = ready_file.read_text().strip()
    except FileNotFoundError:
        return None
    return text or None


def _failure(part: str, last_words: str, why: str, code: int | None) -> Mistake:
    whose = {HUB: "the hub", EDGE: "the edge part", CENTER: "the center"}[part]
    told = last_words or f"{why}. What it said is above." if last_words or why else "it did not come up in time."
    kind = {MISUSED: Misuse, FENCED: Fenced}.get(code or 0, Mistake)
    return kind(f"{whose} failed, and the rest was stopped: {told}")
