"""`fordstone connectors`: the list and the descriptions are true of the kinds."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.cli.place import commands
from tests.docs.blocks import REPOSITORY
from tests.docs.test_docs import anchors_of

from fordstone import Pipeline
from fordstone.cli.connectors import example
from fordstone.connectors.base import About, ConnectorKind, ConnectorSpec, Delivery
from fordstone.connectors.registry import _OURS, _REGISTERED, kind_named

INTERNAL = {"center", "control", "hub", "inline"}
"""Kinds that no user names: the functions of streams make them."""
DESCRIBED = sorted(set(_OURS) - INTERNAL)


def described(place: Path, *names: str) -> str:
    with commands(place) as run:
        found = run("connectors", *names)
    assert found.exit_code == 0, found.output
    return str(found.output)


def test_every_connector_that_users_name_is_listed_with_its_guarantees(tmp_path: Path):
    lines = described(tmp_path).splitlines()
    listed = {line.split()[0]: re.split(r"  +", line) for line in lines[1 : 1 + len(DESCRIBED)]}
    assert sorted(listed) == DESCRIBED
    assert listed["files"][1:3] == ["exactly once", "exactly once"]
    assert listed["stdout"][1:3] == ["-", "at least once"]


@pytest.mark.parametrize("name", DESCRIBED)
def test_the_examples_of_a_description_build_a_pipeline(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    kind = kind_named(name)
    about = kind.about
    assert about is not None
    p = Pipeline("examples")
    source = example(about.source or 'memory([{"device": "a"}])', kind)
    rows = p.source("rows", source, schema={"device": "string"})
    rows.sink("results", example(about.sink or "stdout()", kind))
    assert {step.connector.kind for step in p.plan().steps if hasattr(step, "connector")} >= {name}


@pytest.mark.parametrize("name", DESCRIBED)
def test_the_page_of_a_description_exists(name: str):
    about = kind_named(name).about
    assert about is not None
    page, _, anchor = about.page.partition("#")
    assert (REPOSITORY / "docs" / page).is_file()
    assert not anchor or anchor in anchors_of(REPOSITORY / "docs" / page)


def test_one_connector_is_described_with_what_it_needs(tmp_path: Path):
    text = described(tmp_path, "delta")
    assert "sink    exactly once" in text
    assert "It needs deltalake (installed): pip install 'fordstone[delta]'" in text
    assert 'rows.sink("results", delta("out/devices"))' in text


def test_what_is_not_installed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert "deltalake (not installed)" in described(tmp_path, "delta")
    (line,) = [line for line in described(tmp_path).splitlines() if line.startswith("delta ")]
    assert "fordstone[delta]" in line


def test_a_kind_without_a_description_is_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Silent(ConnectorKind):
        pass

    monkeypatch.setitem(_REGISTERED, "silent", Silent)
    assert "silent" not in described(tmp_path)
    with commands(tmp_path) as run:
        found = run("connectors", "silent")
    assert (found.exit_code, "has no description" in found.output + found.stderr) == (2, True)


def rain(amount: int) -> ConnectorSpec:
    return ConnectorSpec(kind="rain", options={"amount": amount})


class Rain(ConnectorKind):
    """As another package would offer it."""

    about = About(summary="the weather", source="rain(5)", guarantee="None.")

    def source_delivery(self, spec: ConnectorSpec) -> Delivery:
        return Delivery.AT_MOST_ONCE if spec.options == {"amount": 5} else Delivery.EXACTLY_ONCE


def test_a_kind_of_another_package_is_described_with_the_names_of_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, __name__, SimpleNamespace(rain=rain))
    monkeypatch.setitem(_REGISTERED, "rain", Rain)
    assert re.search(r"^rain +at most once +- +the weather$", described(tmp_path), re.MULTILINE)
    assert f"from {__name__} import rain" in described(tmp_path, "rain")


def test_a_kind_whose_example_is_wrong_is_left_out_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Rain, "about", About(summary="the weather", source="snow(5)", guarantee="None."))
    monkeypatch.setitem(_REGISTERED, "rain", Rain)
    listed = described(tmp_path)
    assert re.search(r"warning: the example 'snow\(5\)' of .*Rain is wrong: name 'snow' is not defined", listed)
    assert "files  " in listed
    with commands(tmp_path) as run:
        assert run("connectors", "rain").exit_code == 2


def test_an_unknown_connector_is_an_error_that_names_the_known_ones(tmp_path: Path):
    with commands(tmp_path) as run:
        found = run("connectors", "kafak")
    assert found.exit_code == 2
    assert "unknown connector 'kafak'. Known here: center" in found.stderr
