"""Two hubs never share a blob store: each removes what its own log does not know."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import fsspec
import pytest
from tests.hub.started import SECONDS_MAX, start, started

from fordstone.errors import ConfigError, StorageError
from fordstone.hub.store.blobs import ID_NAME, claim


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"memory://{uuid4()}/hub" if request.param == "memory" else (tmp_path / "store").as_uri()


def test_a_store_belongs_to_the_hub_that_came_first_and_to_it_again_after_a_restart(tmp_path: Path, url: str) -> None:
    claim(url, tmp_path / "a")
    claim(url, tmp_path / "a")
    with pytest.raises(ConfigError, match="another hub"):
        claim(url, tmp_path / "b")
    claim(url, tmp_path / "a")


def test_the_id_is_beside_the_blobs_even_if_the_path_has_a_space(tmp_path: Path) -> None:
    claim((tmp_path / "the store").as_uri(), tmp_path / "a")
    assert (tmp_path / "the store" / ID_NAME).exists()


def test_a_hub_may_move_to_another_store(tmp_path: Path, url: str) -> None:
    claim(url, tmp_path / "a")
    claim(f"{url}-new", tmp_path / "a")


def test_a_data_directory_that_was_brought_back_still_has_its_store(tmp_path: Path, url: str) -> None:
    claim(url, tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "copy")
    claim(url, tmp_path / "copy")


def test_a_damaged_name_is_reported_and_not_created_again(tmp_path: Path, url: str) -> None:
    claim(url, tmp_path / "a")
    (tmp_path / "a" / ID_NAME).write_text("")
    with pytest.raises(StorageError, match="damaged"):
        claim(url, tmp_path / "a")


def test_a_store_out_of_reach_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object, **__: object) -> bytes:
        raise TimeoutError("no answer")

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "cat_file", away)
    with pytest.raises(StorageError, match="no answer"):
        claim("memory://x/hub", tmp_path)


@pytest.mark.slow
def test_a_second_hub_over_the_same_store_does_not_start(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    with started(tmp_path / "a", "--blobs", store):
        second = start(tmp_path / "b", "--blobs", store)
        _, errors = second.communicate(timeout=SECONDS_MAX)
    assert second.returncode not in {0, None}
    assert "belongs to another hub" in errors
    assert "Traceback" not in errors
