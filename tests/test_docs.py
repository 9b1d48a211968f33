"""What is written from the code is current, and links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quire.config.document import markdown

ROOT = Path(__file__).parents[1]
PAGES = (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))


def test_the_configuration_page_is_current() -> None:
    assert (ROOT / "docs/configuration.md").read_text(encoding="utf-8") == markdown(), "run `make docs`"


@pytest.mark.parametrize("page", sorted(str(path.relative_to(ROOT)) for path in PAGES))
def test_links_between_pages_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if not re.match(r"[a-z]+:", target):
            assert ((ROOT / page).parent / target).exists(), target
