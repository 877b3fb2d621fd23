from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fordstone.errors import ConfigError
from fordstone.spark.session import shipping
from fordstone.spark.session.shipping import belonging, packed


def module(name: str, *, file: Path | None = None, path: Path | None = None) -> ModuleType:
    made = ModuleType(name)
    made.__file__ = str(file) if file is not None else None
    if path is not None:
        made.__path__ = [str(path)]
    return made


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A pipeline's file with modules beside it, environments below it, and things that are no code."""
    for name in ("flow.py", "beside.py", "not-a-module.py", "parts/__init__.py", "parts/deep/lazy.py", "spaces/one.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"name = {name!r}\n")
    for name in (".venv/lib/polars.py", "env/pyvenv.cfg", "env/lib/polars.py", "fordstone/errors.py", "parts/data.bin"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def names(place: Path, modules: dict[str, ModuleType]) -> list[str]:
    return [path.relative_to(place).as_posix() for path in belonging(place / "flow.py", modules)]


def test_everything_belongs_to_the_file_that_could_be_imported_from_beside_it(place: Path):
    assert names(place, {}) == ["beside.py", "flow.py", "parts/__init__.py", "parts/deep/lazy.py", "spaces/one.py"]


def test_beside_very_much_only_what_was_imported_belongs_to_the_file(place: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shipping, "LOOKED_AT_MAX", 3)
    assert names(place, {}) == ["flow.py"]
    library = place / "env" / "lib"
    loaded = {
        "flow": module("flow", file=place / "flow.py"),
        "parts": module("parts", file=place / "parts" / "__init__.py", path=place / "parts"),
        "spaces": module("spaces", path=place / "spaces"),
        "spaces.one": module("spaces.one", file=place / "spaces" / "one.py"),
        "polars": module("polars", file=library / "polars.py"),
        "fordstone": module("fordstone", path=place / "fordstone"),
        "native": module("native", file=place / "native.so"),
        "sys": sys,
    }
    assert names(place, loaded) == ["flow.py", "parts/__init__.py", "parts/deep/lazy.py", "spaces/one.py"]


def test_an_archive_can_be_imported_from_and_the_same_files_give_the_same_bytes(place: Path, tmp_path: Path):
    files = [place / "flow.py", place / "parts" / "__init__.py", place / "parts" / "deep" / "lazy.py"]
    data = packed(place, files)
    files[0].touch()
    assert packed(place, files) == data
    (tmp_path / "sent.zip").write_bytes(data)
    code = "import flow, parts.deep.lazy; print(flow.name, parts.deep.lazy.name)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd="/",
        env={"PYTHONPATH": str(tmp_path / "sent.zip")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "flow.py parts/deep/lazy.py\n"


def test_more_than_anybody_can_mean_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shipping, "SHIPPED_BYTES_MAX", 10)
    with pytest.raises(ConfigError, match="too many to send to Spark's workers"):
        packed(place, [place / "flow.py"])
