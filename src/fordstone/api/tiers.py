"""A pipeline of two tiers in one process: a hub, some nodes and a center, each on threads, for tests and notebooks.

The parts are the same as on several machines: a real hub at a port of this machine, the edge engine for the nodes and for the center. The order
of starting and stopping is that of `fordstone run`: a bounded run is the nodes to their end, then the center; on a stop the nodes
finish first and send what they have, then the center, then the hub. If the nodes of an unbounded run have come to the end of their sources, the
center stops, and reads the rest as bounded input. The center starts when the hub knows all nodes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import msgspec

from fordstone.api.run import OnProgress, Run
from fordstone.connectors.base import Capability, Sink, Source, live_of
from fordstone.connectors.memory import MemorySink, memory
from fordstone.connectors.part_of_source import Distribution, PartOfSource
from fordstone.connectors.registry import capabilities
from fordstone.edge.config import RunConfig
from fordstone.edge.engine.assembly import ConnectorOpener, Job
from fordstone.edge.run import refuse_earlier_output, run
from fordstone.errors import ConfigError, HubAwayError, HubError, NotInstalledError
from fordstone.hub.client.address import HubAddress
from fordstone.operators.base import Functions
from fordstone.plan import plan as p
from fordstone.planner.split import placed, split
from fordstone.protocol.progress import Progress, Report
from fordstone.runtime.fresh import set_aside, to_set_aside
from fordstone.runtime.signals import Signals, StopRequest

CENTER: Final = "center"
FOLLOWING: Final = "following center"
"""The center as long as the nodes of an unbounded run work."""
LOOK_SECONDS: Final = 0.02
HUB_START_SECONDS: Final = 60.0
HUB_STOP_SECONDS: Final = 30.0


def run_here(
    plan: p.Plan,
    functions: Functions,
    config: RunConfig,
    *,
    nodes: int | None = None,
    on_progress: OnProgress | None = None,
    stop: StopRequest | None = None,
) -> Report:
    """Run a plan in this process, whether it has one tier or two. `nodes`: of two tiers, the number of nodes."""
    check_options(plan, config, nodes)
    if not plan.tiered:
        return run(plan, functions, config, on_progress=on_progress, stop=stop)
    if config.fresh:
        set_aside(to_set_aside(plan, []))
        config = replace(config, fresh=False)
    refuse_earlier_output(plan)
    with ExitStack() as stack:
        signals = stop or stack.enter_context(Signals())
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="fordstone-")))
        hub = HubAddress(url=stack.enter_context(_running_hub(folder / "hub")))
        tiers = _Tiers(plan, functions, config, nodes or 1, hub, folder)
        try:
            return tiers.run(signals, on_progress)
        finally:
            tiers.stop()


def check_options(plan: p.Plan, config: RunConfig, nodes: int | None) -> None:
    """Raise if a pipeline cannot run in one process with these options."""
    if not plan.tiered:
        if nodes is not None:
            raise ConfigError(
                f"nodes={nodes}: pipeline {plan.pipeline} has one tier, which runs as one node. Add .to_center(), or leave nodes= out; "
                "parallelism= divides the work."
            )
        return
    if nodes is not None and nodes < 1:
        raise ConfigError(f"nodes={nodes} must be at least 1.")
    if config.available_now:
        raise ConfigError(
            f"available_now: pipeline {plan.pipeline} has two tiers and keeps no state here. Use bounded=True."
        )
    for name in ("state", "hub", "remote"):
        if getattr(config, name) is not None:
            raise ConfigError(
                f"{name}=: pipeline {plan.pipeline} has two tiers. In one process it has a hub of its own and keeps no state. On one machine "
                "with state: fordstone run FILE. On several: fordstone edge, fordstone center and fordstone hub."
            )


class _Tiers:
    """The nodes and the center of one run."""

    def __init__(
        self, plan: p.Plan, functions: Functions, config: RunConfig, nodes: int, hub: HubAddress, folder: Path
    ) -> None:
        halves = split(plan)
        self._plan = plan
        self._functions = functions
        self._config = config
        self._folder = folder
        self._hub = hub
        self._edge = placed(halves.edge, hub)
        self._center = None if halves.center is None else placed(halves.center, hub)
        self._names = [f"{config.node}-{number}" for number in range(1, nodes + 1)]
        self._distributions = {
            step.name: Distribution(nodes) for step in self._edge.steps if isinstance(step, p.Source)
        }
        self._parts: dict[str, Run] = {}
        for step in self._edge.steps:
            live = live_of(step.connector) if isinstance(step, p.Sink) else None
            if isinstance(live, MemorySink):
                live.clear()

    def run(self, stop: StopRequest, on_progress: OnProgress | None) -> Report:
        for number, name in enumerate(self._names):
            self._start_node(number, name)
        while True:
            self._raise_failure()
            if on_progress is not None and (progress := self._progress()) is not None:
                on_progress(progress)
            if stop.stop_requested:
                return self._report("stopped")
            if not any(self._parts[name].running for name in self._names):
                if self._center is None or (CENTER in self._parts and not self._parts[CENTER].running):
                    return self._report("ended")
                if CENTER not in self._parts:
                    self._stop([FOLLOWING])
                    self._start_center(CENTER, bounded=True)
            elif not self._config.bounded and FOLLOWING not in self._parts and self._all_nodes_known():
                self._start_center(FOLLOWING, bounded=False)
            stop.wait(LOOK_SECONDS)

    def _all_nodes_known(self) -> bool:
        """Whether the hub has an epoch of each node. A center that began before would not wait for the others, whose rows might be late."""
        from fordstone.hub.client.client import HubClient  # noqa: PLC0415 - pipelines of one tier need no client

        client = HubClient(self._hub)
        try:
            known = {node.node for node in client.nodes().nodes if node.head}
        except HubAwayError:
            return False
        finally:
            client.close()
        return known.issuperset(self._names)

    def stop(self) -> None:
        """Stop what runs: the nodes send what they have, then the center finishes its epoch."""
        self._stop(self._names)
        self._stop([FOLLOWING, CENTER])

    def _stop(self, names: Sequence[str]) -> None:
        runs = [self._parts[name] for name in names if name in self._parts]
        for part in runs:
            part.request_stop()
        for part in runs:
            part.join()

    def _start_node(self, number: int, name: str) -> None:
        config = replace(self._config, node=name, state=self._folder / name, hub=self._hub)
        plan = self._edge if len(self._names) == 1 else _with_own_paths(self._edge, name)

        def work(show: OnProgress | None, stop: StopRequest | None) -> Report:
            return run(
                plan,
                self._functions,
                config,
                on_progress=show,
                stop=stop,
                opener=lambda job: _NodeOpener(job, self._distributions, number, name),
            )

        self._parts[name] = Run(f"{plan.pipeline}-{name}", work)

    def _start_center(self, name: str, *, bounded: bool) -> None:
        center = self._center
        if center is None:
            return
        config = replace(self._config, node=CENTER, state=self._folder / CENTER, bounded=bounded)

        def work(show: OnProgress | None, stop: StopRequest | None) -> Report:
            return run(center, self._functions, config, on_progress=show, stop=stop)

        self._parts[name] = Run(f"{center.pipeline}-{CENTER}", work)

    def _raise_failure(self) -> None:
        for part in self._parts.values():
            if part.error is not None:
                raise part.error

    def _report(self, outcome: str) -> Report:
        self.stop()
        self._raise_failure()
        progress = self._progress()
        if progress is None:
            raise AssertionError("a run that is over has made progress")
        return Report(
            pipeline=self._plan.pipeline, outcome="ended" if outcome == "ended" else "stopped", progress=progress
        )

    def _progress(self) -> Progress | None:
        """The counts of all parts: rows that the nodes have read, rows that all have released to sinks, the epoch of the center.

        What holds time back is the node that the center waits for; if it waits for none, a partition that a node waits for.
        """
        known = {name: part.progress for name, part in self._parts.items()}
        found = [progress for progress in known.values() if progress is not None]
        if not found:
            return None
        last = known.get(CENTER) or known.get(FOLLOWING) or found[-1]
        return msgspec.structs.replace(
            last,
            pipeline=self._plan.pipeline,
            held_back=next((one.held_back for one in (last, *found) if one.held_back is not None), None),
            late="; ".join(dict.fromkeys(one.late for one in found if one.late is not None)) or None,
            rows_in=sum(progress.rows_in for name in self._names if (progress := known[name])),
            **{
                name: sum(getattr(progress, name) for progress in found)
                for name in (
                    "rows_out",
                    "rows_late",
                    "rows_rejected",
                    "rows_failed",
                    "state_bytes",
                    "checkpoints",
                    "given_up",
                    "restarts",
                )
            },
        )


class _NodeOpener(ConnectorOpener):
    """Opens the sources and sinks of one of several nodes in this process: its part of the partitions, its part of a sink in memory."""

    def __init__(self, job: Job, distributions: dict[str, Distribution], number: int, node: str) -> None:
        super().__init__(job)
        self._distributions = distributions
        self._number = number
        self._node = node

    def source(self, step: p.Source) -> Source:
        source = super().source(step)
        if Capability.FEEDS_BACK in capabilities(step.connector):
            return source
        return PartOfSource(source, self._distributions[step.name], self._number)

    def sink(self, step: p.Sink, *, resumes_after: int | None = None) -> Sink:
        live = live_of(step.connector)
        if isinstance(live, MemorySink):
            step = msgspec.structs.replace(step, connector=memory(live.of_node(self._node)))
        return super().sink(step, resumes_after=resumes_after)


def _with_own_paths(plan: p.Plan, node: str) -> p.Plan:
    """The plan of one of several nodes: each writes into a directory of its own below those of the sinks."""

    def changed(step: p.Step) -> p.Step:
        if not isinstance(step, p.Sink) or Capability.OWNS_PATH not in capabilities(step.connector):
            return step
        path = f"{str(step.connector.options['path']).rstrip('/')}/{node}"
        connector = msgspec.structs.replace(step.connector, options={**step.connector.options, "path": path})
        return msgspec.structs.replace(step, connector=connector)

    return msgspec.structs.replace(plan, steps=tuple(map(changed, plan.steps)))


@contextmanager
def _running_hub(data: Path) -> Iterator[str]:
    """A hub at a free port of this machine, in a thread; gives its URL."""
    try:
        from fordstone.hub.server.serve import HubOptions, serve  # noqa: PLC0415 - a web server, which only hubs need
    except ImportError as error:
        raise NotInstalledError(
            f"a pipeline of two tiers needs a hub, and {error.name} is not installed. Install it: pip install 'fordstone[hub]'."
        ) from error
    ready: Future[str] = Future()
    stop = StopRequest()

    def work() -> None:
        try:
            serve(
                HubOptions(listen="127.0.0.1:0", data=data),
                on_ready=ready.set_result,
                stop_requested=lambda: stop.stop_requested,
            )
        except BaseException as error:  # noqa: BLE001 - raised where the hub is waited for
            if not ready.done():
                ready.set_exception(error)

    thread = threading.Thread(target=work, name="fordstone-hub", daemon=True)
    thread.start()
    try:
        yield ready.result(HUB_START_SECONDS)
    except TimeoutError:
        raise HubError(f"the hub did not start within {HUB_START_SECONDS:.0f} s.") from None
    finally:
        stop.request()
        thread.join(HUB_STOP_SECONDS)
