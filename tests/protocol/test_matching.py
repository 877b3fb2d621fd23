from __future__ import annotations

from fordstone.protocol.recovery import match_plan


def test_equal_steps_match_whole():
    match = match_plan({"a": "1", "b": "2"}, {"b": "2", "a": "1"})
    assert match.whole
    assert match.same == ("a", "b")


def test_what_changed_went_and_came_is_named_with_what_would_be_dropped():
    match = match_plan({"kept": "1", "changed": "2", "gone": "3"}, {"kept": "1", "changed": "x", "new": "4"})
    assert not match.whole
    assert (match.same, match.changed, match.gone, match.new) == (("kept",), ("changed",), ("gone",), ("new",))
    text = match.explain()
    assert "matches: kept" in text
    assert "drop the state of: changed, gone." in text
    assert "begin with empty state: changed, new." in text
