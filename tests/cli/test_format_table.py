from __future__ import annotations

from fordstone.cli.format import Table


def test_columns_are_aligned_and_no_line_ends_with_blanks():
    table = Table(head=["name", "size", ""], rows=[["a", "1", ""], ["long", "200", "x"]], right=(1,))
    assert table.text().splitlines() == ["name  size", "a        1", "long   200  x"]
    assert table.text("  ").splitlines()[0] == "  name  size"


def test_a_table_without_names_has_no_head():
    assert Table(head=["", ""], rows=[["a", "1"], ["bc", "2"]]).text().splitlines() == ["a   1", "bc  2"]


def test_wide_characters_take_two_cells():
    table = Table(head=["name", "n"], rows=[["\u6c34\u6c34\u6c34", "1"], ["abcdef", "2"]])
    assert [line.rstrip()[-3:] for line in table.text().splitlines()[1:]] == ["  1", "  2"]


def test_a_table_without_rows_is_a_sentence_if_it_has_one():
    assert Table(head=["a"], rows=[], empty="Nothing yet.").text() == "Nothing yet."
    assert Table(head=["a"], rows=[]).text() == "a"


def test_a_table_for_a_terminal_is_cut_to_its_width():
    table = Table(head=["name", "problem"], rows=[["a", "x" * 50]], styles=["red"])
    assert table.styled(20).plain.splitlines() == ["name  problem", f"a     {'x' * 13}\u2026"]
    assert table.styled().plain.splitlines()[1] == f"a     {'x' * 50}"
