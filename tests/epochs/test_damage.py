"""Damage of every kind to every file of a checkpoint: always noticed, and the checkpoint before it is used."""

from __future__ import annotations

from typing import Any

import msgspec
import polars as pl
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from tests.examples import examples

from fordstone.epochs.manifest import MANIFEST_VERSION, Manifest, cut_of, decode_manifest, encode_cut, encode_manifest
from fordstone.epochs.run_file import COMPRESSIONS, decode_run, digest_of, encode_run
from fordstone.epochs.store import CheckpointStore
from fordstone.errors import CheckpointError, DamagedError
from fordstone.protocol.recovery import CannotResume, Resume, decide_recovery
from fordstone.state.base import RunRef
from fordstone.storage.journal import seal, unseal
from fordstone.testing.memory_disk import MemoryDisk


def sealed(kind: str, body: bytes) -> bytes:
    return seal(kind, msgspec.Raw(body))


def damaged_forms(data: Any) -> Any:
    """Every byte with one bit flipped, every shorter length, one byte more, and all zeros."""
    for at in range(len(data)):
        yield f"bit flipped at {at}", data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :]
        yield f"cut at {at}", data[:at]
        yield f"cut at {at} and padded with zeros", data[:at] + bytes(len(data) - at)
    yield "one byte more", data + b"\n"
    yield "one byte more before", b" " + data


def judge(disk: MemoryDisk, build: Any, *, deep: Any = True) -> Any:
    survey = build.open(disk, read_only=True).survey(deep=deep)
    return decide_recovery(survey.checkpoints, survey.cuts)


@pytest.fixture
def three(disk: MemoryDisk, build: Any) -> Any:
    store = build.open(disk)
    for epoch in (1, 2, 3):
        build.commit(store, epoch)
    return store


def test_any_damage_to_the_newest_manifest_is_noticed_and_the_one_before_is_used(
    disk: MemoryDisk, build: Any, three: CheckpointStore
) -> None:
    path = f"{build.base}/manifests/000000000003.json"
    whole = disk.read(path)
    for what, data in damaged_forms(whole):
        if data == whole:
            continue
        disk.damage(path, data)
        decision = judge(disk, build, deep=False)
        assert isinstance(decision, Resume), what
        assert (decision.epoch, decision.replay) == (2, (3,)), what
        with pytest.raises(DamagedError, match="checkpoint 3 of pipeline cold-chain is damaged"):
            three.manifest(3)
    disk.damage(path, whole)
    assert judge(disk, build) == Resume(epoch=3, where="local")


def test_any_damage_to_a_run_is_noticed_and_the_checkpoint_before_is_used(
    disk: MemoryDisk, build: Any, three: CheckpointStore
) -> None:
    (run,) = three.manifest(3).segments[0].runs
    path = f"{build.base}/runs/{run.digest}"
    whole = disk.read(path)
    for what, data in damaged_forms(whole):
        if data == whole:
            continue
        disk.damage(path, data)
        decision = judge(disk, build)
        assert isinstance(decision, Resume), what
        assert (decision.epoch, decision.replay) == (2, (3,)), what
        with pytest.raises(DamagedError, match="is damaged"):
            three.read_run(run)
        if len(data) != len(whole):
            assert judge(disk, build, deep=False) == decision, f"{what} changes the size, so a look at sizes must tell"


@pytest.mark.slow
def test_damage_to_the_cut_log_hides_cuts_but_never_changes_one(
    disk: MemoryDisk, build: Any, three: CheckpointStore
) -> None:
    truth = three.cuts()
    path = f"{build.base}/epochs.jsonl"
    whole = disk.read(path)
    for what, data in damaged_forms(whole):
        disk.damage(path, data)
        found = three.cuts()
        assert all(found[epoch] == truth[epoch] for epoch in found), what
        assert three.cut(2) == truth[2], f"{what}: the manifest has it too"
        assert judge(disk, build, deep=False) == Resume(epoch=3, where="local")


def test_a_missing_run_is_noticed_without_reading_anything(
    disk: MemoryDisk, build: Any, three: CheckpointStore
) -> None:
    (run,) = three.manifest(3).segments[0].runs
    disk.remove(f"{build.base}/runs/{run.digest}")
    decision = judge(disk, build, deep=False)
    assert isinstance(decision, Resume)
    assert decision.epoch == 2
    with pytest.raises(DamagedError, match="is missing"):
        three.read_run(run)


def test_a_manifest_and_its_cut_both_gone_stop_the_node_and_name_the_epoch(
    disk: MemoryDisk, build: Any, three: CheckpointStore
) -> None:
    path = f"{build.base}/manifests/000000000003.json"
    disk.damage(path, disk.read(path)[:-1])
    lines = disk.read(f"{build.base}/epochs.jsonl").split(b"\n")
    disk.damage(f"{build.base}/epochs.jsonl", b"\n".join(line for line in lines if b'"epoch":3' not in line))
    decision = judge(disk, build)
    assert isinstance(decision, CannotResume)
    assert decision.missing_cuts == ((3, 3),)
    assert "epochs 3 are needed" in decision.reason


def test_a_run_shared_by_all_checkpoints_takes_all_of_them_down_and_everything_is_rebuilt(
    disk: MemoryDisk, build: Any, three: CheckpointStore
) -> None:
    shared = three.manifest(1).states[0].runs[0]
    assert shared in three.manifest(3).states[0].runs
    disk.damage(f"{build.base}/runs/{shared.digest}", b"")
    assert judge(disk, build, deep=False) == Resume(
        epoch=0, where="empty", replay=(1, 2, 3), damaged=judge(disk, build, deep=False).damaged
    )


def test_a_manifest_under_another_epochs_name_is_not_believed(
    disk: MemoryDisk, build: Any, three: CheckpointStore
) -> None:
    disk.damage(f"{build.base}/manifests/000000000003.json", disk.read(f"{build.base}/manifests/000000000002.json"))
    with pytest.raises(DamagedError, match="under a wrong name"):
        three.manifest(3)


def test_a_bad_sector_counts_as_damage(disk: MemoryDisk, build: Any, three: CheckpointStore) -> None:
    disk.fail_next("read", "bad-sector", after=1)
    decision = judge(disk, build, deep=False)
    assert disk.failures == 1
    assert isinstance(decision, Resume)
    assert decision.epoch == 3
    assert len(decision.damaged) == 1


def test_a_newer_manifest_stops_the_survey_instead_of_being_passed_over(
    disk: MemoryDisk, build: Any, three: CheckpointStore
) -> None:
    newer = msgspec.structs.replace(three.manifest(3), version=MANIFEST_VERSION + 1)
    disk.damage(f"{build.base}/manifests/000000000003.json", encode_manifest(newer))
    with pytest.raises(CheckpointError, match=f"version {MANIFEST_VERSION + 1}, this Fordstone reads up to") as caught:
        three.survey()
    assert not isinstance(caught.value, DamagedError)


def test_a_newer_manifest_may_have_fields_that_are_not_known_yet(build: Any) -> None:
    body = b'{"version":%d,"something":{"new":[1,2,3]}}' % (MANIFEST_VERSION + 1)
    with pytest.raises(CheckpointError, match="written by a newer one"):
        decode_manifest(sealed("manifest", body), pipeline=build.pipeline, node=build.node, epoch=1)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def read_hostile(data: Any, build: Any) -> Any:
    """Only the store's own errors may come out."""
    try:
        return decode_manifest(data, pipeline=build.pipeline, node=build.node, epoch=3)
    except CheckpointError:
        return None


@given(data=st.binary(max_size=300))
@examples(100, HealthCheck.function_scoped_fixture)
def test_hostile_bytes_are_never_a_manifest_nor_a_cut(build: Any, data: Any) -> None:
    assert read_hostile(data, build) is None
    assert read_hostile(sealed("manifest", data), build) is None
    for line in (data, sealed("cut", data)):
        with pytest.raises(DamagedError):
            cut_of(unseal(line))


@given(path=st.lists(st.integers(0, 50), max_size=8), value=JSON)
@examples(400, HealthCheck.function_scoped_fixture)
def test_a_forged_value_anywhere_in_a_manifest_is_refused_or_is_a_proper_value(
    build: Any, path: Any, value: Any
) -> None:
    good = RunRef(digest="a" * 64, size_bytes=10, rows=1)
    tree = msgspec.to_builtins(build.manifest(3, (good, good), (good,)))
    holder: Any = None
    here, key = tree, None
    for step in path:
        if isinstance(here, dict) and here:
            holder, key = here, sorted(here)[step % len(here)]
        elif isinstance(here, list | tuple) and here:
            holder, key = here, step % len(here)
        else:
            break
        here = holder[key]
    if isinstance(holder, dict):
        holder[key] = value
    manifest = read_hostile(sealed("manifest", msgspec.json.encode(tree)), build)
    if manifest is not None:
        assert msgspec.convert(msgspec.to_builtins(manifest), Manifest) == manifest
        assert all(set(run.digest) <= set("0123456789abcdef") and len(run.digest) == 64 for run in manifest.runs())


@pytest.mark.parametrize(
    "digest", ["", "../../../etc/passwd", "A" * 64, "a" * 63, "a" * 65, "a" * 63 + "/", "\u0660" * 64]
)
def test_a_run_digest_that_is_no_digest_never_becomes_a_path(build: Any, digest: Any) -> None:
    manifest = build.manifest(3, (RunRef(digest=digest, size_bytes=1, rows=1),))
    with pytest.raises(DamagedError, match="impossible run"):
        decode_manifest(encode_manifest(manifest), pipeline=build.pipeline, node=build.node, epoch=3)
    with pytest.raises(DamagedError, match="impossible run"):
        cut_of(unseal(encode_cut(build.cut(3, 0, (RunRef(digest=digest, size_bytes=1, rows=1),)))))


def test_deeply_nested_json_is_damage_and_not_a_crash(build: Any) -> None:
    deep = b"[" * 100_000
    assert read_hostile(sealed("manifest", b'{"version":1,"pipeline":' + deep), build) is None
    assert read_hostile(sealed("manifest", b'{"other":' + deep), build) is None


@given(data=st.binary(max_size=200))
def test_bytes_that_are_no_arrow_are_damage_even_under_the_right_digest(data: Any) -> None:
    with pytest.raises(DamagedError):
        decode_run(data, RunRef(digest=digest_of(data), size_bytes=len(data), rows=2))


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_wrong_number_of_rows_is_noticed(build: Any, compression: Any) -> None:
    ref, data = encode_run(build.frame(1), compression)
    with pytest.raises(DamagedError, match="has 2 rows, the manifest says 3"):
        decode_run(bytes(data), msgspec.structs.replace(ref, rows=3))


def test_nothing_is_parsed_before_size_and_digest_are_checked(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ref, data = encode_run(build.frame(1), "lz4")
    monkeypatch.setattr(pl, "read_ipc_stream", lambda *_: pytest.fail("parsed"))
    with pytest.raises(DamagedError, match=r"has \d+ bytes, the manifest says"):
        decode_run(bytes(data)[:-1], ref)
    with pytest.raises(DamagedError, match="has other bytes"):
        decode_run(bytes(data)[:-1] + b"x", ref)


def test_a_cut_survives_its_line(build: Any) -> None:
    assert cut_of(unseal(encode_cut(build.cut(7)))) == build.cut(7)
