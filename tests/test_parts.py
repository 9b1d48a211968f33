"""Parts of a suite (`tests/parts.py`)."""

from __future__ import annotations

import pytest

from tests.parts import RUN, part_of


@pytest.mark.parametrize("parts", [1, 3, 8])
def test_each_test_is_in_one_part(parts: int) -> None:
    tests = range(10 * RUN + 5)
    dealt = [part_of(tests, f"{number}/{parts}") for number in range(1, parts + 1)]
    assert sorted(test for part in dealt for test in part) == [*tests]
    assert dealt[0][:RUN] == [*range(RUN)]


@pytest.mark.parametrize("part", ["0/3", "4/3", "3", "a/b", "1/0", ""])
def test_a_part_that_there_is_not_is_refused(part: str) -> None:
    with pytest.raises(ValueError, match="write K/N"):
        part_of([1], part)
