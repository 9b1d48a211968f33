"""docs/guides/models.md and quantization.md: complete, and their tables of errors current."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quire.models.registry import ARCHITECTURES
from quire.weights.file_types import FILE_TYPES
from quire.weights.gguf import KINDS
from quire.weights.gguf_names import FAMILIES
from quire.weights.schemes import ONLINE, READERS
from tests.checkpoints import SHAPES
from tests.encoders import FAMILIES as POOLING
from tests.models.errors import (
    DTYPES,
    PAGES,
    canaries,
    families,
    names_by_type,
    part,
    pooled_errors,
    pooling_names,
    table,
)

TEXT = "\n".join(page.read_text("utf-8") for page in PAGES.values())


@pytest.mark.parametrize("name", [*ARCHITECTURES, *ONLINE, *READERS, *(kind.name for kind in KINDS.values())])
def test_everything_that_can_be_loaded_is_documented(name: str) -> None:
    assert re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", TEXT)


def test_the_table_of_families_is_what_the_registry_and_the_checkpoints_say() -> None:
    page = PAGES["errors"].read_text("utf-8")
    table, pooling = part(page, "families"), part(page, "pooling")
    assert table == families(page)
    assert all(f"`{name}`" in table + pooling for name in (*ARCHITECTURES, *FAMILIES))
    for line in table.splitlines()[2:]:
        _, _, _, count, error, *_ = (cell.strip() for cell in line.split("|"))
        assert (int(count) >= 3 and float(error) < 1e-4) if count.isdecimal() else not error


def test_the_table_of_pooling_families_has_every_checkpoint_with_errors_that_are_small() -> None:
    rows = cells(part(PAGES["pooling"].read_text("utf-8"), "pooling"))
    named = [name if name == each.model_type else f"{each.model_type} ({name})" for name, each in POOLING.items()]
    assert [row[0] for row in rows[2:]] == named
    own = names_by_type()
    for row, family in zip(rows[2:], POOLING.values(), strict=True):
        assert row[1] == ", ".join(f"`{name}`" for name in pooling_names(family.model_type, own))
        assert float(row[3]) < 1e-4 < float(row[5]) < float(row[4]) < 0.3


def test_a_line_of_pooling_families_is_made_anew(tmp_path: Path) -> None:
    exact, half, narrow = pooled_errors(tmp_path, "bert", 3)
    assert exact < 1e-5 < narrow < half < 0.3


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_the_table_has_every_architecture_every_dtype_and_errors_that_are_small() -> None:
    rows = cells(TEXT.partition("<!-- errors -->\n")[2].partition("<!-- /errors -->")[0])
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


@pytest.mark.nightly
def test_what_is_stated_of_quantised_models_is_so() -> None:
    """Up to what the rounding of another machine may move, of a few hundred tokens."""
    stated = cells(TEXT.partition("<!-- canaries -->\n")[2].partition("<!-- /canaries -->")[0])
    found = cells(canaries([*FILE_TYPES]))
    assert [row[0] for row in stated] == [row[0] for row in found]
    for (name, share, kl, _), (_, now, kl_now, _) in zip(stated[2:], found[2:], strict=True):
        assert abs(float(share.removesuffix(" %")) - float(now.removesuffix(" %"))) < 3, name
        assert float(kl_now) < 2 * float(kl) + 1e-6, name
