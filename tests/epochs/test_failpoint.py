"""Kill -9 at every failpoint of the store, on a real disk, and go on afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.epochs.child_commits import Commits
from tests.faults.process import Ended, Process

from fordstone.errors import ConfigError
from fordstone.protocol.recovery import Resume, StartEmpty, decide_recovery
from fordstone.storage.disk import OsDisk
from fordstone.storage.failpoint import FAILPOINTS, KillAt, NoFailpoints, parse_failpoints

IN_THE_STORE = [name for name in FAILPOINTS if not name.startswith("sink.")]
EPOCHS = 6


def run_child(root: Path, failpoint: str) -> Ended:
    job = Commits(root=str(root), epochs=EPOCHS)
    return Process(root.parent, job, failpoint=failpoint, module="tests.epochs.child_commits").ended()


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_THE_STORE)
def test_a_process_killed_there_leaves_every_sealed_epoch_and_goes_on(tmp_path: Path, build: Any, name: Any) -> None:
    hits = tmp_path / "hits"
    root = tmp_path / "state"
    killed = run_child(root, f"{name}:2@{hits}")
    assert killed.killed, killed.errors
    assert hits.read_text().splitlines() == [name, name]
    sealed: list[Any] = killed.lines
    store = build.open(OsDisk(root), keep=2)
    survey = store.survey(deep=True)
    decision = decide_recovery(survey.checkpoints, survey.cuts)
    newest = max(sealed, default=0)
    if isinstance(decision, Resume):
        assert decision.epoch in {newest, newest + 1}
        assert decision.damaged == ()
    else:
        assert decision == StartEmpty()
        assert newest == 0
    again = run_child(root, "")
    assert again.code == 0, again.errors
    assert build.open(OsDisk(root), keep=2).verify().whole
    assert build.open(OsDisk(root), keep=2).epochs()[-1] == EPOCHS


def test_a_failpoint_is_parsed_from_its_text() -> None:
    assert isinstance(parse_failpoints(""), NoFailpoints)
    assert isinstance(parse_failpoints("  "), NoFailpoints)
    for text, count, hits in [
        ("manifest.renamed", 1, None),
        ("manifest.renamed:3", 3, None),
        ("manifest.renamed:3@/x/y", 3, Path("/x/y")),
        ("manifest.renamed@/x:y", 1, Path("/x:y")),
    ]:
        found = parse_failpoints(text)
        assert isinstance(found, KillAt)
        assert (found.name, found.count, found.hits) == ("manifest.renamed", count, hits)


@pytest.mark.parametrize(
    "text",
    ["nowhere", "nowhere:1", ":1", "run.created:", "run.created:0", "run.created:-1", "run.created:x", "run.created:²"],
)
def test_a_failpoint_that_makes_no_sense_is_refused(text: Any) -> None:
    with pytest.raises(ConfigError, match="failpoint"):
        parse_failpoints(text)


def test_other_failpoints_are_passed(tmp_path: Path) -> None:
    failpoint = KillAt("run.created", 1, hits=tmp_path / "hits")
    failpoint.hit("run.synced")
    NoFailpoints().hit("run.created")
    assert not (tmp_path / "hits").exists()


def test_hits_before_the_last_are_counted_and_survived(tmp_path: Path) -> None:
    failpoint = KillAt("run.created", 3, hits=tmp_path / "hits")
    failpoint.hit("run.created")
    failpoint.hit("run.created")
    assert (tmp_path / "hits").read_text() == "run.created\nrun.created\n"
