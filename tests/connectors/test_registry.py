"""From a kind's name to its connector, ours or an installed package's."""

import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import pytest

from fordstone.connectors import files, generator, register, registry
from fordstone.connectors.base import ConnectorKind, ConnectorSpec, Delivery, SinkStream, SourceOptions
from fordstone.errors import ConfigError, FordstoneError
from fordstone.lang.schema import Schema

SCHEMA = Schema.of({"n": "bigint"})


class Installed(ConnectorKind):
    """As another package would offer it."""

    def source_delivery(self, spec: ConnectorSpec) -> Delivery:
        return Delivery.AT_MOST_ONCE


class NoKind:
    pass


@pytest.fixture
def offers(monkeypatch: pytest.MonkeyPatch) -> None:
    points = {
        "rain": f"{__name__}:Installed",
        "odd": f"{__name__}:NoKind",
        "broken": "no_such_package.connector:Kind",
    }

    def entry_points(**wanted: Any) -> EntryPoints:
        every = EntryPoints(EntryPoint(name, value, registry.ENTRY_POINTS) for name, value in points.items())
        return every.select(**wanted)

    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__, _this()))
    monkeypatch.setattr(registry, "entry_points", entry_points)
    monkeypatch.setattr(registry, "_REGISTERED", {})  # pages of the documentation, run in this process, register theirs


def _this() -> Any:
    import types

    module = types.ModuleType(__name__)
    module.__dict__.update(Installed=Installed, NoKind=NoKind)
    return module


def test_an_unknown_kind_is_an_error_that_lists_those_there_are(offers: None) -> None:
    with pytest.raises(
        ConfigError,
        match=r"unknown connector 'kafkaesque'. Known here: broken, center, control, delta, files, function, generator, hub, inline, kafka, memory, odd, rain, stdout",
    ):
        registry.source_delivery(ConnectorSpec(kind="kafkaesque"))


def test_a_kind_of_an_installed_package_is_found_by_its_name(offers: None) -> None:
    rain = ConnectorSpec(kind="rain", options={"mm": 3})
    assert registry.source_delivery(rain) is Delivery.AT_MOST_ONCE
    with pytest.raises(ConfigError, match="'rain' cannot be written to"):
        registry.sink_delivery(rain)
    with pytest.raises(ConfigError, match="'rain' cannot be written to"):
        registry.open_sink(rain, SinkStream(step="s", schema=SCHEMA))


def test_an_installed_kind_that_cannot_be_used_is_an_error_that_says_why(offers: None) -> None:
    with pytest.raises(ConfigError, match=r"'broken' .* cannot be imported: No module named 'no_such_package'"):
        registry.source_delivery(ConnectorSpec(kind="broken"))
    with pytest.raises(ConfigError, match=r"'odd'.* no ConnectorKind"):
        registry.source_delivery(ConnectorSpec(kind="odd"))


def test_delivery_is_described_without_touching_the_system() -> None:
    assert registry.source_delivery(files("/no/such/place/*.jsonl")) is Delivery.EXACTLY_ONCE
    assert registry.sink_delivery(files("/no/such/place", format="csv")) is Delivery.EXACTLY_ONCE
    with pytest.raises(ConfigError, match="'generator' cannot be written to"):
        registry.sink_delivery(generator())


def test_options_that_were_tampered_with_in_a_plan_are_checked_again() -> None:
    with pytest.raises(ConfigError, match="colour"):
        registry.source_delivery(ConnectorSpec(kind="files", options={"path": "x.jsonl", "colour": "red"}))
    with pytest.raises(ConfigError, match="generator"):
        registry.open_source(
            ConnectorSpec(kind="generator", options={"rows": "many"}), SourceOptions(schema=SCHEMA, bounded=True)
        )


def test_importing_connectors_brings_in_no_package_that_the_edge_lacks() -> None:
    script = "import sys, fordstone.connectors; print(sorted({'pyarrow', 'pandas', 'fsspec', 'pyspark', 'pytest', 'deltalake'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


class Never(ConnectorKind):
    """A kind of this process."""

    def source_delivery(self, spec: ConnectorSpec) -> Delivery:
        return Delivery.EXACTLY_ONCE


def test_a_kind_may_be_registered_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTERED", {})
    spec = ConnectorSpec(kind="never", options={})
    with pytest.raises(
        ConfigError, match=r"unknown connector 'never'.*\n.*fordstone.connectors.register\('never', ...\)"
    ):
        registry.source_delivery(spec)
    register("never", Never)
    assert registry.source_delivery(spec) is Delivery.EXACTLY_ONCE
    assert "never" in registry.kinds()


@pytest.mark.parametrize(
    ("kind", "cls", "says"),
    [
        ("files", Never, "has a connector of this name"),
        ("other", dict, "not a class that derives from ConnectorKind"),
        ("no name", Never, "no name"),
    ],
)
def test_a_kind_that_cannot_be_is_not_registered(kind: str, cls: Any, says: str) -> None:
    with pytest.raises(FordstoneError, match=says):
        register(kind, cls)
