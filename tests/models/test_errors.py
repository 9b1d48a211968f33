"""docs/models.md: complete, and its table of errors of today's making."""

from __future__ import annotations

import re

import pytest

from quire.models.registry import ARCHITECTURES
from quire.weights.gguf import KINDS
from quire.weights.schemes import ONLINE, READERS
from tests.checkpoints import SHAPES
from tests.models.errors import BEGIN, DTYPES, END, PAGE, table

TEXT = PAGE.read_text("utf-8")


@pytest.mark.parametrize("name", [*ARCHITECTURES, *ONLINE, *READERS, *(kind.name for kind in KINDS.values())])
def test_whatever_is_read_is_told(name: str) -> None:
    assert re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", TEXT)


def test_the_table_has_every_architecture_every_dtype_and_errors_that_are_small() -> None:
    lines = TEXT.partition(BEGIN)[2].partition(END)[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert rows[0] == ["`model_type`", "shapes", "deviation", *DTYPES]
    families = [shape.split("-")[0] for shape in SHAPES]
    assert {row[0]: int(row[1]) for row in rows[2:]} == {family: families.count(family) for family in families}
    assert min(families.count(family) for family in families) >= 3
    assert all(float(row[2]) >= 1 and float(row[3]) < 1e-4 for row in rows[2:])


def test_a_line_of_it_is_made_anew() -> None:
    line = table(["gemma2-gqa"]).splitlines()[-1]
    family, shapes, deviation, exact, half, narrow = (cell.strip() for cell in line.strip("|").split("|"))
    assert (family, shapes) == ("gemma2", "1")
    assert float(deviation) >= 1
    assert float(exact) < 1e-4 < float(narrow.split()[0]) < float(half.split()[0]) < 0.3
