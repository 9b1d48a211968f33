"""Private words of early versions stay out of code and documentation: the field's term is used instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import words


def test_no_withdrawn_word_is_in_code_or_documentation() -> None:
    assert not list(words.found(words.files(words.ROOT / name for name in words.WHERE)))


@pytest.mark.parametrize("line", ["def is_told(self):", "class HouseRules:", "goes_home = 1", "# the rim"])
def test_words_are_found_in_prose_and_in_names(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "ROOT", tmp_path)
    (tmp_path / "a.py").write_text(f"fine = 1\n{line}\n")
    [use] = words.found(words.files(iter([tmp_path])))
    assert use.startswith("a.py:2: ")


@pytest.mark.parametrize("line", ["trim(x)", "household", "laned_out", "indoors"])
def test_other_words_that_contain_them_are_not(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "ROOT", tmp_path)
    (tmp_path / "a.py").write_text(line)
    assert not list(words.found(words.files(iter([tmp_path]))))
