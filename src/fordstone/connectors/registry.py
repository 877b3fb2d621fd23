"""From a `ConnectorSpec` to the live source or sink.

Our kinds are a constant table of import paths. Others are looked up when one is asked for by name: first those that this process has
registered, then the entry points of installed packages.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Final

from fordstone.connectors.base import (
    Capability,
    ConnectorKind,
    ConnectorSpec,
    Delivery,
    OpenContext,
    PartWriter,
    Sink,
    SinkStream,
    Source,
    SourceOptions,
    SparkConnector,
)
from fordstone.errors import ConfigError
from fordstone.plan.ids import checked_name

ENTRY_POINTS: Final = "fordstone.connectors"
"""The entry point group in which other packages offer their kinds."""

_CENTER: Final = OpenContext()
"""The context of a process that is no node: the center, an executor of Spark, a test."""
_OURS: Final = {
    "center": ("fordstone.connectors.hub", "CenterKind"),
    "control": ("fordstone.connectors.control", "ControlKind"),
    "delta": ("fordstone.connectors.delta.kind", "DeltaKind"),
    "files": ("fordstone.connectors.files.kind", "FilesKind"),
    "function": ("fordstone.connectors.function", "FunctionKind"),
    "generator": ("fordstone.connectors.generator", "GeneratorKind"),
    "http_in": ("fordstone.connectors.http.kind", "HttpInKind"),
    "http_out": ("fordstone.connectors.http.kind", "HttpOutKind"),
    "hub": ("fordstone.connectors.hub", "HubKind"),
    "inline": ("fordstone.connectors.lookup_table", "InlineKind"),
    "kafka": ("fordstone.connectors.kafka.kind", "KafkaKind"),
    "memory": ("fordstone.connectors.memory", "MemoryKind"),
    "mqtt": ("fordstone.connectors.mqtt.kind", "MqttKind"),
    "postgres": ("fordstone.connectors.postgres.kind", "PostgresKind"),
    "redis_stream": ("fordstone.connectors.redis.kind", "RedisStreamKind"),
    "socket_lines": ("fordstone.connectors.socket_lines", "SocketLinesKind"),
    "stdout": ("fordstone.connectors.stdout", "StdoutKind"),
}

_REGISTERED: Final[dict[str, type[ConnectorKind]]] = {}
"""The kinds that were registered in this process."""


def register(kind: str, cls: type[ConnectorKind]) -> None:
    """Make a kind of connector known in this process: `register("sqlite", SqliteKind)`. A second call replaces the first.

    Other processes do not know it: a package that is installed there offers it as an entry point.
    """
    if not (isinstance(cls, type) and issubclass(cls, ConnectorKind)):
        raise ConfigError(f"register({kind!r}, {cls!r}): that is not a class that derives from ConnectorKind.")
    if checked_name(kind, "connector") in _OURS:
        raise ConfigError(f"register({kind!r}): Fordstone has a connector of this name. Choose another.")
    _REGISTERED[kind] = cls


def kinds() -> tuple[str, ...]:
    """Every kind that can be opened here, registered ones and installed packages included."""
    return tuple(sorted({*_OURS, *_REGISTERED, *(point.name for point in entry_points(group=ENTRY_POINTS))}))


def kind_named(name: str) -> type[ConnectorKind]:
    """The class of a kind; `ConfigError` if there is none, or it cannot be imported."""
    return type(_kind(ConnectorSpec(kind=name, options={})))


def source_delivery(spec: ConnectorSpec) -> Delivery:
    """The strongest delivery of the source. Touches no system: used while the pipeline is built."""
    return _kind(spec).source_delivery(spec)


def sink_delivery(spec: ConnectorSpec) -> Delivery:
    """The strongest delivery of the sink. Touches no system: used while the pipeline is built."""
    return _kind(spec).sink_delivery(spec)


def fences(spec: ConnectorSpec) -> bool:
    """Whether the sink refuses a writer of an older generation. Touches no system."""
    return _kind(spec).fences(spec)


def capabilities(spec: ConnectorSpec) -> frozenset[Capability]:
    """What the spec's kind declares that it does."""
    return _kind(spec).capabilities


def why_never_all_there(spec: ConnectorSpec) -> str | None:
    """Why the source cannot be read up to what is there now; None: it can. Touches no system."""
    return _kind(spec).why_never_all_there(spec)


def place(spec: ConnectorSpec) -> str | None:
    """The place that a sink of this spec has to itself; None: it has none. Touches no system."""
    kind = _kind(spec) if "path" in spec.options else None
    return kind.place(spec) if kind is not None and Capability.OWNS_PATH in kind.capabilities else None


def reads_from(spec: ConnectorSpec, written: ConnectorSpec) -> bool:
    """Whether a source would read what a sink writes. Touches no system."""
    return spec.kind == written.kind and _kind(spec).reads_from(spec, written)


def describe_source(spec: ConnectorSpec) -> Mapping[str, str]:
    """What `explain` shows of a source with event time. Touches no system."""
    return _kind(spec).describe_source(spec)


def first_look(spec: ConnectorSpec) -> str | None:
    """The schema that the source probably has, as text that can be pasted; None: unknown."""
    return _kind(spec).first_look(spec)


def earlier_output(spec: ConnectorSpec) -> str | None:
    """What the sink already contains; None: nothing."""
    return _kind(spec).earlier_output(spec)


def open_source(spec: ConnectorSpec, options: SourceOptions, context: OpenContext = _CENTER) -> Source:
    """Make the live source."""
    return _kind(spec).open_source(spec, options, context)


def spark_connector(
    spec: ConnectorSpec, options: SourceOptions, context: OpenContext = _CENTER
) -> SparkConnector | None:
    """The connector of Spark's own that reads the source on Spark; None: tasks read it. Touches no system."""
    return _kind(spec).spark_connector(spec, options, context)


def open_sink(spec: ConnectorSpec, stream: SinkStream, context: OpenContext = _CENTER) -> Sink:
    """Make the live sink."""
    return _kind(spec).open_sink(spec, stream, context)


def open_parts(spec: ConnectorSpec, stream: SinkStream, context: OpenContext = _CENTER) -> PartWriter | None:
    """Make a writer of parts for the sink, where its kind has one."""
    return _kind(spec).open_parts(spec, stream, context)


def _kind(spec: ConnectorSpec) -> ConnectorKind:
    if spec.kind in _OURS:
        module, name = _OURS[spec.kind]
        found = getattr(import_module(module), name)
    elif spec.kind in _REGISTERED:
        found = _REGISTERED[spec.kind]
    else:
        found = _installed(spec.kind)
    if not (isinstance(found, type) and issubclass(found, ConnectorKind)):
        raise ConfigError(
            f"connector {spec.kind!r}: its entry point gives {found!r}, which is no ConnectorKind. Report it to the author of the package."
        )
    return found()


def _installed(kind: str) -> object:
    points = tuple(entry_points(group=ENTRY_POINTS, name=kind))
    if not points:
        raise ConfigError(
            f"unknown connector {kind!r}. Known here: {', '.join(kinds())}.\n"
            f"Register its class in this process with fordstone.connectors.register({kind!r}, ...), or install a package that offers it in the "
            f"entry point group {ENTRY_POINTS!r}."
        )
    try:
        return points[0].load()
    except Exception as error:
        raise ConfigError(
            f"connector {kind!r} ({points[0].value}) cannot be imported: {error}. Install what it needs."
        ) from error
