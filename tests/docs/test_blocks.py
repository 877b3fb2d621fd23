"""The runner of code blocks notices what is wrong with a page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.docs.blocks import REPOSITORY, Page, commands_of, fits


def run(page: str, directory: Path) -> None:
    with Page(name="page.md", directory=directory) as runner:
        runner.run_all(page)


def test_blocks_of_a_page_share_names(tmp_path):
    run("```python\nx = 2\n```\n\n```python\nassert x == 2\n```\n", tmp_path)


def test_an_exception_fails_the_page_and_names_its_line(tmp_path):
    with pytest.raises(ZeroDivisionError) as raised:
        run("one\ntwo\n\n```python\nx = 1\nx / 0\n```\n", tmp_path)
    assert raised.traceback[-1].lineno + 1 == 6


def test_printed_text_is_compared_with_the_block_below(tmp_path):
    run("```python\nprint(1)\n```\n\n```text\n1\n```\n", tmp_path)
    with pytest.raises(AssertionError, match=r"page.md:2 shows"):
        run("```python\nprint(1)\n```\n\n```text\n2\n```\n", tmp_path)


def test_text_after_a_sentence_is_not_output(tmp_path):
    run("```python\nprint(1)\n```\n\nA drawing:\n\n```text\n2\n```\n", tmp_path)


def test_a_block_with_a_file_name_is_saved(tmp_path):
    run(
        "```python\n# sub/one.py\nx = 1\n```\n\n```console\n$ python sub/one.py\n$ cat sub/one.py\n# sub/one.py\nx = 1\n```\n",
        tmp_path,
    )


def test_a_command_that_fails_fails_the_page(tmp_path):
    with pytest.raises(AssertionError, match="ended with 3"):
        run("```console\n$ exit 3\n```\n", tmp_path)


@pytest.mark.parametrize("command", ["python examples/word_count.py", "./scripts/test", "head -n 1 README.md"])
def test_a_page_that_needs_a_file_of_the_repository_fails(command: str, tmp_path):
    assert (REPOSITORY / re.split(r"(?:python |-n 1 )", command)[-1]).exists()
    with pytest.raises(AssertionError, match=r"ended with (1|2|127):"):
        run(f"```console\n$ {command}\n```\n", tmp_path)


def test_a_command_that_should_end_with_a_code_but_does_not_fails_the_page(tmp_path):
    run("```console ends 3\n$ exit 3\n```\n", tmp_path)
    with pytest.raises(AssertionError, match="ended with 0"):
        run("```console ends 3\n$ true\n```\n", tmp_path)
    with pytest.raises(AssertionError, match="ended with 2"):
        run("```console ends 3\n$ exit 2\n```\n", tmp_path)


def test_a_command_of_fordstone_does_the_same_in_this_process_as_in_a_shell(tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    shown = "fordstone explain broken.py{}\nerror: …broken.py raised an exception while it was loaded.\n...\n"
    run(f"```console ends 1\n$ {shown.format('')}```\n", tmp_path)
    run(f"```console ends 1\n$ {shown.format('; exit $?')}```\n", tmp_path)
    with pytest.raises(AssertionError, match="ended with 1:\nerror: "):
        run("```console\n$ fordstone explain broken.py\n```\n", tmp_path)


def test_commands_may_go_over_several_lines():
    first, second = commands_of("$ cat <<EOF\n> one\n> EOF\none\n$ true\n")
    assert (first.text, first.shown) == ("cat <<EOF\none\nEOF", "one")
    assert (second.text, second.shown) == ("true", None)


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("a\nb", "a\nb\n", True),
        ("a", "a\nb\n", False),
        ("a\nb", "a\n", False),
        ("a\n...\nd", "a\nb\nc\nd\n", True),
        ("a\n...\nd", "a\nd\n", True),
        ("...\nd", "a\nb\n", False),
        ("took … ms", "took 12.5 ms\n", True),
        ("took … ms", "took 12.5 s\n", False),
        ("x…", "x\ny\n", False),
        ("a.c", "abc\n", False),
    ],
)
def test_wildcards_stand_for_lines_and_for_characters_in_a_line(shown: str, printed: str, *, same: bool):
    assert fits(shown, printed) is same
