"""Put together the fused steps of a host: the edge engine's chain of our operators, whose output is packed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from fordstone.edge.chain import Chain, Link, Onward
from fordstone.model import plan as p
from fordstone.operators.factory import make_feeder, make_operator
from fordstone.operators.operator import MAIN
from fordstone.operators.rowwise import TagBranch
from fordstone.operators.setting import OperatorSetting
from fordstone.spark.packing import Packer
from fordstone.spark.stages import Host, Stages


@dataclass(frozen=True, slots=True)
class ToKeyed:
    """Rows for a keyed step."""

    packer: Packer
    tag: int
    keys: Sequence[str]

    def send(self, frame: pl.DataFrame, *, late: bool) -> None:
        """Pack them by key."""
        self.packer.keyed(self.tag, self.keys, frame, late=late)


@dataclass(frozen=True, slots=True)
class ToSink:
    """Rows for a sink."""

    packer: Packer
    tag: int

    def send(self, frame: pl.DataFrame, *, late: bool) -> None:  # noqa: ARG002 - a sink takes all
        """Pack them."""
        self.packer.out(self.tag, frame)


def make_chain(stages: Stages, host: Host, setting: OperatorSetting, packer: Packer) -> Chain:
    """The chain of one host, with fresh operators."""
    plan, members = stages.plan, set(host.members)
    links: list[Link] = []
    for name in host.members:
        step = plan.step(name)
        inside: dict[str, list[str]] = defaultdict(list)
        onward: dict[str, list[Onward]] = defaultdict(list)
        more: list[Link] = []
        if isinstance(step, p.Sink):
            onward[MAIN].append(ToSink(packer, stages.sinks.index(name)))
        for consumer, index, stream in plan.feeds(name):
            if isinstance(consumer, p.KeyedStep):
                out = ToKeyed(packer, stages.tag_of(consumer.name), (consumer.shuffles or ())[index])
                feeder = make_feeder(consumer, index, setting)
                if feeder is None:
                    onward[stream.port].append(out)
                else:
                    fed = f"{consumer.name}/feed{index}/{name}"
                    inside[stream.port].append(fed)
                    more.append(Link(fed, feeder, onward={MAIN: [out]}))
            elif consumer.name not in members:
                raise AssertionError(f"{consumer.name} is behind {name}, but not with it")
            elif isinstance(consumer, p.Union) and consumer.name in setting.with_ids:
                for branch, taken in enumerate(consumer.streams):
                    tag = f"{consumer.name}/branch{branch}/{name}"
                    if taken == stream and tag not in inside[stream.port]:
                        inside[stream.port].append(tag)
                        more.append(Link(tag, TagBranch(branch), links={MAIN: [consumer.name]}))
            else:
                inside[stream.port].append(consumer.name)
        links += [Link(name, make_operator(step, setting), links=inside, onward=onward), *more]
    return Chain(links, [host.name], subtask=0)
