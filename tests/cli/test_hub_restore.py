"""`fordstone hub restore` on a data directory."""

from __future__ import annotations

import contextlib
from pathlib import Path

from tests.cli.place import Invoke
from tests.hub.started import started

from fordstone.hub.store.sqlite import SqliteStore
from fordstone.protocol.restored import is_former
from fordstone.storage.disk import OsDisk


def ids(data: Path) -> tuple[str, bool]:
    with contextlib.closing(SqliteStore(data / "log.sqlite")) as store, store.snapshot() as log:
        return log.log_id(), log.was_restored()


def test_a_restored_log_gets_a_new_id_of_the_same_family(invoke: Invoke, tmp_path: Path):
    before, restored = ids(tmp_path)
    assert not restored
    result = invoke("hub", "restore", "--data", str(tmp_path))
    assert result.exit_code == 0, result.output
    after, restored = ids(tmp_path)
    assert is_former(before, after)
    assert restored
    assert after in result.output


def test_the_data_of_a_running_hub_is_not_changed(invoke: Invoke, tmp_path: Path):
    before = ids(tmp_path)
    with contextlib.closing(OsDisk(tmp_path)) as disk:
        disk.lock()
        assert invoke("hub", "restore", "--data", str(tmp_path)).exit_code == 1
    assert ids(tmp_path) == before


def test_restore_is_rejected_while_a_hub_uses_the_directory(invoke: Invoke, tmp_path: Path):
    data = tmp_path / "data"
    with started(data) as hub:
        result = invoke("hub", "restore", "--data", str(data))
        assert (result.exit_code, hub.process.poll()) == (1, None)
        assert f"a hub is running in {data}" in result.output
        assert hub.stop()[0] == 0
    before, restored = ids(data)
    assert not restored
    assert invoke("hub", "restore", "--data", str(data)).exit_code == 0
    after, restored = ids(data)
    assert is_former(before, after)
    assert restored


def test_a_directory_without_a_log_is_reported_and_left_empty(invoke: Invoke, tmp_path: Path):
    data = tmp_path / "empty"
    data.mkdir()
    assert invoke("hub", "restore", "--data", str(data)).exit_code == 1
    assert not list(data.iterdir())
