"""A power cut at every single change of the disk: what was sealed stays, and nothing is ever half there."""

from __future__ import annotations

import contextlib
from random import Random
from typing import Any

import pytest

from fordstone.epochs.manifest import Manifest, decode_manifest
from fordstone.epochs.store import CheckpointStore
from fordstone.protocol.recovery import CannotResume, Resume, StartEmpty, decide_recovery
from fordstone.testing.memory_disk import MemoryDisk, PowerCut

SEEDS = range(12)
EPOCHS = 5


def run_script(disk: MemoryDisk, build: Any, sealed: Any, *, until: Any = EPOCHS) -> Any:
    """Go on from whatever is there, commit up to `until`, collect after each. `sealed` learns what `commit` promised."""
    store = build.open(disk, keep=2)
    resume = recover(store)
    if resume:
        sealed[resume] = store.manifest(resume)
    for epoch in range(resume + 1, until + 1):
        manifest = build.commit(store, epoch)
        sealed[epoch] = manifest
        store.collect()
    return store


def recover(store: CheckpointStore) -> Any:
    """Survey, decide, and insist that a crash alone never damages anything."""
    survey = store.survey(deep=True)
    decision = decide_recovery(survey.checkpoints, survey.cuts)
    assert not isinstance(decision, CannotResume), decision.reason
    if isinstance(decision, StartEmpty):
        return 0
    assert decision.damaged == ()
    assert decision.replay == ()
    return decision.epoch


def count_changes(build: Any) -> Any:
    disk = MemoryDisk()
    run_script(disk, build, {})
    return disk.changes


def check_resumed(store: CheckpointStore, build: Any, sealed: Any) -> None:
    """The newest sealed epoch or the one that was on its way, with the rows it was committed with."""
    newest = max(sealed, default=0)
    resumed = recover(store)
    assert resumed in {newest, newest + 1}
    if resumed:
        manifest = store.manifest(resumed)
        if resumed == newest:
            assert manifest == sealed[newest]
        state = [store.read_run(run).item(0, "n") for run in manifest.states[0].runs]
        assert state == list(range(max(1, resumed - 2), resumed + 1))
        assert store.cuts()[resumed] == manifest.cut


def test_the_script_makes_enough_changes_to_cut_between(build: Any) -> None:
    assert count_changes(build) > 50


@pytest.mark.parametrize("seed", SEEDS)
def test_power_cut_at_every_change_leaves_the_old_or_the_new_checkpoint_whole(build: Any, seed: int) -> None:
    for cut_after in range(count_changes(build)):
        disk = MemoryDisk()
        sealed: dict[int, Manifest] = {}
        disk.cut_after = cut_after
        with pytest.raises(PowerCut):
            run_script(disk, build, sealed)
        disk.crash(Random(seed * 10_007 + cut_after))
        check_resumed(build.open(disk, keep=2), build, sealed)
        # It goes on from there as if nothing had been.
        store = run_script(disk, build, sealed)
        check_resumed(store, build, sealed)
        assert recover(store) == EPOCHS


@pytest.mark.parametrize("seed", SEEDS)
def test_a_checkpoint_that_a_restarted_process_has_seen_survives_a_later_power_cut(build: Any, seed: int) -> None:
    """The kill comes after the rename and before the sync of the directory; the new process must not trust it unsynced."""
    for cut_after in range(count_changes(build)):
        disk = MemoryDisk()
        sealed: dict[int, Manifest] = {}
        disk.cut_after = cut_after
        with pytest.raises(PowerCut):
            run_script(disk, build, sealed)
        disk.kill()
        seen = recover(build.open(disk, keep=2))
        disk.crash(Random(seed * 10_007 + cut_after))
        assert recover(build.open(disk, keep=2)) == seen


@pytest.mark.parametrize("seed", range(60))
def test_many_power_cuts_in_a_row_lose_nothing_that_was_sealed(build: Any, seed: int) -> None:
    rng = Random(seed)
    disk = MemoryDisk()
    sealed: dict[int, Manifest] = {}
    for _ in range(8):
        disk.cut_after = rng.randrange(60)
        with contextlib.suppress(PowerCut):
            run_script(disk, build, sealed, until=max(sealed, default=0) + 3)
        if rng.random() < 0.3:
            disk.kill()
        disk.crash(rng)
        check_resumed(build.open(disk, keep=2), build, sealed)
    run_script(disk, build, sealed, until=max(sealed, default=0) + 2)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_epoch_tried_twice_never_shows_the_cut_of_the_first_try(build: Any, seed: int) -> None:
    """Each try has a position of its own. Whatever line of the log is then lost, no unsealed cut comes to light."""
    log = f"{build.base}/epochs.jsonl"
    for cut_after in range(8, 60):
        disk = MemoryDisk()
        disk.cut_after = cut_after
        tries = 0
        rng = Random(seed * 10_007 + cut_after)
        for _ in range(2):
            try:
                store = build.open(disk)
                for epoch in range(recover(store) + 1, 4):
                    tries += 1
                    store.commit(build.manifest(epoch, (store.write_run(build.frame(tries)),), position=tries))
            except PowerCut:
                disk.crash(rng)
        truth = {epoch: store.manifest(epoch).cut for epoch in (1, 2, 3)}
        lines = disk.read(log).split(b"\n")
        for lost in range(len(lines)):
            disk.damage(log, b"\n".join(b"" if at == lost else line for at, line in enumerate(lines)))
            found = build.open(disk, read_only=True).cuts()
            assert all(found[epoch] == truth[epoch] for epoch in found)


def test_power_cut_while_setting_aside_never_unseals_the_epoch(build: Any) -> None:
    """Epoch 3 is damaged and set aside, then computed again: at every moment it is known to have been sealed."""
    done = False
    cut_after = 0
    while not done:
        for seed in SEEDS:
            disk = MemoryDisk()
            manifest = run_script(disk, build, {}, until=3).manifest(3)
            path = f"{build.base}/manifests/000000000003.json"
            disk.damage(path, disk.read(path)[:-7])
            disk.kill()
            disk.cut_after = cut_after
            with contextlib.suppress(PowerCut):
                store = build.open(disk, keep=2)
                store.set_aside(3, "it is short")
                store.commit(manifest, sealed_before=True)
                done = True
            disk.crash(Random(seed))
            survey = build.open(disk, keep=2).survey(deep=True)
            decision = decide_recovery(survey.checkpoints, survey.cuts)
            assert isinstance(decision, Resume)
            assert decision.next_epoch == 4
            assert decision.epoch == 3 or decision.replay == (3,)
        cut_after += 1
    assert cut_after > 10


class Forgetful(MemoryDisk):
    """Says that it has synced, and has not, for some paths."""

    def __init__(self, operation: str, part: str) -> None:
        super().__init__()
        self.operation, self.part = operation, part
        self.skipped = 0

    def fsync(self, path: str) -> None:
        if self._skips("fsync", path):
            return
        super().fsync(path)

    def fsync_dir(self, path: str) -> None:
        if self._skips("fsync_dir", path):
            return
        super().fsync_dir(path)

    def _skips(self, operation: str, path: str) -> bool:
        skips = operation == self.operation and path.removeprefix("cold-chain/gate-1").startswith(self.part)
        self.skipped += skips
        return skips


@pytest.mark.parametrize(
    ("operation", "part"),
    [
        ("fsync", "/runs"),
        ("fsync", "/manifests"),
        ("fsync", "/epochs"),
        ("fsync_dir", "/runs"),
        ("fsync_dir", "/manifests"),
    ],
)
def test_these_tests_notice_every_sync_that_is_left_out(build: Any, operation: Any, part: Any) -> None:
    for cut_after in range(60, 80):
        for seed in range(20):
            disk = Forgetful(operation, part)
            sealed: dict[int, Manifest] = {}
            disk.cut_after = cut_after
            with contextlib.suppress(PowerCut):
                run_script(disk, build, sealed)
            assert disk.skipped > 0
            disk.crash(Random(seed))
            try:
                check_resumed(build.open(disk, keep=2), build, sealed)
            except (AssertionError, KeyError):
                return
    pytest.fail("a sync was left out and nobody noticed")


def test_a_manifest_in_place_can_always_be_parsed_after_a_power_cut(build: Any) -> None:
    for seed in SEEDS:
        disk = MemoryDisk()
        run_script(disk, build, {}, until=2)
        disk.crash(Random(seed))
        for name in disk.list(f"{build.base}/manifests"):
            data = disk.read(f"{build.base}/manifests/{name}")
            assert decode_manifest(data, pipeline=build.pipeline, node=build.node, epoch=int(name[:12])).epoch == int(
                name[:12]
            )
