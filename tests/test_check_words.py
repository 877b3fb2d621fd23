"""The check of words: what it finds, and where it looks."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_words", ROOT / "scripts" / "check_words.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rows behind the mark", ["behind"]),
        ("the node lags behind, furthest behind by ten", []),
        ("self._let_go(cuts)", ["let_go"]),
        ("test_rows_behind_the_mark", ["behind"]),
        ("test_ids_are_left_behind, test_it_leaves_nothing_behind, test_the_furthest_behind", []),
        ("told, untold, TOLD", ["told", "TOLD"]),
        ("one row a key, one row at a time, one row after", ["one row a"]),
        ("so\nmany", ["so\nmany"]),
    ],
)
def test_the_check_of_words_finds_them_in_names_and_prose(text: str, words: list[str]) -> None:
    assert [word for _, word in script().found_in(text)] == words


def test_code_tests_and_documentation_are_checked() -> None:
    checked = {file.relative_to(ROOT).parts[0] for file in script().files()}
    assert checked >= {"src", "tests", "bench", "examples", "scripts", "docs", "README.md"}
