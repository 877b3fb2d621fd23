from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.place import Invoke


def test_a_file_that_is_not_there_is_a_misuse_that_says_where_it_looked(invoke: Invoke, place: Path):
    result = invoke("run", "nowhere.py")
    assert result.exit_code == 2
    assert result.stderr == f"error: nowhere.py does not exist (working directory {place}).\n"


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("in", "in is a directory"),
        ("in/a.jsonl", "is not a Python file"),
        ("flow.py:2x", "not the name of a variable"),
        ("flow.py:q", "flow.py: there is no q. Choose one:\n    flow.py:p    (pipeline cold-chain)"),
        ("flow.py:readings", "readings is a Stream, not a pipeline"),
    ],
)
def test_a_target_that_cannot_be_meant_says_what_there_is(invoke: Invoke, target: str, said: str):
    result = invoke("explain", target)
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_file_without_a_pipeline_shows_how_to_declare_one(invoke: Invoke, place: Path):
    (place / "empty.py").write_text("x = 1\n")
    result = invoke("run", "empty.py")
    assert result.exit_code == 2
    assert "empty.py has no pipeline" in result.stderr
    assert 'p = Pipeline("hello")' in result.stderr


def test_of_several_pipelines_one_must_be_named(invoke: Invoke, place: Path):
    text = (place / "flow.py").read_text()
    (place / "two.py").write_text(text + 'q = Pipeline("other")\nsame = p\n')
    result = invoke("explain", "two.py")
    assert result.exit_code == 2
    assert "two.py:p    (pipeline cold-chain)" in result.stderr
    assert "two.py:q    (pipeline other)" in result.stderr
    assert invoke("explain", "two.py:p").exit_code == 0


def test_one_pipeline_under_two_names_is_one(invoke: Invoke, place: Path):
    (place / "flow.py").write_text((place / "flow.py").read_text() + "same = p\n")
    assert invoke("explain", "flow.py").exit_code == 0


def test_a_wrong_column_shows_a_caret_and_the_line_of_the_file_but_no_traceback(invoke: Invoke, place: Path):
    (place / "flow.py").write_text((place / "flow.py").read_text().replace('"temp > 20"', '"tmep > 20"'))
    result = invoke("run", "flow.py")
    assert result.exit_code == 1
    assert "there is no column 'tmep'" in result.stderr
    assert "  tmep > 20\n  ^" in result.stderr
    assert f'in {place}/flow.py, line 10:\n    readings.filter("tmep > 20")' in result.stderr
    assert "Traceback" not in result.stderr
    assert 'File "' not in result.stderr


def test_a_syntax_error_is_shown_without_our_frames(invoke: Invoke, place: Path):
    (place / "broken.py").write_text("p = (\n")
    result = invoke("run", "broken.py")
    assert result.exit_code == 1
    assert "broken.py is not valid Python" in result.stderr
    assert "'(' was never closed" in result.stderr
    assert "loading.py" not in result.stderr


def test_an_exception_in_the_file_is_traced_in_their_files_only(invoke: Invoke, place: Path):
    (place / "beside.py").write_text("import json\n\ndef read():\n    return json.loads('{')\n")
    (place / "raising.py").write_text("import beside\nbeside.read()\n")
    result = invoke("run", "raising.py")
    assert result.exit_code == 1
    assert "raising.py raised an exception while it was loaded" in result.stderr
    assert 'raising.py", line 2, in <module>' in result.stderr
    assert 'beside.py", line 4, in read' in result.stderr
    assert "JSONDecodeError: " in result.stderr
    assert "fordstone/cli" not in result.stderr
    assert "json/decoder.py" not in result.stderr


def test_an_exception_of_ours_while_their_file_is_loaded_asks_for_a_report(
    invoke: Invoke, place: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("fordstone.api.graph.derive", None)
    result = invoke("run", "flow.py")
    assert result.exit_code == 1
    assert "TypeError: 'NoneType'" in result.stderr
    assert "fordstone/api/graph.py" in result.stderr
    assert "This is a bug in fordstone" in result.stderr


def test_a_file_that_exits_is_an_error_and_not_an_exit(invoke: Invoke, place: Path):
    (place / "leaving.py").write_text("import sys\nsys.exit(0)\n")
    result = invoke("run", "leaving.py")
    assert result.exit_code == 1
    assert "SystemExit" in result.stderr


@pytest.mark.parametrize("stem", ["json", "polars", "fordstone"])
def test_a_file_named_like_a_module_is_refused(invoke: Invoke, place: Path, stem: str):
    (place / f"{stem}.py").write_text((place / "flow.py").read_text())
    result = invoke("run", f"{stem}.py")
    assert result.exit_code == 2
    assert f"another module named '{stem}'" in result.stderr


def test_functions_of_the_file_have_import_paths(invoke: Invoke, place: Path):
    text = (place / "flow.py").read_text()
    (place / "steps.py").write_text(
        text
        + "\ndef warm(row):\n    return row\n\nreadings.map(warm).sink('warm', files('out/warm', format='jsonl'))\n"
    )
    result = invoke("explain", "steps.py", "--format", "json")
    assert [step["path"] for step in json.loads(result.stdout)["steps"] if step["op"] == "function"] == ["steps:warm"]
