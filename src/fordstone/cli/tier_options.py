"""One half of a pipeline of two tiers, for a command: which plan it is, where its hub is, and which options go with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Literal

import click
from click.core import ParameterSource

from fordstone.cli.errors import Misuse
from fordstone.cli.help import TierOption
from fordstone.cli.hub_options import address_of

if TYPE_CHECKING:
    from fordstone.edge.agent.health import HealthReporter
    from fordstone.hub.client.address import HubAddress
    from fordstone.plan.plan import Plan

Part = Literal["edge", "center"]
HUB: Final = frozenset({"hub_url", "token_file", "ca"})
OUTBOX: Final = frozenset({"outbox_max", "outbox_full", "hub_state", "take_over"})
CENTER_NODE: Final = "center"
HEALTH_TIMEOUT_S: Final = 5.0


def hub_of(options: dict[str, Any], part: Part) -> HubAddress:
    """Take the options of the hub out of all options, and make an address of them."""
    given = {name: options.pop(name) for name in HUB}
    return address_of(**given, why=f"the {part} part of a pipeline")


def half_of(plan: Plan, part: Part, hub: HubAddress) -> Plan:
    """The half of a plan that runs at this tier, told where the hub is."""
    from fordstone.planner.split import placed, split

    tiers = split(plan)
    half = tiers.edge if part == "edge" else tiers.center
    if half is None:
        raise Misuse(
            f"pipeline {plan.pipeline} has no {part} part: nothing in it goes to_center(). `fordstone run FILE` runs it."
        )
    return placed(half, hub)


def refuse_tier_options(context: click.Context, allowed: frozenset[str], why: str) -> None:
    """Refuse options of two tiers that were typed and would be dropped silently. A variable may be set for other commands."""
    for option in context.command.params:
        if not isinstance(option, TierOption) or option.name is None or option.name in allowed:
            continue
        if context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE:
            raise Misuse(f"{option.opts[0]}: {why}")


def given(context: click.Context, name: str) -> bool:
    """Whether an option was given rather than left at its default."""
    return context.get_parameter_source(name) is not ParameterSource.DEFAULT


@contextmanager
def health_told(plan: Plan, node: str, hub: HubAddress) -> Iterator[HealthReporter]:
    """Tell the hub how this node is, for the time of the block."""
    import fordstone
    from fordstone.edge.agent.health import HealthReporter
    from fordstone.hub.client.client import HubClient
    from fordstone.runtime.clock import SystemClock

    client = HubClient(hub, timeout_s=HEALTH_TIMEOUT_S)
    reporter = HealthReporter(
        client, node=node, pipeline=plan.pipeline, clock=SystemClock(), version=fordstone.__version__
    )
    try:
        with reporter:
            yield reporter
    finally:
        client.close()
