from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.errors import escape_control, escape_control_lines


@given(st.text())
def test_whatever_comes_stays_on_its_line_and_moves_no_cursor(text: str) -> None:
    line = escape_control(text)
    assert len(line.splitlines()) <= 1
    assert all(ord(c) >= 32 and not 0x7F <= ord(c) < 0xA0 for c in line)
    assert escape_control(line) == line


def test_words_in_any_script_are_left_alone() -> None:
    assert escape_control("Zürich 東京 €5 😀 \\n") == "Zürich 東京 €5 😀 \\n"


@given(st.text())
def test_every_line_of_a_block_is_indented(text: str) -> None:
    assert all(line.startswith("    ") for line in escape_control_lines(text).splitlines())
