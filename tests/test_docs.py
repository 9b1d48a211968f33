"""What is written from the code is current, and links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

import quire.config.document as configuration
import quire.observe.document as metrics
import quire.server.document as requests

ROOT = Path(__file__).parents[1]
PAGES = (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))


@pytest.mark.parametrize("page", [configuration, requests, metrics], ids=["configuration", "requests", "metrics"])
def test_what_is_written_from_the_code_is_current(page: ModuleType, request: pytest.FixtureRequest) -> None:
    written = ROOT / f"docs/{request.node.callspec.id}.md"
    assert written.read_text(encoding="utf-8") == page.markdown(), "run `make docs`"


@pytest.mark.parametrize("page", sorted(str(path.relative_to(ROOT)) for path in PAGES))
def test_links_between_pages_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if not re.match(r"[a-z]+:", target):
            assert ((ROOT / page).parent / target).exists(), target
